"use strict";
// What the page is made of: elements, names of categories, tables. Text enters through textContent
// only. `categories` are those of the run, each with its key, its name and its colour.
const torchmemTables = (categories) => {
  const { size } = torchmemUnits;
  const colours = Object.fromEntries(categories.map((c) => [c.key, c]));

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child != null && child !== ""));
    return node;
  }

  function swatch(category) {
    const node = make("i", { class: "swatch", "aria-hidden": "true" });
    node.style.background = colours[category].colour;
    return node;
  }

  const NONE = "-";
  const named = (category) => [swatch(category), colours[category].name];

  function bar(amounts, total, className) {
    const parts = categories.filter(({ key }) => amounts[key]).map(({ key, name, colour }) => {
      const part = make("i", { title: `${name} ${size(amounts[key])}` });
      part.style.width = `${(100 * amounts[key]) / total}%`;
      part.style.background = colour;
      return part;
    });
    const text = categories.filter(({ key }) => amounts[key])
      .map(({ key, name }) => `${name} ${size(amounts[key])}`).join(", ");
    const label = text ? `composition at the peak: ${text}` : "no composition";
    return make("div", { class: className, role: "img", "aria-label": label }, parts);
  }

  // A table too wide for its box scrolls in it, and only then can be focused to do so. `stack` makes
  // a list of it where there is no room: rows keep their roles, which some browsers take from what
  // is not laid out as a table.
  function table(headers, rows, label, stack = "") {
    const cell = (content, column) => {
      const [text, kind, scope] = headers[column];
      const names = [kind, content === NONE && "none"].filter(Boolean).join(" ");
      const attributes = { class: names || null, "data-label": text };
      return scope ? make("th", { ...attributes, scope, role: "rowheader" }, content)
        : make("td", { ...attributes, role: "cell" }, content);
    };
    const head = ([text, kind]) => make("th",
      { class: kind?.includes("number") ? "number" : null, scope: "col", role: "columnheader" }, text);
    const row = (cells) => make("tr", { role: "row" }, cells);
    const box = make("div", { class: "scroll", role: "region", "aria-label": label },
      make("table", { role: "table", class: stack || null },
        make("thead", { role: "rowgroup" }, row(headers.map(head))),
        make("tbody", { role: "rowgroup" }, rows.map((contents) => row(contents.map(cell))))));
    const sizes = new ResizeObserver(() => {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    });
    sizes.observe(box);
    sizes.observe(box.firstChild);
    return box;
  }

  function block(title, content, wide = false) {
    return make("section", { class: wide ? "block wide" : "block" }, make("h3", {}, title), content);
  }

  // Long tables show their largest rows first and the rest when asked.
  function long(headers, rows, label, stack = "", first = 10) {
    if (rows.length <= first + 2) return [table(headers, rows, label, stack)];
    const rest = table(headers, rows.slice(first), `${label}, the rest`, stack);
    return [
      table(headers, rows.slice(0, first), label, stack),
      make("details", { class: "more" },
        make("summary", {}, `${rows.length - first} more`), rest),
    ];
  }

  const fileName = (file) => file.split("/").pop();
  const at = ([file, line, name]) => (line ? `${file}:${line} ${name}` : `${name} in ${file}`);

  // The end of a module's path tells layers apart; the tables have all of it.
  function short(module) {
    const parts = module.split(".");
    return parts.length > 3 ? `…${parts.slice(-3).join(".")}` : module;
  }

  const who = (contributor) => told(contributor, short(contributor.module));
  const fullWho = (contributor) => told(contributor, contributor.module);

  function told(contributor, module) {
    const { operator, source } = contributor;
    const where = source ? ` (${fileName(source[0])}${source[1] ? `:${source[1]}` : ""})` : "";
    const text = [operator, module && (operator ? `in ${module}` : module)].filter(Boolean).join(" ");
    return (text || `${colours[contributor.category].name}, ${contributor.phase}`) + where;
  }

  const place = (c) => [c.operator || NONE, c.module || NONE, c.source ? at(c.source) : c.phase];
  const PLACE = [["operator", "code mono"], ["module", "code mono"], ["source", "code mono"]];

  return { make, swatch, named, bar, table, block, long, who, fullWho, place, PLACE };
};
