// What the open tab shows stands in the address after #, so that a copied link shows it again.
const LONGEST_LINKED = 20000; // characters of a text; of a tab with a longer one nothing is linked
const { tab: opened = null, ...given } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const known = { [opened]: given };
let open = opened;
window.show = (tab) => {
  open = tab;
  const isShort = Object.values(known[tab] ?? {}).every((value) => String(value).length <= LONGEST_LINKED);
  history.replaceState(null, "", `#${new URLSearchParams({ tab, ...(isShort && known[tab]) })}`);
};
window.remember = (tab, changes) => {
  const isThere = ([, value]) => value !== null && value !== undefined;
  known[tab] = Object.fromEntries(Object.entries({ ...known[tab], ...changes }).filter(isThere));
  if (tab === (open ?? tab)) show(tab);
};
window.recall = (names, now, shades) => names.map((name, at) => {
  if (!(name in given) || (name === "shade" && !shades.includes(given.shade))) return now[at];
  if (typeof now[at] === "string") return given[name];
  return given[name] !== "" && Number.isFinite(Number(given[name])) ? Number(given[name]) : now[at];
});
window.reopen = () => {
  const is = (tab) => tab.textContent.trim().toLowerCase() === opened;
  [...document.querySelectorAll("[role=tab]")].find(is)?.click();
  const ask = (left) => { // a tab is made when it is first opened
    const button = document.querySelector(`#${CSS.escape(`${opened}-asked`)}`);
    if (button) button.click();
    else if (left) setTimeout(ask, 100, left - 1);
  };
  ask(600);
};
window.addEventListener("hashchange", () => location.reload());
