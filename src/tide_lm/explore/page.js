const places = () => [...element.querySelectorAll("button[data-place]")];
const choose = (button) => {
  places().forEach((other) => { other.setAttribute("aria-pressed", "false"); other.tabIndex = -1; });
  button.setAttribute("aria-pressed", "true");
  button.tabIndex = 0;
  trigger("select", { place: Number(button.dataset.place) });
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-place]");
  if (button) choose(button);
});
element.addEventListener("keydown", (event) => {
  const all = places(), at = all.indexOf(event.target);
  const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
  const target = at < 0 ? undefined : all[next[event.key]];
  if (!target) return;
  event.preventDefault();
  all[at].tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
});
