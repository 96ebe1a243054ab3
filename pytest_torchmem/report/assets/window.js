"use strict";
// One measured window: its sentences, its timeline in three views, its tables. `charts` collects what
// is drawn, so that the page can draw it again in other colours.
const torchmemWindow = (run, tables, charts) => {
  const { size, signed, share, milliseconds, count: number } = torchmemUnits;
  const { make, swatch, named, bar, table, block, long, who, fullWho, place, PLACE } = tables;

  const NO_FOOTPRINT = "There is no timeline: the body allocated nothing on this device and used nothing older.";
  const HELP = "drag to zoom, Shift and drag to move; arrow keys move, + and - zoom, P goes to the peak, Esc back";
  const LINES = {
    baseline: { dash: [7, 5], colour: "--accent" },
    limit: { dash: [2, 4], colour: "--bad" },
  };

  // A change is red or green where a test was judged so, as grown or as shrunk, and plain otherwise.
  function change(bytes, before, judged) {
    const kind = !bytes ? "faint" : judged === "grown" && bytes > 0 ? "up" : judged === "shrunk" && bytes < 0 ? "down" : "within";
    const percent = share(bytes, before);
    return make("span", { class: kind }, signed(bytes), percent ? make("small", { class: "share" }, ` ${percent}`) : null);
  }

  // --- what is read at a moment -----------------------------------------------------------------

  const whoLine = (contributor, bytes) => make("li", { class: "who" }, swatch(contributor.category),
    make("span", { title: fullWho(contributor) }, who(contributor)), make("span", { class: "number" }, size(bytes)));

  function readout(data, moment, estimated) {
    const amounts = run.categories.map(({ key }) => [key, data.columns[key]?.[moment] ?? 0])
      .filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]);
    const live = data.tracks.map((track) => [track.who, track.levels[moment]])
      .filter(([, bytes]) => bytes).sort((a, b) => b[1] - a[1]).slice(0, 5);
    const now = data.times[moment];
    const around = data.spans.filter((s) => s.begin <= now && now <= s.end && s.end > s.begin);
    const inside = [...new Set(around.map(torchmemLanes.spanName))];
    return [
      make("div", { class: "moment" },
        `${moment === data.peak ? "the peak, " : ""}at ${whenIs(data, moment)}${inside.length ? `, in ${inside.join(", ")}` : ""}`),
      make("div", { class: "total" }, (estimated ? "estimated " : "") + size(data.totals[moment])),
      make("ul", {}, amounts.map(([key, bytes]) =>
        make("li", {}, make("span", {}, named(key)), make("span", { class: "number" }, size(bytes))))),
      live.length ? make("div", { class: "faint" }, "largest live then") : null,
      make("ul", {}, live.map(([c, bytes]) => whoLine(c, bytes))),
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

  // --- what is read of a block ------------------------------------------------------------------

  function lifeOf(data, { begin, end }) {
    const at = (row) => (data.estimated ? `node ${number(row / 2)}` : `change ${number(row)}`);
    return `${begin ? `made at ${at(begin)}` : "there at the start"}, ${end < data.changeCount ? `gone at ${at(end)}` : "alive at the end"}`;
  }

  function frameLine({ file, line, name }) {
    const library = file.startsWith("/") || file.startsWith("<") || /^[A-Z]:/.test(file);
    return make("li", { class: library ? "mono faint" : "mono", title: `${file}:${line}` },
      `${name} `, make("small", {}, `${library ? file.split(/[\\/]/).slice(-2).join("/") : file}${line ? `:${line}` : ""}`));
  }

  function blockText(data, found, isolate) {
    const { operator, module, source, phase, category } = found.who;
    const stack = data.stackOf(found);
    const facts = [["operator", operator], ["module", module], ["line", !stack.length && source ? `${source[0]}:${source[1]}` : ""], ["phase", phase]];
    return [
      make("div", { class: "moment" }, lifeOf(data, found)),
      make("div", { class: "total" }, (data.estimated ? "estimated " : "") + size(found.bytes)),
      make("ul", {}, make("li", {}, make("span", {}, named(category)))),
      make("dl", {}, facts.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", { class: "mono" }, text)])),
      stack.length ? make("div", { class: "faint" }, "Calls, innermost first") : null,
      stack.length ? make("ol", { class: "calls" }, stack.map(frameLine)) : null,
      make("div", { class: "chips" },
        make("button", { type: "button", onclick: () => isolate({ only: category }) }, "only this category"),
        module ? make("button", { type: "button", onclick: () => isolate({ module }) }, "only this module") : null),
    ].filter(Boolean);
  }

  function blocksText(data, shown) {
    const rest = data.count - data.blocks.length;
    return [
      make("div", { class: "moment" }, "point at a block, or click to keep it"),
      make("div", { class: "total" }, `${number(shown)} blocks`),
      make("p", { class: "faint" }, rest
        ? `These are the largest of ${number(data.count)} allocations, half of them from the peak. The other ${number(rest)} are the grey layer on top, ${size(Math.max(...data.rest))} at most.`
        : "Each block is one allocation: its width is its lifetime, its height its size."),
    ];
  }

  const blockSpoken = (data, found) => (found
    ? `${size(found.bytes)} of ${run.categories.find(({ key }) => key === found.who.category).name}, ${fullWho(found.who)}, ${lifeOf(data, found)}`
    : `${number(data.blocks.length)} blocks`);

  // --- the drawing ------------------------------------------------------------------------------

  function toggles(label, choices, chosen, choose) {
    const buttons = choices.map(([value, text]) => make("button", {
      type: "button", "aria-pressed": String(value === chosen), "data-value": value,
      onclick: () => {
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.value === value)));
        choose(value);
      },
    }, text));
    return make("div", { class: "choice", role: "group", "aria-label": label }, buttons);
  }

  const lane = (kind, text) => make("li", { class: "of-lane" }, make("i", { class: `lane ${kind}` }), text);

  function legendOf(data, window, isolate, before) {
    const items = run.categories.filter(({ key }) => data.columns[key]).map(({ key, meaning }) => make("li", {},
      make("button", { type: "button", class: "key", "aria-pressed": "false", "data-key": key, title: `${meaning} Click to see it alone.`, onclick: () => isolate({ only: key }) }, named(key))));
    const kinds = new Set(data.spans.map((span) => span.kind));
    if (kinds.has("region")) items.push(lane("region", "region"));
    if (kinds.has("backward") || kinds.has("optimizer") || kinds.has("idle")) items.push(lane("phase", "phase"));
    if (kinds.has("step")) items.push(lane("step", "step, with what it left alive"));
    if (before) items.push(lane("before", before));
    items.push(...window.marks.filter((mark) => !mark.drawn).map((mark) => make("li", { class: "faint" }, `not drawn: ${mark.text}`)));
    return make("ul", { class: "legend" }, items);
  }

  let helps = 0;

  function drawing(window) {
    const { picture } = window;
    const data = torchmemPicture.decode(picture);
    const blocks = picture.blocks.blocks?.length ? torchmemBlocks.decode(picture) : null;
    const before = window.before?.picture ? torchmemPicture.decode(window.before.picture) : null;
    const state = { view: "categories", by: "changes", only: "", module: "" };
    const text = make("div", { class: "readout" });
    const help = `torchmem-help-${(helps += 1)}`;
    const host = make("div", { class: "plot", tabindex: "0", role: "slider", "aria-describedby": help, "aria-valuemin": "0" });
    const alone = make("div", { class: "chips" });
    let chart;

    const views = {
      categories: {
        label: "memory over time, by category",
        draw(first) {
          const show = (moment) => {
            text.replaceChildren(...readout(data, moment, window.estimated));
            say(moment, data.times.length - 1, spoken(data, moment, window.estimated));
          };
          const marks = window.marks.filter((mark) => mark.drawn).map((mark) => ({ ...mark, ...LINES[mark.kind] }));
          return torchmemChart.draw(host, data, {
            categories: run.categories, marks, by: state.by, only: state.only, steps: window.steps ?? [], before, show, first,
          });
        },
      },
      blocks: {
        label: "allocations over time, one by one",
        draw() {
          let count = 0;
          const show = (found) => {
            text.replaceChildren(...(found ? blockText(blocks, found, isolate) : blocksText(blocks, count)));
            say(found ? blocks.blocks.indexOf(found) : 0, blocks.blocks.length - 1, blockSpoken(blocks, found));
          };
          const drawn = torchmemBlocks.draw(host, blocks, { categories: run.categories, only: state.only, module: state.module, show });
          count = drawn.shown;
          show(null);
          return drawn;
        },
      },
    };

    function say(now, last, words) {
      host.setAttribute("aria-valuenow", String(now));
      host.setAttribute("aria-valuemax", String(last));
      host.setAttribute("aria-valuetext", words);
    }

    function start() {
      const first = chart?.moment();
      if (chart) { charts.delete(chart); chart.destroy(); }
      host.setAttribute("aria-label", views[state.view].label);
      host.setAttribute("role", "slider");
      chart = views[state.view].draw(first);
      charts.add(chart);
      axis.hidden = state.view !== "categories" || data.estimated;
      alone.replaceChildren(...[["only", state.only && run.categories.find(({ key }) => key === state.only).name], ["module", state.module]]
        .filter(([key, name]) => name && (key === "only" || state.view !== "categories"))
        .map(([key, name]) => make("button", { type: "button", class: "alone", onclick: () => isolate({ [key]: "" }) }, `only ${name} \u00d7`)));
      // Only the categories' view draws lanes.
      legend.querySelectorAll(".of-lane").forEach((one) => { one.hidden = state.view !== "categories"; });
      legend.querySelectorAll("[data-key]").forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.key === state.only)));
    }

    // What stands alone is chosen by a click, and taken back by the same click.
    function isolate(wanted) {
      for (const [key, value] of Object.entries(wanted)) state[key] = state[key] === value ? "" : value;
      if (wanted.module && state.view === "categories") state.view = "blocks";
      start();
    }

    host.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target !== host) return;
      const { key } = event;
      if (event.shiftKey && key.startsWith("Arrow")) chart.panBy(key === "ArrowRight" || key === "ArrowUp" ? 0.2 : -0.2);
      else if (key === "+" || key === "=") chart.zoomBy(0.5);
      else if (key === "-") chart.zoomBy(2);
      else if (!chart.key(key)) {
        if (key !== "Escape") return;
        chart.reset();
      }
      event.preventDefault();
    });
    host.addEventListener("mouseleave", () => { if (document.activeElement !== host) chart.leave(); });

    const shown = [["categories", "categories"], blocks && ["blocks", "blocks"]].filter(Boolean);
    const view = toggles("view", shown, state.view, (value) => { state.view = value; start(); });
    const axis = toggles("axis", [["changes", "by change"], ["time", "by time"]], state.by, (value) => { state.by = value; start(); });
    const whole = make("button", { type: "button", onclick: () => chart.reset() }, "whole range");
    const hint = make("span", { id: help }, HELP);
    const legend = legendOf(data, window, isolate, before && window.before.name);
    const bars = make("div", { class: "axis-choice" }, shown.length > 1 ? view : null, axis, whole, alone, hint);
    requestAnimationFrame(start);
    return make("div", { class: "drawing" }, make("div", { class: "plot" }, bars, host, legend), text);
  }

  // --- tables -----------------------------------------------------------------------------------

  function composition(window) {
    const before = window.baseline;
    const headers = [["category", "category", "row"], ["at the peak", "number"], ["own peak", "number"]];
    if (before) headers.push([window.before ? window.before.name : "baseline", "number"], ["change", "number"]);
    headers.push([run.single ? "at the end" : "retained", "number"]);
    const judged = window.change;
    const rows = run.categories
      .filter(({ key }) => window.own[key] || window.retained.by_category[key] || before?.own[key])
      .map(({ key }) => {
        const [now, then] = [window.own[key] ?? 0, before?.own[key] ?? 0];
        const row = [named(key), size(window.at_peak[key] ?? 0), size(now)];
        if (before) row.push(size(then), change(now - then, then, judged));
        return [...row, size(window.retained.by_category[key] ?? 0)];
      });
    const total = ["total", size(window.total), ""];
    if (before) total.push(size(before.total), change(window.total - before.total, before.total, judged));
    rows.push([...total, size(window.retained.total)]);
    return [bar(window.at_peak, window.total || 1, "bar big"), table(headers, rows, "composition", "stack")];
  }

  function differences(window) {
    const judged = window.change;
    const rows = window.differences.map(([bytes, word, of, ...where]) => [
      change(bytes, 0, judged), word, of, ...where.map((text) => text || "-"),
    ]);
    if (!rows.length) return [make("p", { class: "faint" }, "nothing changed")];
    return [
      make("p", { class: "faint" }, `${window.of} in all`),
      ...long([["change", "number"], ["kind"], ["of"], ...PLACE], rows, "differences", "stack places"),
      ...window.unlisted.map((text) => make("p", { class: "faint" }, text)),
    ];
  }

  function live(contributors, label) {
    const rows = contributors.map((c) => [size(c.bytes), number(c.count), named(c.category), ...place(c)]);
    return long([["size", "number"], ["count", "number count"], ["category", "category"], ...PLACE], rows, label, "stack places");
  }

  function holders(list) {
    const rows = list.map(([bytes, count, how]) => [size(bytes), number(count), how]);
    return long([["size", "number"], ["count", "number"], ["how"]], rows, "holders");
  }

  function operators(list) {
    const rows = list.map(([name, calls, allocated, live_bytes, own_ns]) =>
      [name, number(calls), own_ns ? milliseconds(own_ns) : "", size(allocated), size(live_bytes)]);
    return long([["operator", "code mono", "row"], ["calls", "number"], ["own time", "number"], ["allocated", "number"],
      ["live at the peak", "number"]], rows, "operators", "stack");
  }

  // Labels and operators around the moment of the peak, each within the one above it.
  function running(spans) {
    const rows = spans.map(([, name, begin, end]) => [name, milliseconds(end - begin)]);
    return long([["label or operator", "code mono", "row"], ["took", "number"]], rows, "what ran at the peak");
  }

  // What each step left alive, beside the one before it: a bar for the change.
  function stepTable(kept) {
    const changes = kept.map((bytes, i) => (i ? bytes - kept[i - 1] : bytes));
    const most = Math.max(1, ...changes.slice(1).map(Math.abs));
    const rows = changes.map((bytes, i) => {
      const part = make("i", {});
      part.style.width = i ? `${(100 * Math.abs(bytes)) / most}%` : "0";
      return [`step ${i + 1}`, size(kept[i]), i ? signed(bytes) : "", make("div", { class: "bar step", "aria-hidden": "true" }, part)];
    });
    return long([["step", "category", "row"], ["alive at its end", "number"], ["change", "number"], ["", "wide"]], rows, "steps");
  }

  function figures(window) {
    const mark = window.estimated ? "an estimated " : "";
    const texts = [`${window.estimated ? "estimated " : ""}peak ${size(window.total)}`];
    if (window.baseline) {
      const grown = window.total - window.baseline.total;
      const percent = share(grown, window.baseline.total);
      texts.push(`${window.before ? window.before.name : "baseline"} ${size(window.baseline.total)} (${grown ? [signed(grown), percent].filter(Boolean).join(", ") : "same"})`);
    }
    for (const [key, bytes] of Object.entries(window.limits)) texts.push(`limit ${key === "total" ? "" : `on ${key.replaceAll("_", " ")} `}${size(bytes)}`);
    texts.push(`${run.single ? "at the end" : "retained"} ${mark}${size(window.retained.total)}`);
    if (window.growth != null) texts.push(`growth ${signed(window.growth)} per step`);
    const { estimated, ...counters } = window.counters ?? {};
    for (const [key, bytes] of Object.entries(counters)) texts.push(`${estimated ? "estimated " : ""}${key} ${size(bytes)}`);
    if (window.unexplained_bytes) texts.push(`not reconciled with the allocator: ${size(window.unexplained_bytes)}`);
    return texts;
  }

  function headingOf(window) {
    if (!window.name) return run.single ? "timeline" : "test body";
    return window.estimated ? window.name : `region ${window.name}`;
  }

  function tablesOf(window) {
    const marked = (title) => (window.estimated ? `${title}, estimated` : title);
    const found = [];
    if (window.steps?.length > 1) found.push(block(marked("bytes alive after each step"), stepTable(window.steps)));
    if (window.baseline) found.push(block(marked(window.before ? "causes, the largest first" : "differences against the baseline"), differences(window), true));
    if (Object.keys(window.own).length || window.baseline) found.push(block(marked("composition at the peak, by category"), composition(window)));
    if (window.picture?.running?.length) found.push(block("what ran at the peak, each within the one above", running(window.picture.running)));
    if (window.picture?.operators.length) found.push(block(marked("operators that allocated"), operators(window.picture.operators)));
    if (window.live.length) found.push(block(marked("live at the peak"), live(window.live, "live at the peak"), true));
    if (window.retained.live.length) found.push(block(marked("retained at the end"), live(window.retained.live, "retained at the end"), true));
    if (window.holders.length) found.push(block(window.holders_title, holders(window.holders), true));
    const title = "made by the steps and still there after the last";
    if (window.grown.length) found.push(block(marked(title), live(window.grown, title), true));
    return make("div", { class: "tables" }, found);
  }

  function view(window, expected = false) {
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
    return make("section", { class: "window" }, parts, tablesOf(window));
  }

  return { view, change };
};
