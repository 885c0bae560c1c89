"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("data").textContent);
  const body = byId("table").tBodies[0];
  const columns = byId("table").tHead.rows[0].cells.length;
  const text = byId("text"), status = byId("status"), code = byId("code");
  const cards = [...document.querySelectorAll("button.card")];
  const natural = new Intl.Collator("en", { numeric: true }).compare;

  const rows = [...body.rows].map((element, index) => {
    const layer = data[index];
    const words = [...layer.names, layer.size, layer.verdict, layer.sort.type,
      layer.remedy, ...layer.facts.flat(), ...layer.reasons.flat()];
    return { element, layer, index, details: null, find: words.join("\n").toLowerCase() };
  });
  const total = rows.reduce((sum, row) => sum + row.layer.names.length, 0);
  const rowOf = new Map(rows.map((row) => [row.element, row]));

  // --- filter ---
  const passes = (row, terms) =>
    (!status.value || row.layer.status === status.value) &&
    (!code.value || row.layer.codes.includes(code.value)) &&
    terms.every((term) => row.find.includes(term));

  const filter = () => {
    const terms = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const hide = !passes(row, terms);
      if (!hide) shown += row.layer.names.length;
      if (row.element.hidden !== hide) row.element.hidden = hide;
      if (row.details && row.details.hidden !== hide) row.details.hidden = hide;
    }
    byId("none").hidden = shown > 0 || total === 0;
    byId("shown").value = shown === total
      ? `${shown.toLocaleString("en")} layers`
      : `${shown.toLocaleString("en")} of ${total.toLocaleString("en")} layers`;
    for (const card of cards) card.setAttribute("aria-pressed", card.dataset.status === status.value);
  };

  const choose = (name) => { status.value = status.value === name ? "" : name; filter(); };
  text.addEventListener("input", filter);
  status.addEventListener("change", filter);
  code.addEventListener("change", filter);
  for (const card of cards) card.addEventListener("click", () => choose(card.dataset.status));
  byId("clear").addEventListener("click", () => {
    text.value = status.value = code.value = "";
    filter();
    text.focus();
  });

  // --- sort: up, down, back to the order of the model; what is not known comes last ---
  const compare = (a, b, key, sign) => {
    const x = a.layer.sort[key], y = b.layer.sort[key];
    if (x === null || y === null) return (x === null) - (y === null) || a.index - b.index;
    return sign * (typeof x === "number" ? x - y : natural(x, y)) || a.index - b.index;
  };

  const sort = (head, key) => {
    const next = { none: "ascending", ascending: "descending", descending: "none" };
    const order = next[head.getAttribute("aria-sort")];
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", order);
    const sign = order === "descending" ? -1 : 1;
    const sorted = order === "none"
      ? rows
      : [...rows].sort((a, b) => compare(a, b, key, sign));
    const all = document.createDocumentFragment();
    for (const row of sorted) all.append(row.element, ...(row.details ? [row.details] : []));
    body.append(all);
  };

  for (const button of document.querySelectorAll("[data-sort]"))
    button.addEventListener("click", () => sort(button.parentNode, button.dataset.sort));

  // --- details: made when they are asked for, of text only ---
  const make = (tag, content, ...children) => {
    const element = document.createElement(tag);
    if (content) element.textContent = content;
    element.append(...children);
    return element;
  };

  const describe = ({ names, facts, reasons, remedy }) => [
    ...(names.length > 1
      ? [make("h3", `${names.length} layers like this one, the first of them here`),
        make("p", names.join(", "))]
      : []),
    make("dl", "", ...facts.map(([label, value]) =>
      make("div", "", make("dt", label), make("dd", value)))),
    make("h3", reasons.length === 1 ? "Reason" : "Reasons"),
    make("ol", "", ...reasons.map(([name, message, source]) =>
      make("li", "", make("code", name), ` ${message}`,
        ...(source ? [make("small", `source: ${source}`)] : [])))),
    ...(remedy ? [make("h3", "What to do"), make("div", remedy)] : []),
  ];

  const toggle = (button) => {
    const row = rowOf.get(button.closest("tr"));
    if (row.details) {
      row.details.remove();
      row.details = null;
    } else {
      const cell = make("td", "", ...describe(row.layer));
      cell.colSpan = columns;
      cell.setAttribute("role", "cell");
      row.details = make("tr", "", cell);
      row.details.className = "details";
      row.details.setAttribute("role", "row");
      row.details.id = `details-${row.index}`;
      button.setAttribute("aria-controls", row.details.id);
      row.element.after(row.details);
    }
    button.setAttribute("aria-expanded", row.details !== null);
  };

  body.addEventListener("click", (event) => {
    const button = event.target.closest(".more");
    if (button) toggle(button);
  });

  // --- theme; storage may be refused for a file on disk ---
  const theme = byId("theme");
  const themes = ["system", "light", "dark"];
  const wear = (name) => {
    if (name === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    theme.textContent = `Theme: ${name}`;
  };
  const remembered = () => {
    try { return localStorage.getItem("twofour-theme"); } catch { return null; }
  };
  let worn = themes.includes(remembered()) ? remembered() : "system";
  wear(worn);
  theme.addEventListener("click", () => {
    worn = themes[(themes.indexOf(worn) + 1) % themes.length];
    wear(worn);
    try { localStorage.setItem("twofour-theme", worn); } catch { /* only not remembered */ }
  });

  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;
  filter();
})();
