"use strict";
// One stacked timeline. A picture holds exact moments; between two of them the earlier one is drawn
// on, because memory changes in steps.
const torchmemChart = (() => {
  const { size, signed } = torchmemUnits;
  const { label, variable, ROUND, FONT, NARROW } = torchmemPlot;
  const LANE = 17;
  const MOST_LANES = 6;

  const sums = (differences) => {
    let value = 0;
    return differences.map((difference) => (value += difference));
  };

  // A series of (moment, bytes from there on) pairs, one number for each moment.
  function levels(changes, count) {
    const values = new Float64Array(count);
    for (let at = 0; at < changes.length; at += 2) values.fill(changes[at + 1], changes[at]);
    return values;
  }

  function decode(picture) {
    const times = sums(picture.times_ns);
    const columns = {};
    const totals = new Float64Array(times.length);
    for (const [category, changes] of Object.entries(picture.levels)) {
      columns[category] = levels(changes, times.length);
      columns[category].forEach((bytes, i) => { totals[i] += bytes; });
    }
    return {
      times, columns, totals,
      tracks: picture.tracks.map((track) => ({
        who: track.contributor, levels: levels(track.levels, times.length),
      })),
      rows: sums(picture.rows),
      changeCount: picture.change_count,
      spans: picture.spans.map(([kind, name, begin, end]) => ({ kind, name, begin, end })),
      estimated: picture.estimated,
      peak: totals.reduce((best, total, i) => (total > totals[best] ? i : best), 0),
    };
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

  const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);

  // --- lanes: what ran when, above the data, so that colours stay what they are ---------------------

  const PHASES = { backward: "backward pass", optimizer: "optimizer step", idle: "GPU idle" };
  const spanName = (span) => (span.kind === "region" ? `region ${span.name}` : PHASES[span.kind] ?? span.name);

  // A step is the stretch that its mark ends; `kept` are the bytes alive at the end of each. Nothing
  // marks where the first begins: what the body did before its loop is in there, warm-up as well.
  function stepsOf(data, kept) {
    const ends = data.spans.filter((span) => span.kind === "step").map((span) => span.end);
    return ends.map((end, i) => {
      const change = i && kept.length === ends.length ? signed(kept[i] - kept[i - 1]) : "";
      const told = i ? change && `: ${change}` : ", and what came before it";
      return { kind: "step", name: `step ${i + 1}${told}`, short: change || `${i + 1}`, begin: i ? ends[i - 1] : data.times[0], end };
    });
  }

  // Spans that overlap get lanes of their own; the long ones come first. Regions lie above phases,
  // and steps below them.
  function laned(data, kept) {
    const groups = [
      data.spans.filter((span) => span.kind === "region"),
      data.spans.filter((span) => span.kind in PHASES),
      stepsOf(data, kept),
    ];
    let above = 0;
    return groups.flatMap((spans) => {
      const ends = [];
      const placed = spans
        .filter((span) => span.end > span.begin)
        .sort((a, b) => a.begin - b.begin || b.end - a.end)
        .map((span) => {
          let lane = ends.findIndex((end) => end <= span.begin);
          if (lane < 0) lane = ends.length;
          ends[lane] = span.end;
          return { ...span, lane: above + lane };
        });
      above += ends.length;
      return placed;
    }).filter((span) => span.lane < MOST_LANES);
  }

  // A region is an outline, a phase is filled, and a step ends in a line.
  function drawLanes(ctx, frame, spans, toX) {
    const height = LANE - 2;
    ctx.font = FONT;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const span of spans) {
      const from = Math.max(frame.left, frame.x(toX(span.begin)));
      const to = Math.min(frame.left + frame.width, frame.x(toX(span.end)));
      const top = frame.top + span.lane * LANE;
      if (to < from) continue;
      const width = Math.max(to - from - 2, 1);
      ctx.fillStyle = variable("--shade");
      ctx.strokeStyle = variable("--faint");
      ctx.lineWidth = 1;
      if (span.kind === "region") ctx.strokeRect(from + 0.5, top + 0.5, width, height - 1);
      else if (span.kind === "step") {
        ctx.fillRect(from, top + height - 2, width, 2);
        ctx.beginPath();
        ctx.setLineDash([2, 3]);
        ctx.moveTo(to, top);
        ctx.lineTo(to, frame.top + frame.height);
        ctx.stroke();
        ctx.setLineDash([]);
      } else ctx.fillRect(from, top, width, height);
      const texts = [span.kind === "region" ? span.name : spanName(span), span.short ?? ""];
      const text = texts.find((one) => ctx.measureText(one).width < width - 6);
      ctx.fillStyle = variable(span.kind === "region" ? "--ink" : "--faint");
      if (text) ctx.fillText(text, from + 4, top + height / 2);
    }
  }

  // --- marks --------------------------------------------------------------------------------------

  // The label stands at the end that the peak's label does not need.
  function drawLine(ctx, frame, { bytes, text, dash, colour: name }, atRight, above) {
    const [colour, y, right] = [variable(name), frame.y(bytes), frame.left + frame.width];
    ctx.save();
    const across = new Path2D();
    across.moveTo(frame.left, y);
    across.lineTo(right, y);
    // A halo keeps the dashes apart from the data that they cross.
    ctx.strokeStyle = variable("--ground");
    ctx.globalAlpha = 0.7;
    ctx.lineWidth = 4;
    ctx.stroke(across);
    ctx.strokeStyle = colour;
    ctx.globalAlpha = 1;
    ctx.lineWidth = 2;
    ctx.setLineDash(dash);
    ctx.stroke(across);
    label(ctx, text, atRight ? right - 6 : frame.left + 6, y + (above ? -5 : 18), atRight ? "right" : "left", colour);
    ctx.restore();
  }

  function drawLines(ctx, frame, marks, peakIsLeft) {
    marks.forEach((mark, i) => {
      // Of two lines that are close, the lower one has its label below it.
      const close = i > 0 && frame.y(mark.bytes) - frame.y(marks[i - 1].bytes) < 22;
      drawLine(ctx, frame, mark, peakIsLeft, !close);
    });
  }

  function drawPeak(ctx, frame, x, bytes, estimated) {
    const left = frame.x(x);
    if (left < frame.left || left > frame.left + frame.width) return;
    const y = frame.y(bytes);
    ctx.fillStyle = variable("--ink");
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left - 5, y - 8.5);
    ctx.lineTo(left + 5, y - 8.5);
    ctx.fill();
    const late = left > frame.left + frame.width / 2;
    label(ctx, `${estimated ? "estimated " : ""}peak ${size(bytes)}`, left + (late ? -10 : 10), y - 2,
      late ? "right" : "left", variable("--ink"));
  }

  // --- data ---------------------------------------------------------------------------------------

  // The moments to draw. Where several share a pixel, the highest of them stands for all: a picture
  // of 100,000 moments is drawn with as many points as one of 1,000.
  function visible(xs, totals, frame) {
    const first = momentAt(xs, frame.from);
    const last = momentAt(xs, frame.to);
    const moments = [];
    if (last - first <= 2 * frame.width) {
      for (let i = first; i <= last; i += 1) moments.push(i);
      return moments;
    }
    let [pixel, best] = [-1, first];
    for (let i = first; i <= last; i += 1) {
      const here = Math.floor(frame.x(xs[i]));
      if (here !== pixel) {
        if (pixel >= 0) moments.push(best);
        [pixel, best] = [here, i];
      } else if (totals[i] > totals[best]) best = i;
    }
    return [...moments, best];
  }

  // Steps from left to right over the moments, as points of a path that is already begun.
  function steps(path, frame, xs, moments, heights, end) {
    moments.forEach((moment, i) => {
      const y = frame.y(heights[moment]);
      const to = i + 1 < moments.length ? xs[moments[i + 1]] : end;
      path.lineTo(frame.x(xs[moment]), y);
      path.lineTo(frame.x(to), y);
    });
  }

  function drawAreas(ctx, frame, layers, xs, moments, end) {
    const bottom = frame.y(0);
    ctx.lineWidth = 0.75;
    // The topmost first: each one covers what is above it, down to zero.
    for (const { heights, colour } of [...layers].reverse()) {
      const path = new Path2D();
      path.moveTo(frame.x(xs[moments[0]]), bottom);
      steps(path, frame, xs, moments, heights, end);
      path.lineTo(frame.x(end), bottom);
      ctx.fillStyle = colour;
      ctx.strokeStyle = variable("--ground");
      ctx.fill(path);
      ctx.stroke(path);
    }
  }

  function drawTotal(ctx, frame, xs, moments, heights, end, { colour = "--faint", width = 1.25, dash = [] } = {}) {
    const path = new Path2D();
    path.moveTo(frame.x(xs[moments[0]]), frame.y(heights[moments[0]]));
    steps(path, frame, xs, moments, heights, end);
    ctx.save();
    ctx.strokeStyle = variable(colour);
    ctx.lineWidth = width;
    ctx.setLineDash(dash);
    ctx.stroke(path);
    ctx.restore();
  }

  // A peak that is over within a pixel is the one thing that must not be lost.
  function drawNarrowPeak(ctx, frame, [from, to], layers, peak) {
    const left = frame.x(from);
    if (left < frame.left || left > frame.left + frame.width || frame.x(to) - left >= 2) return;
    let below = 0;
    for (const { heights, colour } of layers) {
      const top = frame.y(heights[peak]);
      ctx.fillStyle = colour;
      ctx.fillRect(left, top, 2, frame.y(below) - top);
      below = heights[peak];
    }
  }

  // --- the whole ----------------------------------------------------------------------------------

  const axisOf = (data, by) => {
    // A node has two rows: while it runs, and when it is over.
    if (data.estimated) return { increments: ROUND.filter((n) => n >= 1).map((n) => 2 * n), text: (row) => `${row / 2}`, name: "node of the graph" };
    if (by === "changes") return { increments: ROUND.filter((n) => n >= 1), text: torchmemUnits.count, name: "allocations and frees, in order" };
    return { increments: ROUND, text: (ms) => `${+ms.toFixed(6)}`, name: "milliseconds" };
  };

  function stacked(data, present) {
    let below = new Float64Array(data.times.length);
    return present.map(({ key, colour }) => {
      below = below.map((bytes, i) => bytes + data.columns[key][i]);
      return { key, colour, heights: below };
    });
  }

  const heightOf = (host) => (host.clientWidth < NARROW ? 280 : 380);

  // Draws `data` (from `decode`) into `host` and calls `show(moment)` when the cursor moves. `only` is
  // a category that stands alone; `before` is another run's data, drawn as a line.
  function draw(host, data, { categories, marks: given, by, show, steps: kept = [], only = "", before = null, first = data.peak }) {
    const marks = only ? [] : [...given].sort((a, b) => b.bytes - a.bytes);
    const along = (one) => (by === "changes" ? one.rows : one.times.map((ns) => ns / 1e6));
    const xs = along(data);
    // A moment reaches as far as the next one; the last needs some room, too.
    const endOf = (some) => {
      const last = some[some.length - 1];
      return by === "changes" ? last + 1 : last + ((last - some[0]) / 200 || 1);
    };
    const end = endOf(xs);
    const present = categories.filter(({ key }) => data.columns[key] && (!only || key === only));
    const layers = stacked(data, present);
    const totals = layers.length ? layers[layers.length - 1].heights : data.totals;
    const peak = only ? totals.reduce((best, bytes, i) => (bytes > totals[best] ? i : best), 0) : data.peak;
    const then = before && { xs: along(before), heights: only ? before.columns[only] ?? new Float64Array(before.times.length) : before.totals };
    const spans = laned(data, kept);
    const laneCount = spans.reduce((most, span) => Math.max(most, span.lane + 1), 0);
    const height = heightOf(host);
    const most = Math.max(1, largest(totals), then ? largest(then.heights) : 0, ...marks.map((mark) => mark.bytes));
    const headroom = 1.1 + (laneCount * LANE) / (height - 70 - laneCount * LANE);
    const toX = by === "changes" ? (ns) => xs[momentAt(data.times, ns)] : (ns) => ns / 1e6;
    let moment = first;

    const plot = torchmemPlot.create(host, {
      height, domain: [Math.min(xs[0], then ? then.xs[0] : xs[0]), Math.max(end, then ? endOf(then.xs) : end)],
      least: by === "changes" ? 4 : (end - xs[0]) / 1e4,
      top: () => most * headroom,
      axis: axisOf(data, by),
      paint(ctx, frame) {
        const moments = visible(xs, totals, frame);
        drawAreas(ctx, frame, layers, xs, moments, end);
        // Not every colour stands out from the ground: the footprint has a line of its own.
        drawTotal(ctx, frame, xs, moments, totals, end);
        if (then) drawTotal(ctx, frame, then.xs, visible(then.xs, then.heights, frame), then.heights, endOf(then.xs), { colour: "--accent", width: 2, dash: [6, 3] });
        drawLanes(ctx, frame, spans, toX);
        drawNarrowPeak(ctx, frame, [xs[peak], xs[peak + 1] ?? end], layers, peak);
      },
      above(ctx, frame) {
        drawLines(ctx, frame, marks, frame.x(xs[peak]) < frame.left + frame.width / 2);
        drawPeak(ctx, frame, xs[peak], totals[peak], data.estimated);
      },
      hover(x, _, y, over) {
        const lane = spans.find((span) => Math.floor(y / LANE) === span.lane && toX(span.begin) <= x && x <= toX(span.end));
        over.title = lane ? spanName(lane) : "";
        plot.show(x);
        set(momentAt(xs, x), false);
      },
    });

    function set(next, move = true) {
      moment = Math.max(0, Math.min(xs.length - 1, next));
      if (move) {
        plot.reach(xs[moment]);
        plot.show(xs[moment]);
      }
      show(moment);
    }

    const page = Math.max(1, Math.round(xs.length / 10));
    const moves = {
      ArrowRight: () => moment + 1, ArrowLeft: () => moment - 1, ArrowUp: () => moment + 1, ArrowDown: () => moment - 1,
      PageUp: () => moment + page, PageDown: () => moment - page, Home: () => 0, End: () => xs.length - 1,
      p: () => data.peak, P: () => data.peak,
    };
    show(moment);
    return {
      ...plot,
      moment: () => moment,
      leave() { plot.show(undefined); set(data.peak, false); },
      key(key) {
        if (!(key in moves)) return false;
        set(moves[key]());
        return true;
      },
    };
  }

  return { decode, draw, levels, momentAt, spanName, heightOf, sums };
})();
