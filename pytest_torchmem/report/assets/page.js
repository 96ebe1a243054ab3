"use strict";
// Builds the page from the JSON that is embedded in it. Text enters through textContent only.
(() => {
  const { size, count: number } = torchmemUnits;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const run = read("torchmem-run");
  const charts = new Set();
  const tables = torchmemTables(run.categories);
  const { make, swatch, bar } = tables;
  const windows = torchmemWindow(run, tables, charts);

  // --- the list ---------------------------------------------------------------------------------

  // How a test stands to its baseline, in the words of every report: in red only what was judged to
  // have grown, in green what was judged to have shrunk.
  function against(test) {
    const kind = (test.moved && { grown: "up", shrunk: "down", "within tolerance": "within" }[test.change]) || "faint";
    const texts = test.moved ? [make("span", { class: kind }, test.moved)] : [];
    if (test.word) texts.push(make("small", {}, test.word));
    if (test.reference) texts.push(make("small", {}, `compared with ${test.reference}`));
    if (test.limit) texts.push(make("small", {}, test.limit));
    return texts;
  }

  // Bars have one scale, so that a test of 16 B does not look as large as one of 3 GiB.
  const mostBytes = Math.max(1, ...(run.tests ?? []).map((test) => test.peak));

  function scaledBar(test) {
    const node = bar(test.at_peak, test.peak || 1, test.peak ? "bar" : "bar none");
    node.style.width = `${Math.max(100 * (test.peak / mostBytes), test.peak ? 1.5 : 0)}%`;
    return make("div", { class: "scale" }, node);
  }

  function listLegend() {
    const seen = new Set(run.tests.flatMap((test) => Object.keys(test.at_peak)));
    const items = run.categories.filter(({ key }) => seen.has(key))
      .map(({ key, name, meaning }) => make("li", { title: meaning }, swatch(key), name));
    if (!items.length) return null;
    return make("ul", { class: "legend list" }, items,
      make("li", { class: "faint" }, `bars: each peak, the longest is ${size(mostBytes)}`));
  }

  function testView(test) {
    const node = make("details", { class: "test" },
      make("summary", {},
        make("span", { class: `badge ${test.status.replace(" ", "-")}` }, test.status),
        make("span", { class: "name mono" }, test.name,
          test.sentence ? make("small", {}, test.sentence) : null),
        scaledBar(test),
        make("span", { class: "number" },
          test.measured ? size(test.peak) : "-",
          test.estimated ? make("small", {}, "estimated") : null),
        make("span", { class: "against" }, against(test))));
    // What is inside is built when it is first opened: a run may have thousands of tests.
    node.addEventListener("toggle", () => {
      if (!node.open || node.childElementCount > 1) return;
      const inside = read(test.id);
      if (inside.raised) node.append(make("p", { class: "sentences" }, inside.raised));
      node.append(...inside.windows.map((window) => windows.view(window, inside.expected)));
      if (inside.problem) node.append(make("p", { class: "sentences" }, inside.problem));
      if (!inside.windows.length && inside.not_measured) {
        node.append(make("p", { class: "window faint" }, inside.not_measured));
      }
    });
    return node;
  }

  const ORDERS = {
    importance: (a, b) => a.order - b.order,
    "peak, largest first": (a, b) => b.peak - a.peak,
    "growth, largest first": (a, b) => grownBytes(b) - grownBytes(a),
    "growth in percent": (a, b) => grownShare(b) - grownShare(a),
    name: (a, b) => (a.name < b.name ? -1 : 1),
  };
  const grownBytes = (test) => (test.compared ? test.peak - test.baseline_bytes : -Infinity);
  const grownShare = (test) => (test.compared ? grownBytes(test) / Math.max(test.baseline_bytes, 1) : -Infinity);

  function list(page) {
    const rows = run.tests.map((test) => ({ test, node: testView(test), text: `${test.name} ${test.sentence}`.toLowerCase() }));
    const statuses = new Set();
    const devices = [...new Set(run.tests.map((test) => test.device).filter(Boolean))].sort();
    const search = make("input", { type: "search", placeholder: "search tests", "aria-label": "search tests", oninput: apply });
    const device = make("select", { "aria-label": "device", onchange: apply },
      make("option", { value: "" }, "every device"), devices.map((d) => make("option", { value: d }, d)));
    const order = make("select", { "aria-label": "sort by", onchange: sort },
      Object.keys(ORDERS).map((name) => make("option", { value: name }, `by ${name}`)));
    const chips = Object.entries(run.counts).map(([status, count]) => make("button", {
      type: "button", "aria-pressed": "false", "data-status": status,
      onclick: ({ target }) => {
        const on = !statuses.has(status);
        statuses[on ? "add" : "delete"](status);
        target.setAttribute("aria-pressed", String(on));
        apply();
      },
    }, `${status} ${number(count)}`));
    const shown = make("p", { class: "shown", role: "status" });
    const nothing = make("p", { class: "nothing", hidden: true }, "No test matches. ",
      make("button", { type: "button", onclick: clear }, "show all"));
    const tests = make("div", { class: "tests" }, rows.map(({ node }) => node));

    function apply() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const { test, node, text } of rows) {
        const wanted = words.every((word) => text.includes(word))
          && (!statuses.size || statuses.has(test.status))
          && (!device.value || test.device === device.value);
        node.hidden = !wanted;
        count += wanted ? 1 : 0;
      }
      nothing.hidden = count > 0 || !rows.length;
      shown.textContent = count === rows.length ? `${number(count)} tests`
        : `${number(count)} of ${number(rows.length)} tests`;
    }

    function clear() {
      search.value = "";
      device.value = "";
      statuses.clear();
      chips.forEach((chip) => chip.setAttribute("aria-pressed", "false"));
      apply();
      search.focus();
    }

    function sort() {
      rows.sort((a, b) => ORDERS[order.value](a.test, b.test) || a.test.order - b.test.order);
      tests.append(...rows.map(({ node }) => node));
    }

    function openLinked() {
      const name = decodeURIComponent(location.hash.replace(/^#test=/, ""));
      const row = name && rows.find(({ test }) => test.name === name);
      if (row) { row.node.open = true; row.node.scrollIntoView(); }
    }

    const tools = make("div", { class: "tools", role: "search" }, search,
      make("div", { class: "chips", role: "group", "aria-label": "status" }, chips),
      devices.length > 1 ? device : null, order);
    if (rows.length > 1) page.append(tools, make("div", { class: "above" }, shown, listLegend() ?? ""), nothing);
    if (!rows.length) page.append(make("p", { class: "faint" }, "No test of this run has a memory marker or the fixture."));
    page.append(tests);
    apply();
    if (rows.length === 1) rows[0].node.open = true;
    openLinked();
    addEventListener("hashchange", openLinked);
  }

  // --- the page ---------------------------------------------------------------------------------

  const SCHEMES = ["auto", "light", "dark"];

  function scheme() {
    let now = 0;
    const button = make("button", { type: "button", class: "quiet", title: "auto: as in the system settings", onclick: () => {
      now = (now + 1) % SCHEMES.length;
      if (now) document.documentElement.dataset.scheme = SCHEMES[now];
      else delete document.documentElement.dataset.scheme;
      button.textContent = `colours: ${SCHEMES[now]}`;
      redraw();
    } }, `colours: ${SCHEMES[0]}`);
    return button;
  }

  const redraw = () => charts.forEach((chart) => chart.redraw());
  // On paper the page is light, and what was drawn in dark colours is drawn again.
  for (const media of ["(prefers-color-scheme: dark)", "print"]) matchMedia(media).addEventListener("change", redraw);

  const page = document.getElementById("page");
  page.append(
    make("div", { class: "head" }, make("h1", {}, run.title), scheme()),
    make("div", { class: "facts" }, run.facts.map(([name, value]) =>
      make("span", {}, `${name} `, make("b", {}, value)))));
  if (run.stories.length) {
    page.append(make("ul", { class: "sentences stories" }, run.stories.map((s) => make("li", {}, s))));
  }
  if (run.problems.length) {
    page.append(make("div", { class: "problems", role: "alert" }, run.problems.map((p) => make("p", {}, p))));
  }
  if (run.single) page.append(...read(run.single).windows.map((window) => windows.view(window)));
  else list(page);
})();
