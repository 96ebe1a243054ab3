"use strict";
// One stacked timeline. A picture holds exact moments; between two of them the earlier one is drawn
// on, because memory changes in steps.
const torchmemChart = (() => {
  const KIB = 1024;
  const UNITS = [["TiB", KIB ** 4], ["GiB", KIB ** 3], ["MiB", KIB ** 2], ["KiB", KIB]];
  // Ticks at powers of two: 256 MiB reads better than 262.1 MiB.
  const INCREMENTS = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const TENS = Array.from({ length: 12 }, (_, power) => 10 ** power);
  const COUNTS = TENS.flatMap((ten) => [ten, 2 * ten, 5 * ten]);

  // The same rounding as units.format_size.
  function size(bytes) {
    const magnitude = Math.abs(bytes);
    for (const [name, factor] of UNITS) {
      if (magnitude >= factor || Math.round((magnitude / factor) * KIB * 10) / 10 >= KIB) {
        return `${inTenths(bytes / factor)} ${name}`;
      }
    }
    return `${bytes} B`;
  }

  // Halves go to the even digit, as they do on the terminal: 128.25 is 128.2 in both places.
  function inTenths(value) {
    const tenths = Math.floor(value * 10);
    const rest = value * 10 - tenths;
    const up = rest > 0.5 || (rest === 0.5 && tenths % 2 !== 0);
    return ((tenths + (up ? 1 : 0)) / 10).toFixed(1);
  }

  function tick(bytes) {
    return size(bytes).replace(".0 ", " ");
  }

  function milliseconds(ns) {
    const ms = ns / 1e6;
    return `${ms.toFixed(ms < 10 ? 3 : ms < 1000 ? 1 : 0)} ms`;
  }

  const sums = (differences) => {
    let value = 0;
    return differences.map((difference) => (value += difference));
  };

  function levels(changes, count) {
    const values = new Array(count).fill(0);
    for (let at = 0; at < changes.length; at += 2) {
      values.fill(changes[at + 1], changes[at]);
    }
    return values;
  }

  function decode(picture) {
    const times = sums(picture.times_ns);
    const columns = {};
    for (const [category, changes] of Object.entries(picture.levels)) {
      columns[category] = levels(changes, times.length);
    }
    const totals = times.map((_, i) => Object.values(columns).reduce((t, c) => t + c[i], 0));
    const tracks = picture.tracks.map((track) => ({
      who: track.contributor,
      levels: levels(track.levels, times.length),
    }));
    return {
      times, columns, totals, tracks,
      rows: sums(picture.rows),
      changeCount: picture.change_count,
      spans: picture.spans.map(([kind, name, begin, end]) => ({ kind, name, begin, end })),
      estimated: picture.estimated,
      peak: totals.reduce((best, total, i) => (total > totals[best] ? i : best), 0),
    };
  }

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

  // The label stands at the end that the peak's label does not need.
  function line(u, { bytes, text, dash, colour: name }, atRight, above) {
    const { ctx } = u;
    const colour = variable(name);
    const y = u.valToPos(bytes, "y", true);
    const { left, width } = u.bbox;
    ctx.save();
    const across = new Path2D();
    across.moveTo(left, y);
    across.lineTo(left + width, y);
    // A halo keeps the dashes apart from the data that they cross.
    ctx.strokeStyle = variable("--ground");
    ctx.globalAlpha = 0.7;
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.stroke(across);
    ctx.strokeStyle = colour;
    ctx.globalAlpha = 1;
    ctx.lineWidth = 2 * devicePixelRatio;
    ctx.setLineDash(dash.map((d) => d * devicePixelRatio));
    ctx.stroke(across);
    const x = atRight ? left + width - 6 * devicePixelRatio : left + 6 * devicePixelRatio;
    label(ctx, text, x, y + (above ? -5 : 18) * devicePixelRatio, atRight ? "right" : "left", colour);
    ctx.restore();
  }

  function label(ctx, text, x, y, align, colour) {
    ctx.setLineDash([]);
    ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = align;
    ctx.textBaseline = "bottom";
    ctx.lineJoin = "round";
    ctx.lineWidth = 4 * devicePixelRatio;
    ctx.strokeStyle = variable("--ground");
    ctx.strokeText(text, x, y);
    ctx.fillStyle = colour;
    ctx.fillText(text, x, y);
  }

  // A peak that is over within a pixel is the one thing that must not be lost.
  function peakBar(u, [from, to], data, present) {
    const { ctx, bbox } = u;
    const left = u.valToPos(from, "x", true);
    const width = 2 * devicePixelRatio;
    const seen = left >= bbox.left && left <= bbox.left + bbox.width;
    if (!seen || u.valToPos(to, "x", true) - left >= width) return;
    let below = 0;
    ctx.save();
    for (const { key, colour } of present) {
      const above = below + data.columns[key][data.peak];
      const top = u.valToPos(above, "y", true);
      ctx.fillStyle = colour;
      ctx.fillRect(left, top, width, u.valToPos(below, "y", true) - top);
      below = above;
    }
    ctx.restore();
  }

  function peakMark(u, x, bytes, estimated) {
    const { ctx, bbox } = u;
    const left = u.valToPos(x, "x", true);
    if (left < bbox.left || left > bbox.left + bbox.width) return;
    const y = u.valToPos(bytes, "y", true);
    const r = 5 * devicePixelRatio;
    ctx.save();
    ctx.fillStyle = variable("--ink");
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left - r, y - 1.7 * r);
    ctx.lineTo(left + r, y - 1.7 * r);
    ctx.fill();
    const late = left > bbox.left + bbox.width / 2;
    const text = `${estimated ? "estimated " : ""}peak ${size(bytes)}`;
    label(ctx, text, left + (late ? -2 : 2) * r, y - r / 2, late ? "right" : "left",
      variable("--ink"));
    ctx.restore();
  }

  // Phases and regions as thin lanes above the data, so that colours stay what they are.
  function lanes(u, spans, toX) {
    const { ctx, bbox } = u;
    const height = 15 * devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const span of spans) {
      const from = Math.max(bbox.left, u.valToPos(toX(span.begin), "x", true));
      const to = Math.min(bbox.left + bbox.width, u.valToPos(toX(span.end), "x", true));
      const top = bbox.top + span.lane * (height + 2 * devicePixelRatio);
      if (to < from) continue;
      ctx.fillStyle = variable("--shade");
      ctx.fillRect(from, top, Math.max(to - from - 2 * devicePixelRatio, devicePixelRatio), height);
      ctx.fillStyle = variable("--faint");
      const text = span.name || span.kind;
      if (ctx.measureText(text).width < to - from - 6) {
        ctx.fillText(text, from + 4, top + height / 2);
      }
    }
    ctx.restore();
  }

  // Spans that overlap get lanes of their own; the long ones come first.
  function laned(spans) {
    const ends = [];
    return spans
      .filter((span) => span.end > span.begin)
      .sort((a, b) => a.begin - b.begin || b.end - a.end)
      .map((span) => {
        let lane = ends.findIndex((end) => end <= span.begin);
        if (lane < 0) lane = ends.length;
        ends[lane] = span.end;
        return { ...span, lane };
      })
      .filter((span) => span.lane < 4);
  }

  // The last moment at or before x.
  function momentAt(xs, x) {
    let low = 0;
    let high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // Draws `data` (from `decode`) into `host` and calls `show(moment)` when the cursor moves.
  function draw(host, data, { categories, marks: given, by, show, first = data.peak }) {
    const marks = [...given].sort((a, b) => b.bytes - a.bytes);
    const xs = by === "changes" ? data.rows : data.times.map((ns) => ns / 1e6);
    // A moment reaches as far as the next one; the last needs some room, too.
    const [first_x, last_x] = [xs[0], xs[xs.length - 1]];
    const end_x = by === "changes" ? last_x + 1 : last_x + ((last_x - first_x) / 200 || 1);
    const again = (levels) => [...levels, levels[levels.length - 1]];
    const present = categories.filter(({ key }) => data.columns[key]);
    let below = xs.map(() => 0);
    const stacked = present.map(({ key }) => (below = below.map((b, i) => b + data.columns[key][i])));
    const spans = laned(data.spans);
    const laneCount = spans.reduce((most, span) => Math.max(most, span.lane + 1), 0);
    const top = Math.max(1, ...data.totals, ...marks.map((mark) => mark.bytes));
    const narrow = host.clientWidth < 520;
    const height = narrow ? 270 : 380;
    const headroom = 1.1 + (laneCount * 17) / (height - 70 - laneCount * 17);
    let moment = first;
    const toX = by === "changes" ? (ns) => xs[momentAt(data.times, ns)] : (ns) => ns / 1e6;

    // A node has two rows: while it runs, and when it is over.
    const ticks = data.estimated
      ? { incrs: COUNTS.map((n) => 2 * n), values: (_, rows) => rows.map((row) => row / 2) }
      : by === "changes" ? { incrs: COUNTS } : {};

    const plot = new uPlot({
      width: host.clientWidth,
      height,
      legend: { show: false },
      drawOrder: ["series", "axes"],
      scales: { x: { time: false }, y: { range: () => [0, top * headroom] } },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      axes: [
        {
          stroke: () => variable("--faint"), grid: { show: false }, size: 42,
          label: data.estimated ? "graph node" : by === "changes" ? "changes of the footprint" : "ms",
          ...ticks,
          labelSize: 16, labelFont: "12px system-ui", font: "12px system-ui",
        },
        {
          stroke: () => variable("--faint"), grid: { stroke: () => variable("--grid"), width: 1 },
          incrs: INCREMENTS, values: (_, ticks) => ticks.map(tick), size: narrow ? 60 : 74,
          font: "12px system-ui",
        },
      ],
      series: [
        {},
        // The topmost first: each one covers what is above it, down to zero.
        ...present.map(({ colour }) => ({
          fill: colour, stroke: () => variable("--ground"), width: 0.75,
          paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
        })).reverse(),
        // Not every colour stands out from the ground: the footprint has a line of its own.
        {
          stroke: () => variable("--faint"), width: 1.25,
          paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
        },
      ],
      hooks: {
        draw: [(u) => {
          lanes(u, spans, toX);
          marks.forEach((mark, i) => {
            // Of two lines that are close, the lower one has its label below it.
            const close = i > 0 && u.valToPos(mark.bytes, "y") - u.valToPos(marks[i - 1].bytes, "y") < 22;
            line(u, mark, peakIsLeft(u), !close);
          });
          peakBar(u, [xs[data.peak], xs[data.peak + 1] ?? end_x], data, present);
          peakMark(u, xs[data.peak], data.totals[data.peak], data.estimated);
        }],
        setCursor: [(u) => {
          if (u.cursor.left >= 0) set(momentAt(xs, u.posToVal(u.cursor.left, "x")), false);
        }],
      },
    }, [[...xs, end_x], ...stacked.reverse().map(again), again(data.totals)], host);

    function peakIsLeft(u) {
      return u.valToPos(xs[data.peak], "x", true) < u.bbox.left + u.bbox.width / 2;
    }

    function set(next, move = true) {
      moment = Math.max(0, Math.min(xs.length - 1, next));
      if (move) {
        const { min, max } = plot.scales.x;
        if (xs[moment] < min || xs[moment] > max) reset();
        plot.setCursor({ left: plot.valToPos(xs[moment], "x"), top: 1 }, false);
      }
      show(moment);
    }

    function reset() {
      plot.setScale("x", { min: first_x, max: end_x });
    }

    // uPlot knows the mouse only: a finger that is drawn along moves the cursor too.
    plot.over.style.touchAction = "pan-y";
    plot.over.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") return;
      const { left } = plot.over.getBoundingClientRect();
      plot.setCursor({ left: event.clientX - left, top: 1 });
    });
    const resized = new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== plot.width) {
        plot.setSize({ width: host.clientWidth, height });
      }
    });
    resized.observe(host);
    show(moment);
    return {
      moment: () => moment, set, reset, redraw: () => plot.redraw(false),
      destroy() { resized.disconnect(); plot.destroy(); },
    };
  }

  return { decode, draw, size, milliseconds };
})();
