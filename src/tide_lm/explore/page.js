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
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const all = places(), at = all.indexOf(event.target);
  if (!step || at < 0 || !all[at + step]) return;
  event.preventDefault();
  all[at].tabIndex = -1;
  all[at + step].tabIndex = 0;
  all[at + step].focus();
});
