"use strict";
// Builds the page from the JSON that is embedded in it. Text enters through textContent only.
(() => {
  const { size, signed, milliseconds, count: number } = torchmemUnits;
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const run = read("torchmem-run");
  const charts = new Set();

  const { make, swatch, named, bar, table, block, long, who, fullWho, place, PLACE } = torchmemTables(run.categories);

  const NO_FOOTPRINT = "There is no timeline: nothing was allocated on this device, and nothing that was there before was used.";

  // --- one window -------------------------------------------------------------------------------

  function readout(data, moment, estimated) {
    const amounts = run.categories.map(({ key }) => [key, data.columns[key]?.[moment] ?? 0])
      .filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
    const live = data.tracks.map((track) => [track.who, track.levels[moment]])
      .filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]).slice(0, 5);
    const now = data.times[moment];
    const around = data.spans.filter((s) => s.begin <= now && now <= s.end && s.end > s.begin);
    const inside = [...new Set(around.map(torchmemChart.spanName))];
    return [
      make("div", { class: "moment" },
        `${moment === data.peak ? "the peak, " : ""}at ${whenIs(data, moment)}${inside.length ? `, in ${inside.join(", ")}` : ""}`),
      make("div", { class: "total" },
        (estimated ? "estimated " : "") + size(data.totals[moment])),
      make("ul", {}, amounts.map(([key, bytes]) =>
        make("li", {}, make("span", {}, named(key)), make("span", { class: "number" }, size(bytes))))),
      live.length ? make("div", { class: "faint" }, "largest live then") : null,
      make("ul", {}, live.map(([c, bytes]) =>
        make("li", { class: "who" }, swatch(c.category), make("span", { title: fullWho(c) }, who(c)),
          make("span", { class: "number" }, size(bytes))))),
    ].filter(Boolean);
  }

  function whenIs(data, moment) {
    const now = number(data.estimated ? data.times[moment] : data.rows[moment]);
    const last = data.changeCount - 1; // a node has two rows of its own
    return data.estimated ? `node ${now} of ${number(last / 2)}`
      : `${milliseconds(data.times[moment])}, change ${now} of ${number(last)}`;
  }

  function spoken(data, moment, estimated) {
    const amounts = run.categories.filter(({ key }) => data.columns[key]?.[moment])
      .map(({ key, name }) => `${name} ${size(data.columns[key][moment])}`);
    const when = data.estimated ? whenIs(data, moment) : milliseconds(data.times[moment]);
    return `${when}: ${estimated ? "estimated " : ""}${size(data.totals[moment])}; ${amounts.join(", ")}`;
  }

  const LINES = {
    baseline: { dash: [7, 5], colour: "--accent" },
    limit: { dash: [2, 4], colour: "--bad" },
  };

  let helps = 0;

  function drawing(window) {
    const data = torchmemChart.decode(window.picture);
    const text = make("div", { class: "readout" });
    const help = `torchmem-help-${(helps += 1)}`;
    const host = make("div", {
      class: "plot", tabindex: "0", role: "slider", "aria-label": "memory over time, by category",
      "aria-describedby": help,
      "aria-valuemin": "0", "aria-valuemax": String(data.times.length - 1),
    });
    let chart;
    const show = (moment) => {
      text.replaceChildren(...readout(data, moment, window.estimated));
      host.setAttribute("aria-valuenow", String(moment));
      host.setAttribute("aria-valuetext", spoken(data, moment, window.estimated));
    };
    const start = (by) => {
      const first = chart?.moment();
      if (chart) { charts.delete(chart); chart.destroy(); }
      const marks = window.marks.filter((mark) => mark.drawn)
        .map((mark) => ({ ...mark, ...LINES[mark.kind] }));
      chart = torchmemChart.draw(host, data, { categories: run.categories, marks, by, show, first });
      charts.add(chart);
    };
    host.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { key } = event;
      if (event.shiftKey && key.startsWith("Arrow")) chart.panBy(key === "ArrowRight" || key === "ArrowUp" ? 0.2 : -0.2);
      else if (key === "+" || key === "=") chart.zoomBy(0.5);
      else if (key === "-") chart.zoomBy(2);
      else if (key === "Escape") chart.reset();
      else if (!chart.key(key)) return;
      event.preventDefault();
    });
    host.addEventListener("mouseleave", () => { if (document.activeElement !== host) chart.leave(); });
    const choice = (by, name) => make("button", {
      type: "button", "aria-pressed": String(by === "changes"),
      onclick: (event) => {
        for (const other of event.target.parentNode.querySelectorAll("[aria-pressed]")) {
          other.setAttribute("aria-pressed", String(other === event.target));
        }
        start(by);
      },
    }, name);
    const bars = make("div", { class: "axis-choice" },
      data.estimated ? null : choice("changes", "by change"),
      data.estimated ? null : choice("time", "by time"),
      make("button", { type: "button", onclick: () => chart.reset() }, "whole range"),
      make("span", { id: help }, "drag to zoom, Shift and drag to move; arrow keys move, + and - zoom, P goes to the peak"));
    const legend = make("ul", { class: "legend" }, run.categories
      .filter(({ key }) => data.columns[key])
      .map(({ key }) => make("li", {}, named(key))),
    window.marks.filter((mark) => !mark.drawn)
      .map((mark) => make("li", { class: "faint" }, `not drawn: ${mark.text}`)));
    const grid = make("div", { class: "drawing" }, make("div", { class: "plot" }, bars, host, legend), text);
    requestAnimationFrame(() => start("changes"));
    return grid;
  }

  function composition(window) {
    const before = window.baseline;
    const headers = [["category", "category", "row"], ["at the peak", "number"], ["own peak", "number"]];
    if (before) headers.push(["baseline", "number"], ["change", "number"]);
    headers.push([run.single ? "at the end" : "retained", "number"]);
    const rows = run.categories
      .filter(({ key }) => window.own[key] || window.retained.by_category[key] || before?.own[key])
      .map(({ key }) => {
        const row = [named(key), size(window.at_peak[key] ?? 0), size(window.own[key] ?? 0)];
        if (before) row.push(size(before.own[key] ?? 0), change((window.own[key] ?? 0) - (before.own[key] ?? 0)));
        return [...row, size(window.retained.by_category[key] ?? 0)];
      });
    const total = ["total", size(window.total), ""];
    if (before) total.push(size(before.total), change(window.total - before.total));
    rows.push([...total, size(window.retained.total)]);
    return [bar(window.at_peak, window.total || 1, "bar big"), table(headers, rows, "composition", "stack")];
  }

  function change(bytes, word = "") {
    const kind = bytes > 0 ? "up" : bytes < 0 ? "down" : "faint";
    return make("span", { class: kind }, word + signed(bytes));
  }

  function differences(window) {
    const rows = window.differences.map((d) => [
      change(d.bytes, d.at_least ? "at least " : ""),
      d.one_sided ? (d.bytes > 0 ? "new" : "gone") : d.bytes > 0 ? "grown" : "shrunk",
      named(d.who.category), ...place(d.who),
    ]);
    if (!rows.length) return [make("p", { class: "faint" }, "nothing changed")];
    return long([["change", "number"], ["kind"], ["category", "category"], ...PLACE], rows, "differences", "stack places");
  }

  function live(contributors, label) {
    const rows = contributors.map((c) =>
      [size(c.bytes), number(c.count), named(c.category), ...place(c)]);
    return long([["size", "number"], ["count", "number count"], ["category", "category"], ...PLACE], rows, label, "stack places");
  }

  function holders(list) {
    const rows = list.map(([bytes, count, how]) => [size(bytes), number(count), how]);
    return long([["size", "number"], ["count", "number"], ["how"]], rows, "holders");
  }

  function operators(list) {
    const rows = list.map(([name, calls, allocated, live_bytes]) =>
      [name, number(calls), size(allocated), size(live_bytes)]);
    return long([["operator", "code mono", "row"], ["calls", "number"], ["allocated", "number"],
      ["live at the peak", "number"]], rows, "operators");
  }

  function figures(window) {
    const mark = window.estimated ? "an estimated " : "";
    const most = window.bound ? "at most " : "";
    const texts = [`${window.estimated ? "estimated " : ""}peak ${most}${size(window.total)}`];
    if (window.baseline) texts.push(`baseline ${size(window.baseline.total)} (${signed(window.total - window.baseline.total)})`);
    for (const [key, bytes] of Object.entries(window.limits)) texts.push(`limit ${key === "total" ? "" : `on ${key.replaceAll("_", " ")} `}${size(bytes)}`);
    if (window.retained_known) {
      texts.push(`${run.single ? "at the end" : "retained"} ${mark}${size(window.retained.total)}`);
    }
    if (window.growth != null) texts.push(`growth ${signed(window.growth)} per step`);
    const { estimated, ...counters } = window.counters ?? {};
    for (const [key, bytes] of Object.entries(counters)) {
      texts.push(`${estimated ? "estimated " : ""}${key} ${size(bytes)}`);
    }
    if (window.unexplained_bytes) texts.push(`not reconciled with the allocator: ${size(window.unexplained_bytes)}`);
    return texts;
  }

  function headingOf(window) {
    if (!window.name) return run.single ? "timeline" : "test body";
    return window.estimated ? window.name : `region ${window.name}`;
  }

  function windowView(window, expected = false) {
    const marked = (title) => (window.estimated ? `${title}, estimated` : title);
    const parts = [
      make("div", { class: "title" },
        make("h2", {}, headingOf(window)),
        make("span", { class: "faint" }, `${window.device}, ${figures(window).join(", ")}`)),
    ];
    if (window.sentences.length) {
      if (expected) parts.push(make("p", { class: "faint" }, "failed as expected:"));
      parts.push(make("ul", { class: expected ? "sentences expected" : "sentences" }, window.sentences.map((s) => make("li", {}, s))));
    }
    const empty = window.picture && !Object.keys(window.picture.levels).length;
    if (empty) parts.push(make("p", { class: "faint" }, NO_FOOTPRINT));
    else if (window.picture) parts.push(drawing(window));
    else if (window.no_picture) parts.push(make("p", { class: "faint" }, window.no_picture));
    const notes = [...window.remarks, ...window.notes];
    if (notes.length) parts.push(make("ul", { class: "notes" }, notes.map((n) => make("li", {}, n))));
    const tables = make("div", { class: "tables" });
    if (window.baseline) tables.append(block(marked("differences against the baseline, each category at its own peak"), differences(window), true));
    if (Object.keys(window.own).length || window.baseline) {
      tables.append(block(marked("composition at the peak, by category"), composition(window)));
    }
    if (window.picture?.operators.length) {
      tables.append(block(marked("operators that allocated"), operators(window.picture.operators)));
    }
    if (window.live.length) tables.append(block(marked("live at the peak"), live(window.live, "live at the peak"), true));
    if (window.retained.live.length) {
      tables.append(block(marked("retained at the end"), live(window.retained.live, "retained at the end"), true));
    }
    if (window.holders.length) tables.append(block(window.holders_title, holders(window.holders), true));
    if (window.grown.length) {
      const title = "made by the steps and still there after the last";
      tables.append(block(marked(title), live(window.grown, title), true));
    }
    parts.push(tables);
    return make("section", { class: "window" }, parts);
  }

  // --- the list ---------------------------------------------------------------------------------

  function against(test) {
    const texts = [];
    if (test.baseline_bytes) texts.push(change(test.peak - test.baseline_bytes));
    if (test.limit) texts.push(make("small", {}, test.limit));
    if (!texts.length && test.measured) texts.push(make("span", { class: "faint" }, "no baseline"));
    return texts;
  }

  function testView(test) {
    const node = make("details", { class: "test" },
      make("summary", {},
        make("span", { class: `badge ${test.status.replace(" ", "-")}` }, test.status),
        make("span", { class: "name mono" }, test.name,
          test.sentence ? make("small", {}, test.sentence) : null),
        bar(test.at_peak, test.peak || 1, "bar"),
        make("span", { class: "number" }, test.bound ? make("small", {}, "at most") : null,
          test.measured ? size(test.peak) : "-",
          test.estimated ? make("small", {}, "estimated") : null),
        make("span", { class: "number" }, against(test))));
    // What is inside is built when it is first opened: a run may have thousands of tests.
    node.addEventListener("toggle", () => {
      if (!node.open || node.childElementCount > 1) return;
      const inside = read(test.id);
      if (inside.raised) node.append(make("p", { class: "sentences" }, inside.raised));
      node.append(...inside.windows.map((window) => windowView(window, inside.expected)));
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
    name: (a, b) => (a.name < b.name ? -1 : 1),
  };
  const grownBytes = (test) => (test.baseline_bytes ? test.peak - test.baseline_bytes : -Infinity);

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
      shown.textContent = count === rows.length ? `${number(count)} tests`
        : `${number(count)} of ${number(rows.length)} tests`;
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
    if (rows.length > 1) page.append(tools, shown);
    if (!rows.length) page.append(make("p", { class: "faint" }, "No test of this run asked to be measured."));
    page.append(tests);
    apply();
    if (rows.length === 1) rows[0].node.open = true;
    openLinked();
    addEventListener("hashchange", openLinked);
  }

  // --- the page ---------------------------------------------------------------------------------

  const SCHEMES = ["as the system", "light", "dark"];

  function scheme() {
    let now = 0;
    const button = make("button", { type: "button", onclick: () => {
      now = (now + 1) % SCHEMES.length;
      if (now) document.documentElement.dataset.scheme = SCHEMES[now];
      else delete document.documentElement.dataset.scheme;
      button.textContent = `colours: ${SCHEMES[now]}`;
      redraw();
    } }, `colours: ${SCHEMES[0]}`);
    return button;
  }

  const redraw = () => charts.forEach((chart) => chart.redraw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  const page = document.getElementById("page");
  page.append(
    make("div", { class: "head" }, make("h1", {}, run.title), scheme()),
    make("div", { class: "facts" }, run.facts.map(([name, value]) =>
      make("span", {}, `${name} `, make("b", {}, value)))));
  if (run.problems.length) {
    page.append(make("div", { class: "problems", role: "alert" }, run.problems.map((p) => make("p", {}, p))));
  }
  if (run.single) page.append(...read(run.single).windows.map((window) => windowView(window)));
  else list(page);
})();
