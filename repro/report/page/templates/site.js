"use strict";
/* Filters of the claims and of the experiments, and the table of experiments, of which only the rows in view exist. */
const form = document.getElementById("filters"), fields = [...form.elements].filter((one) => one.name);
const dialog = document.getElementById("record");
const ROW_PX = 48; /* as in style.css */

function accepts(text, values) {
  return fields.every((one) => !one.value || (one.name === "text"
    ? text.includes(one.value.trim().toLowerCase()) : String(values[one.name]).split("|").includes(one.value)));
}

function claims() {
  const rows = [...document.querySelectorAll("tr[data-verdict]")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  return function apply() {
    rows.forEach((row, place) => { row.hidden = !accepts(texts[place], row.dataset); });
    document.querySelectorAll("tbody").forEach((group) => {
      group.hidden = !group.querySelector("tr[data-verdict]:not([hidden])");
    });
    return `${rows.filter((row) => !row.hidden).length} of ${rows.length} claims`;
  };
}

function element(tag, text, values) {
  const made = Object.assign(document.createElement(tag), values);
  made.append(...[text].flat());
  return made;
}

function experiments() {
  const all = STORE.rows.map((row) => Object.fromEntries(STORE.keys.map((key, place) => [key, row[place]])));
  const texts = new Map(all.map((row) => [row, Object.values(row).join(" ").toLowerCase()]));
  const view = document.getElementById("records"), body = view.querySelector("tbody");
  const heads = [...view.querySelectorAll("th")];
  let shown = all, key = "", down = 1;

  function line(row) {
    const cells = heads.map((head) => {
      const value = row[head.className];
      if (head.className !== "name") return element("td", value === null ? "–" : String(value), { className: head.className });
      const link = element("a", value, { href: "#" + encodeURIComponent(row.anchor) });
      return element("td", [link, element("span", row.suite, { className: "scale" })], { className: "name" });
    });
    return element("tr", cells);
  }
  function draw() {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW_PX) - 5), focus = document.activeElement.hash;
    const part = shown.slice(first, first + Math.ceil(innerHeight / ROW_PX) + 10);
    const space = (count) => { const row = element("tr", []); row.style.height = count * ROW_PX + "px"; return row; };
    body.replaceChildren(space(first), ...part.map(line), space(shown.length - first - part.length));
    const link = focus && [...body.querySelectorAll("a")].find((one) => one.hash === focus);
    if (link) link.focus({ preventScroll: true });
  }
  function order(one, other) {
    const [a, b] = [one[key], other[key]];
    if (a === null || b === null) return (a === null) - (b === null);
    return down * (typeof a === "number" ? a - b : a.localeCompare(b, undefined, { numeric: true }));
  }
  function open(row) {
    const columns = heads.slice(2).map((head) => [head.textContent, row[head.className]]);
    const texts = row.facts.map((text, place) => [STORE.labels[row.evidence][place], text]);
    const facts = [...columns, ...texts].filter(([, text]) => text !== "" && text !== null)
      .flatMap(([label, text]) => [element("dt", label), element("dd", String(text))]);
    const link = (text, href) => [element("a", text, { href }), " "];
    if (row.machine <= STORE.machines) {
      facts.push(element("dt", "Machine"), element("dd", link(row.machine, `machines.html#machine-${row.machine}`)));
    }
    if (row.claims.length) {
      const links = row.claims.flatMap((claim) => link(claim, `claims/${claim}.html`));
      facts.push(element("dt", "Read by claims"), element("dd", links));
    }
    dialog.querySelector("h2").textContent = `${row.name}, ${row.evidence}`;
    dialog.querySelector("dl").replaceChildren(...facts);
    view.scrollTop = Math.max(0, shown.indexOf(row) - 3) * ROW_PX;
    if (!dialog.open) dialog.showModal();
  }

  view.addEventListener("scroll", draw);
  window.addEventListener("resize", draw);
  dialog.addEventListener("close", () => history.replaceState(null, "", "#" + chosen()));
  view.querySelector("thead").addEventListener("click", (event) => {
    if (!event.target.value) return;
    down = key === event.target.value ? -down : 1;
    key = event.target.value;
    heads.forEach((head) => {
      head.setAttribute("aria-sort", head.className !== key ? "none" : down > 0 ? "ascending" : "descending");
    });
    update();
  });
  return function apply() {
    shown = all.filter((row) => accepts(texts.get(row), row));
    if (key) shown.sort(order);
    view.scrollTop = 0;
    draw();
    const asked = all.find((row) => row.anchor === decodeURIComponent(location.hash.slice(1)));
    if (asked) open(asked); else dialog.close();
    return `${shown.length} of ${all.length} experiments`;
  };
}

/* The part of the address after # holds the filters, so that links and the back button lead to a filtered page. */
function chosen() {
  return new URLSearchParams(fields.filter((one) => one.value).map((one) => [one.name, one.value])).toString();
}
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (fields.some((one) => asked.has(one.name))) fields.forEach((one) => { one.value = asked.get(one.name) || ""; });
  update();
}
const apply = dialog ? experiments() : claims();
function update() {
  document.getElementById("count").textContent = apply();
}
form.hidden = false;
form.addEventListener("submit", (event) => event.preventDefault());
function change() {
  history.replaceState(null, "", "#" + chosen());
  update();
}
form.addEventListener("input", change);
form.addEventListener("reset", (event) => {
  event.preventDefault();
  fields.forEach((one) => { one.value = ""; });
  change();
});
window.addEventListener("hashchange", follow);
follow();
