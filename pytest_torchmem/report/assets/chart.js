"use strict";
// One stacked timeline: between two moments the earlier one is drawn on, because memory changes in steps.
const torchmemChart = (() => {
  const { size } = torchmemUnits;
  const { label, variable, ROUND, NARROW } = torchmemPlot;
  const { momentAt } = torchmemPicture;
  const { LANE, laned, drawLanes, spanName } = torchmemLanes;

  const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);

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

  return { draw, heightOf };
})();
