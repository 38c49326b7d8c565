const all = (what, within = document) => [...within.querySelectorAll(what)];

// The contents are folded on a phone, and tell where the reader is elsewhere.
const contents = document.getElementById("contents"), wide = matchMedia("(min-width: 60.01rem)");
const fold = () => { contents.open = wide.matches; };
wide.addEventListener("change", fold);
fold();
const links = all("a", contents);
contents.addEventListener("click", event => { if (event.target.matches("a")) fold(); });
const here = () => {
  const passed = links.filter(link => document.querySelector(link.hash).getBoundingClientRect().top < innerHeight / 3);
  links.forEach(link => link.removeAttribute("aria-current"));
  (passed.at(-1) ?? links[0]).setAttribute("aria-current", "true");
};
addEventListener("scroll", here, { passive: true });
here();

// A link to a folded figure opens it.
const reveal = () => {
  const found = document.getElementById(location.hash.slice(1));
  if (found?.matches("details.card")) found.open = true;
};
addEventListener("hashchange", reveal);
reveal();

// The pointer on a chart shows the row of its table that is nearest.
const tip = document.getElementById("tip");
const nearest = (cells, place) => cells.reduce((best, one) =>
  Math.abs(one.dataset.at - place) < Math.abs(best.dataset.at - place) ? one : best);
const line = (kind, text, colour) => {
  const made = document.createElement(kind);
  if (colour) made.append(Object.assign(document.createElement("i"), { style: `--colour: ${colour}` }));
  made.append(text);
  return made;
};
for (const chart of all(".chart")) {
  const drawing = chart.querySelector("svg"), table = chart.querySelector("table");
  const rows = all("tbody tr", table), [what, ...heads] = all("thead :is(th, td)", table);
  const [left, top, right, bottom] = table.dataset.frame.split(" ").map(Number);
  const guide = document.createElementNS("http://www.w3.org/2000/svg", "line");
  guide.setAttribute("class", "guide");
  const hide = () => { tip.hidden = true; guide.remove(); };
  const show = event => {
    const box = drawing.getBoundingClientRect(), { width, height } = drawing.viewBox.baseVal;
    const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
    if (!rows.length || x < left || x > right || y < top || y > bottom) return hide();
    const by = table.dataset.by, row = nearest(rows, by === "x" ? x : y), at = row.dataset.at;
    const columns = by === "xy" ? [nearest(heads, x)] : heads;
    const said = columns.map(head => [head, row.cells[head.cellIndex].textContent]).filter(([, value]) => value);
    tip.replaceChildren(line("b", [what.textContent.replace(/ \(.*/, ""), row.cells[0].textContent].filter(Boolean).join(": ")),
      ...said.map(([head, value]) => line("span", `${head.textContent}: ${value}`, head.style.getPropertyValue("--colour"))));
    tip.hidden = false;
    const aside = event.clientX + 14 + tip.offsetWidth > innerWidth ? -14 - tip.offsetWidth : 14;
    tip.style.left = `${Math.max(4, event.clientX + aside)}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4))}px`;
    if (by === "xy") return;
    const ends = by === "x" ? [at * width, top * height, at * width, bottom * height]
      : [left * width, at * height, right * width, at * height];
    ["x1", "y1", "x2", "y2"].forEach((name, place) => guide.setAttribute(name, ends[place]));
    drawing.append(guide);
  };
  drawing.addEventListener("pointermove", show);
  drawing.addEventListener("pointerdown", show);
  drawing.addEventListener("pointerleave", hide);
}

// A page that is watched loads itself again, and keeps the reader's place and what is open.
const every = Number(document.body.dataset.reload), kept = `tide ${location.pathname}`;
if (every) {
  history.scrollRestoration = "manual";
  const written = new Date(document.lastModified).toLocaleTimeString();
  document.getElementById("follows").append(` Last written at ${written}.`);
  const name = one => { const card = one.closest("[id]"); return card.id + all("details", card).indexOf(one); };
  const folds = all("main details");
  const before = JSON.parse(sessionStorage.getItem(kept) ?? "null");
  sessionStorage.removeItem(kept);
  for (const one of folds) one.open = before?.open[name(one)] ?? one.open;
  if (before) scrollTo({ top: before.top, behavior: "instant" });
  setInterval(() => {
    if (document.hidden || !tip.hidden || String(getSelection())) return;
    const open = Object.fromEntries(folds.map(one => [name(one), one.open]));
    sessionStorage.setItem(kept, JSON.stringify({ top: scrollY, open }));
    location.reload();
  }, every * 1000);
}
