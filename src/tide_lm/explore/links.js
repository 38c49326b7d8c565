// What the open tab shows stands in the address after #, so that a copied link shows it again.
const LONGEST_LINKED = 20000; // characters of a text
const { tab: opened = null, ...given } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const known = { [opened]: given };
let open = opened;
window.show = (tab) => {
  open = tab;
  history.replaceState(null, "", `#${new URLSearchParams({ tab, ...known[tab] })}`);
};
window.remember = (tab, changes) => {
  const fits = ([, value]) => value !== null && value !== undefined && String(value).length <= LONGEST_LINKED;
  known[tab] = Object.fromEntries(Object.entries({ ...known[tab], ...changes }).filter(fits));
  if (tab === (open ?? tab)) show(tab);
};
window.recall = (names, now) => names.map((name, at) => {
  if (!(name in given)) return now[at];
  if (typeof now[at] === "string") return given[name];
  return given[name] !== "" && Number.isFinite(Number(given[name])) ? Number(given[name]) : now[at];
});
window.reopen = () => {
  const is = (tab) => tab.textContent.trim().toLowerCase() === opened;
  [...document.querySelectorAll("[role=tab]")].find(is)?.click();
  setTimeout(() => document.querySelector(`#${CSS.escape(`${opened}-asked`)}`)?.click(), 300);
};
window.addEventListener("hashchange", () => location.reload());
