"use strict";
// What was live at the peak as areas: a module within the one that holds it, and in it one tile for
// each category. Tiles are buttons, so that they can be reached by Tab and read aloud.
const torchmemTreemap = (categories, make) => {
  const { size, share } = torchmemUnits;
  const { within } = torchmemBlocks;
  const colours = Object.fromEntries(categories.map((category) => [category.key, category]));
  const HEAD = 19;
  const GAP = 2;
  const OUTSIDE = "outside any module";

  function treeOf(rows) {
    const root = { name: "", path: "", bytes: 0, children: new Map(), leaves: new Map() };
    for (const [module, category, bytes] of rows) {
      let node = root;
      node.bytes += bytes;
      for (const name of module ? module.split(".") : [OUTSIDE]) {
        const path = module ? [node.path, name].filter(Boolean).join(".") : "";
        if (!node.children.has(name)) node.children.set(name, { name, path, bytes: 0, children: new Map(), leaves: new Map() });
        node = node.children.get(name);
        node.bytes += bytes;
      }
      node.leaves.set(category, (node.leaves.get(category) ?? 0) + bytes);
    }
    return root;
  }

  // A module with nothing of its own and one part is told in one breath with it: "model.layers".
  function folded(node) {
    if (node.leaves.size || node.children.size !== 1) return node;
    const [part] = node.children.values();
    return folded({ ...part, name: [node.name, part.name].filter(Boolean).join(".") });
  }

  const partsOf = (node) => [
    ...[...node.children.values()].map(folded),
    ...[...node.leaves].map(([category, bytes]) => ({ category, bytes, path: node.path })),
  ].sort((a, b) => b.bytes - a.bytes);

  // Squarified treemaps (Bruls, Huizing, van Wijk, 2000): rows along the shorter side, each as long as
  // its worst tile does not get thinner by one more.
  function squarified(parts, box) {
    const placed = [];
    let { left, top, width, height } = box;
    let rest = parts.reduce((sum, part) => sum + part.bytes, 0);
    let at = 0;
    while (at < parts.length && rest > 0) {
      const short = Math.min(width, height);
      const scale = (width * height) / rest;
      let [count, sum, worst] = [0, 0, Infinity];
      while (at + count < parts.length) {
        const next = sum + parts[at + count].bytes;
        const side = (next * scale) / short;
        const [largest, smallest] = [parts[at].bytes, parts[at + count].bytes].map((bytes) => (bytes * scale) / side);
        const thin = Math.max(largest / side, side / smallest);
        if (thin > worst) break;
        [count, sum, worst] = [count + 1, next, thin];
      }
      const side = (sum * scale) / short || 0;
      let along = 0;
      for (const part of parts.slice(at, at + count)) {
        const length = (part.bytes / sum) * short;
        placed.push([part, width < height
          ? { left: left + along, top, width: length, height: side }
          : { left, top: top + along, width: side, height: length }]);
        along += length;
      }
      if (width < height) [top, height] = [top + side, height - side];
      else [left, width] = [left + side, width - side];
      [at, rest] = [at + count, rest - sum];
    }
    return placed;
  }

  // Draws the rows [module, category, bytes] into `host`; `choose(module)` is called for the one pressed.
  function draw(host, rows, { only = "", module = "", height, choose }) {
    const shown = rows.filter(([path, category]) => (!only || category === only) && within(path, module));
    const total = shown.reduce((sum, [, , bytes]) => sum + bytes, 0);
    const box = make("div", { class: "treemap", role: "group", "aria-label": "the peak by module" });
    box.style.height = `${height}px`;
    host.append(box);

    const text = (node, bytes) => `${node} ${size(bytes)}, ${share(bytes, total).replace("+", "")} of what is shown`;

    function tile(into, part, place) {
      const inner = { width: Math.max(0, place.width - GAP), height: Math.max(0, place.height - GAP) };
      if (inner.width < 1 || inner.height < 1) return;
      const roomy = inner.width > 46 && inner.height > HEAD;
      const name = part.category ? colours[part.category].name : part.name;
      const where = part.category ? part.path || OUTSIDE : part.path || part.name;
      const attributes = { title: text(part.category ? `${name} in ${where}` : where, part.bytes) };
      const style = { left: `${place.left}px`, top: `${place.top}px`, width: `${inner.width}px`, height: `${inner.height}px` };
      if (part.category) {
        const leaf = make("div", { class: "leaf", ...attributes }, roomy ? make("span", {}, `${name} ${size(part.bytes)}`) : null);
        Object.assign(leaf.style, style);
        leaf.style.background = colours[part.category].colour;
        into.append(leaf);
        return;
      }
      const head = roomy ? HEAD : 0;
      const node = make("div", { class: "tile", ...attributes });
      Object.assign(node.style, style);
      if (roomy) {
        node.append(make("button", { type: "button", onclick: () => choose(part.path), disabled: !part.path },
          `${part.name} ${size(part.bytes)}`));
      }
      into.append(node);
      lay(node, part, { left: 0, top: head, width: inner.width, height: inner.height - head });
    }

    const lay = (into, node, place) => squarified(partsOf(node), place).forEach(([part, where]) => tile(into, part, where));

    function redraw() {
      box.replaceChildren();
      const root = folded(treeOf(shown));
      const top = { ...root, name: "" };
      lay(box, top, { left: 0, top: 0, width: box.clientWidth, height });
    }

    const resized = new ResizeObserver(redraw);
    resized.observe(box);
    redraw();
    const nothing = () => {};
    return {
      redraw, show: nothing, reset: nothing, zoomBy: nothing, panBy: nothing, leave: nothing,
      moment: () => undefined,
      key: () => false,
      total,
      destroy() { resized.disconnect(); box.remove(); },
    };
  }

  return { draw };
};
