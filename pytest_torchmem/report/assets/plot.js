"use strict";
// A frame with two axes on a canvas: bytes upwards, changes or time to the right. The frame knows
// zoom, pan and the cursor; `paint` draws the data into it. Positions are in CSS pixels.
const torchmemPlot = (() => {
  const FONT = "12px system-ui, sans-serif";
  const BOTTOM = 42;
  const NARROW = 520;
  const LEAST_DRAG = 5;
  // Ticks at powers of two: 256 MiB reads better than 262.1 MiB.
  const POWERS = Array.from({ length: 60 }, (_, power) => 2 ** power);
  const TENS = Array.from({ length: 24 }, (_, power) => 10 ** (power - 9));
  const ROUND = TENS.flatMap((ten) => [ten, 2 * ten, 5 * ten]);

  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The multiples of the smallest increment that leaves each tick its room.
  function ticks(from, to, increments, most) {
    const step = increments.find((one) => (to - from) / one <= most) ?? to - from;
    const found = [];
    for (let n = Math.ceil(from / step); n * step <= to; n += 1) found.push(n * step);
    return found;
  }

  // A halo keeps a label readable where it lies on data.
  function label(ctx, text, x, y, align, colour) {
    ctx.save();
    ctx.setLineDash([]);
    ctx.font = `600 ${FONT}`;
    ctx.textAlign = align;
    ctx.textBaseline = "bottom";
    ctx.lineJoin = "round";
    ctx.lineWidth = 4;
    ctx.strokeStyle = variable("--ground");
    ctx.strokeText(text, x, y);
    ctx.fillStyle = colour;
    ctx.fillText(text, x, y);
    ctx.restore();
  }

  function frameOf(host, height, range, top) {
    const narrow = host.clientWidth < NARROW;
    const left = narrow ? 60 : 74;
    const frame = { left, top: 6, width: Math.max(40, host.clientWidth - left - 8), height: height - BOTTOM - 6, ...range };
    const perX = frame.width / (frame.to - frame.from || 1);
    frame.x = (value) => frame.left + (value - frame.from) * perX;
    frame.y = (bytes) => frame.top + frame.height * (1 - bytes / top);
    frame.valueAt = (x) => frame.from + (x - frame.left) / perX;
    frame.bytesAt = (y) => top * (1 - (y - frame.top) / frame.height);
    return frame;
  }

  function axes(ctx, frame, top, { increments, text, name }) {
    const [bottom, right] = [frame.top + frame.height, frame.left + frame.width];
    ctx.font = FONT;
    ctx.fillStyle = variable("--faint");
    ctx.strokeStyle = variable("--grid");
    ctx.lineWidth = 1;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (const bytes of ticks(0, top, POWERS, frame.height / 36)) {
      const y = Math.round(frame.y(bytes)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(frame.left, y);
      ctx.lineTo(right, y);
      ctx.stroke();
      ctx.fillText(torchmemUnits.tick(bytes), frame.left - 8, y);
    }
    ctx.textBaseline = "top";
    ctx.textAlign = "center";
    for (const value of ticks(frame.from, frame.to, increments, frame.width / 62)) {
      const x = frame.x(value);
      ctx.beginPath();
      ctx.moveTo(x, bottom);
      ctx.lineTo(x, bottom + 4);
      ctx.stroke();
      ctx.fillText(text(value), Math.min(x, right - ctx.measureText(text(value)).width / 2 + 6), bottom + 7);
    }
    ctx.fillText(name, frame.left + frame.width / 2, bottom + 25);
  }

  // Options: `domain` [first, last]; `least`, the shortest range that zooming reaches; `height`;
  // `top(range)`, the bytes at the upper edge; `axis` {increments, text, name}; `paint(ctx, frame)`;
  // `highlight(ctx, frame)`, on a canvas of its own, so that it can follow the pointer;
  // `hover(value, bytes, place)` as the pointer moves, and `press(value, bytes)` for a click.
  function create(host, options) {
    const canvas = document.createElement("canvas");
    const upper = document.createElement("canvas");
    const over = document.createElement("div");
    const cursor = document.createElement("div");
    const selection = document.createElement("div");
    over.className = "over";
    cursor.className = "cursor";
    selection.className = "selection";
    cursor.hidden = true;
    selection.hidden = true;
    over.append(selection, cursor);
    const box = document.createElement("div");
    box.className = "timeline";
    upper.className = "upper";
    box.append(canvas, upper, over);
    host.append(box);

    const [first, last] = options.domain;
    let range = { from: first, to: last };
    let frame;
    let shown; // where the cursor stands, as a value
    let waiting = 0;
    let drag = null;

    function draw() {
      waiting = 0;
      const { clientWidth: width } = host;
      if (!width) return;
      const ratio = window.devicePixelRatio || 1;
      const top = options.top(range);
      frame = frameOf(host, options.height, range, top);
      for (const one of [canvas, upper]) {
        one.width = Math.round(width * ratio);
        one.height = Math.round(options.height * ratio);
      }
      Object.assign(over.style, {
        left: `${frame.left}px`, top: `${frame.top}px`, width: `${frame.width}px`, height: `${frame.height}px`,
      });
      const ctx = canvas.getContext("2d");
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, width, options.height);
      inFrame(ctx, options.paint);
      axes(ctx, frame, top, options.axis);
      options.above?.(ctx, frame);
      place();
      highlight();
    }

    function inFrame(ctx, paint) {
      ctx.save();
      ctx.beginPath();
      ctx.rect(frame.left, frame.top, frame.width, frame.height);
      ctx.clip();
      paint(ctx, frame);
      ctx.restore();
    }

    function highlight() {
      if (!options.highlight || !frame) return;
      const ratio = window.devicePixelRatio || 1;
      const ctx = upper.getContext("2d");
      ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
      ctx.clearRect(0, 0, upper.width, upper.height);
      inFrame(ctx, options.highlight);
    }

    const redraw = () => { waiting ||= requestAnimationFrame(draw); };

    function place() {
      cursor.hidden = shown === undefined || shown < range.from || shown > range.to;
      if (!cursor.hidden) cursor.style.left = `${frame.x(shown) - frame.left}px`;
    }

    function show(value) {
      shown = value;
      place();
    }

    function see(from, to) {
      const width = Math.min(last - first, Math.max(to - from, options.least));
      const start = Math.min(Math.max(from, first), last - width);
      range = { from: start, to: start + width };
      redraw();
    }

    const reset = () => see(first, last);

    function zoomBy(factor, about = shown ?? (range.from + range.to) / 2) {
      see(about - (about - range.from) * factor, about + (range.to - about) * factor);
    }

    function panBy(part) {
      const by = part * (range.to - range.from);
      see(range.from + by, range.to + by);
    }

    // Brings a value into sight without another zoom.
    function reach(value) {
      const width = range.to - range.from;
      if (value < range.from || value > range.to) see(value - width / 2, value + width / 2);
    }

    const within = (event) => {
      const { left, top } = over.getBoundingClientRect();
      const x = Math.min(Math.max(event.clientX - left, 0), frame.width) + frame.left;
      return [frame.valueAt(x), frame.bytesAt(event.clientY - top + frame.top), event.clientY - top, x];
    };

    function moved(event) {
      const [value, bytes, y, x] = within(event);
      if (drag) {
        drag.moved ||= Math.abs(event.clientX - drag.x) >= LEAST_DRAG;
        if (drag.pans) {
          const by = frame.valueAt(frame.left + drag.last - event.clientX) - frame.from;
          drag.last = event.clientX;
          see(range.from + by, range.to + by);
          return;
        }
        const [a, b] = [frame.x(drag.value), x].sort((p, q) => p - q);
        selection.hidden = !drag.moved;
        Object.assign(selection.style, { left: `${a - frame.left}px`, width: `${b - a}px` });
      }
      options.hover?.(value, bytes, y, over);
    }

    function down(event) {
      if (event.pointerType !== "mouse") { moved(event); return; }
      if (event.button) return;
      over.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, last: event.clientX, value: within(event)[0], pans: event.shiftKey, moved: false };
    }

    function up(event) {
      const ended = drag;
      drag = null;
      selection.hidden = true;
      if (ended?.moved && !ended.pans) {
        const [a, b] = [ended.value, within(event)[0]].sort((p, q) => p - q);
        see(a, b);
      }
      if (ended?.moved) over.addEventListener("click", (click) => click.stopImmediatePropagation(), { once: true, capture: true });
    }

    // The wheel alone scrolls the page; sideways or with Shift it pans, with Ctrl it zooms.
    function wheel(event) {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !sideways) return;
      event.preventDefault();
      if (event.ctrlKey) zoomBy(1.0015 ** event.deltaY, within(event)[0]);
      else panBy((event.deltaX || event.deltaY) / frame.width);
    }

    over.addEventListener("pointermove", moved);
    over.addEventListener("pointerdown", down);
    over.addEventListener("pointerup", up);
    over.addEventListener("dblclick", reset);
    over.addEventListener("click", (event) => options.press?.(...within(event)));
    over.addEventListener("wheel", wheel, { passive: false });
    const resized = new ResizeObserver(() => {
      if (frame && host.clientWidth && host.clientWidth * (window.devicePixelRatio || 1) !== canvas.width) redraw();
    });
    resized.observe(host);
    draw();
    return {
      show, reset, see, zoomBy, panBy, reach, redraw, highlight,
      range: () => range,
      destroy() {
        resized.disconnect();
        cancelAnimationFrame(waiting);
        box.remove();
      },
    };
  }

  return { create, label, variable, ROUND, FONT, NARROW };
})();
