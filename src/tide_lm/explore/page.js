const numbers = (data) => Object.fromEntries(Object.entries(data).map(([name, value]) => [name, Number(value)]));
const places = (button) => [...(button.closest(".tokens")?.querySelectorAll("[data-place]") ?? [])];
const reach = (button, all) => {
  all.forEach((other) => { other.tabIndex = -1; });
  button.tabIndex = 0;
};
element.addEventListener("click", (event) => {
  const button = event.target.closest("button, [role=button]");
  if (!button) return;
  if ("stop" in button.dataset) {
    button.remove();
    trigger("stop", numbers(button.dataset));
    return;
  }
  if ("place" in button.dataset) window.tokenChosen = true;
  const all = places(button);
  all.forEach((other) => { other.setAttribute("aria-pressed", other === button); });
  reach(button, all);
  trigger("select", numbers(button.dataset));
});
element.addEventListener("keydown", (event) => {
  const all = places(event.target), at = all.indexOf(event.target);
  if (at >= 0 && (event.key === "Enter" || event.key === " ")) {
    event.preventDefault();
    event.target.click();
    return;
  }
  const next = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 };
  const target = at < 0 ? undefined : all[next[event.key]];
  if (!target) return;
  event.preventDefault();
  reach(target, all);
  target.focus();
});
// What is told of a token that was chosen comes into view.
new MutationObserver(() => {
  const heading = element.querySelector("h2.token");
  if (!window.tokenChosen || !heading?.checkVisibility()) return;
  window.tokenChosen = false;
  if (heading.getBoundingClientRect().bottom > innerHeight * .9) heading.scrollIntoView({ block: "center" });
}).observe(element, { characterData: true, childList: true, subtree: true });
