"use strict";
// Each allocation as a block over time: as wide as it lives, as high as it is large, on those that
// are older. The largest have a block of their own; the others are one layer on top of them.
const torchmemBlocks = (() => {
  const { variable, ROUND } = torchmemPlot;
  const { sums, levels, momentAt } = torchmemPicture;
  const { heightOf } = torchmemChart;
  const FIELDS = 5;
  // A block reaches into the one below it, so that thin ones leave no seams of the ground.
  const SEAM = 0.6;

  function decode(picture) {
    const { who, files, frames, stacks, blocks: flat, rest, count } = picture.blocks;
    const blocks = [];
    let begin = 0;
    for (let at = 0; at < flat.length; at += FIELDS) {
      const [after, lives, bytes, maker, stack] = flat.slice(at, at + FIELDS);
      begin += after;
      blocks.push({ begin, end: begin + lives, bytes, who: who[maker], stack });
    }
    return {
      blocks, count,
      moments: sums(picture.rows),
      rest: levels(rest, picture.rows.length),
      changeCount: picture.change_count,
      estimated: picture.estimated,
      // The calls around a block, innermost first: a path in a tree.
      stackOf(block) {
        const found = [];
        for (let node = block.stack; node >= 0; node = stacks[2 * node]) {
          const [file, line, name] = frames[stacks[2 * node + 1]];
          found.push({ file: files[file], line, name });
        }
        return found;
      },
    };
  }

  const within = (module, path) => !path || module === path || module.startsWith(`${path}.`);

  const chosen = (data, only, module) => data.blocks
    .filter(({ who }) => (!only || who.category === only) && within(who.module, module))
    .map((block) => ({ block, places: [] }));

  // A block lies on the older ones, and sinks when one of them goes. Its places are pairs: from
  // which change on, and how many bytes are below it. Returns the same of what lies on all blocks.
  function layOut(shown) {
    const events = shown.flatMap((one) => [[one.block.begin, 1, one], [one.block.end, 0, one]]);
    events.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const live = [];
    const tops = [0, 0];
    let height = 0;
    const put = (places, row, bytes) => {
      if (places[places.length - 2] === row) places[places.length - 1] = bytes;
      else places.push(row, bytes);
    };
    for (const [row, born, one] of events) {
      if (born) {
        put(one.places, row, height);
        live.push(one);
      } else {
        const at = live.indexOf(one);
        live.splice(at, 1);
        for (const { places } of live.slice(at)) put(places, row, places[places.length - 1] - one.block.bytes);
      }
      height += born ? one.block.bytes : -one.block.bytes;
      put(tops, row, height);
    }
    return tops;
  }

  // What lies below at a change: that of the last place at or before it.
  function belowAt(places, row) {
    let low = 0;
    let high = places.length / 2 - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (places[2 * middle] <= row) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // The corners of one block within the frame; what changes within half a pixel is left out.
  function outline(frame, { block, places }) {
    const path = new Path2D();
    const back = [];
    const end = frame.x(Math.min(block.end, frame.to));
    let last = -Infinity;
    for (let at = belowAt(places, frame.from); 2 * at < places.length; at += 1) {
      const row = places[2 * at];
      if (row > frame.to) break;
      const x = frame.x(Math.max(row, frame.from));
      const next = 2 * at + 2 < places.length ? Math.min(frame.x(places[2 * at + 2]), end) : end;
      if (next - last < 0.5 && next !== end) continue;
      const [low, high] = [frame.y(places[2 * at + 1]) + SEAM, frame.y(places[2 * at + 1] + block.bytes)];
      path.lineTo(x, high);
      path.lineTo(next, high);
      back.push([x, low], [next, low]);
      last = next;
    }
    for (let at = back.length - 2; at >= 0; at -= 2) {
      path.lineTo(...back[at + 1]);
      path.lineTo(...back[at]);
    }
    path.closePath();
    return path;
  }

  // What the smaller ones hold together, at each change at which that or what is below it changes.
  function restLayer(data, tops) {
    const rows = [...new Set([...data.moments, ...tops.filter((_, i) => i % 2 === 0)])].sort((a, b) => a - b);
    return rows.map((row) => {
      const below = tops[2 * belowAt(tops, row) + 1];
      return [row, below, below + data.rest[momentAt(data.moments, row)]];
    });
  }

  function drawRest(ctx, frame, layer, end) {
    ctx.fillStyle = variable("--rest");
    layer.forEach(([row, below, above], i) => {
      const next = i + 1 < layer.length ? layer[i + 1][0] : end;
      if (next < frame.from || row > frame.to || above === below) return;
      const [x, y] = [frame.x(row), frame.y(above)];
      ctx.fillRect(x, y, Math.max(frame.x(next) - x, 0.5), frame.y(below) - y);
    });
  }

  // Draws `data` (from `decode`) and calls `show(block, row)` as the pointer moves, with null where no
  // block is. `only` and `module` leave the blocks of one category, or of one module, alone.
  function draw(host, data, { categories, only = "", module = "", show }) {
    const colours = Object.fromEntries(categories.map(({ key, colour }) => [key, colour]));
    const shown = chosen(data, only, module);
    const tops = layOut(shown);
    const layer = only || module ? [] : restLayer(data, tops);
    const end = data.changeCount;
    const most = Math.max(1, ...layer.map(([, , above]) => above), tops.reduce((high, bytes, i) => (i % 2 ? Math.max(high, bytes) : high), 0));
    let [at, pinned] = [null, false];

    const plot = torchmemPlot.create(host, {
      height: heightOf(host), domain: [0, end], least: 4, top: () => most * 1.06,
      axis: data.estimated
        ? { increments: ROUND.filter((n) => n >= 1).map((n) => 2 * n), text: (row) => `${row / 2}`, name: "node of the graph" }
        : { increments: ROUND.filter((n) => n >= 1), text: torchmemUnits.count, name: "allocations and frees, in order" },
      paint(ctx, frame) {
        ctx.strokeStyle = variable("--ground");
        ctx.lineWidth = 0.5;
        for (const one of shown) {
          if (one.block.end < frame.from || one.block.begin > frame.to) continue;
          const width = frame.x(one.block.end) - frame.x(one.block.begin);
          ctx.fillStyle = colours[one.block.who.category];
          if (width < 1) {
            // What is over within a pixel has one all the same.
            const [row, below] = one.places;
            ctx.fillRect(Math.floor(frame.x(row)), frame.y(below + one.block.bytes), 1, frame.y(below) - frame.y(below + one.block.bytes));
            continue;
          }
          const path = outline(frame, one);
          ctx.fill(path);
          // An edge around what is hardly larger than the edge would hide it.
          if (width > 6 && frame.y(0) - frame.y(one.block.bytes) > 3) ctx.stroke(path);
        }
        drawRest(ctx, frame, layer, end);
      },
      highlight(ctx, frame) {
        if (!at) return;
        const path = outline(frame, at);
        for (const [width, colour] of [[5, "--ground"], [2.5, "--ink"]]) {
          ctx.lineWidth = width;
          ctx.strokeStyle = variable(colour);
          ctx.stroke(path);
        }
      },
      hover(row, bytes) {
        plot.show(row);
        if (!pinned) choose(find(row, bytes), row);
      },
      press(row, bytes) {
        const found = find(row, bytes);
        pinned = found !== null;
        choose(found, row);
      },
    });

    function find(row, bytes) {
      return shown.find(({ block, places }) => {
        if (block.begin > row || block.end <= row) return false;
        const below = places[2 * belowAt(places, row) + 1];
        return below <= bytes && bytes < below + block.bytes;
      }) ?? null;
    }

    function choose(found, row) {
      const other = found !== at;
      at = found;
      if (other) plot.highlight();
      show(found?.block ?? null, row);
    }

    // By keys the blocks are read in the order in which they were made.
    function step(to) {
      if (!shown.length) return;
      const found = shown[Math.max(0, Math.min(shown.length - 1, to))];
      pinned = true;
      plot.reach(found.block.begin);
      plot.show(found.block.begin);
      choose(found, found.block.begin);
    }

    const now = () => shown.indexOf(at);
    const largest = () => shown.reduce((best, one, i) => (one.block.bytes > shown[best].block.bytes ? i : best), 0);
    const moves = {
      ArrowRight: () => now() + 1, ArrowLeft: () => now() - 1, ArrowUp: () => now() + 1, ArrowDown: () => now() - 1,
      PageUp: () => now() + 10, PageDown: () => now() - 10, Home: () => 0, End: () => shown.length - 1,
      p: largest, P: largest,
    };
    show(null, 0);
    return {
      ...plot,
      moment: () => undefined,
      leave() {
        plot.show(undefined);
        if (!pinned) choose(null, 0);
      },
      key(key) {
        if (key === "Escape" && pinned) {
          pinned = false;
          choose(null, 0);
          return true;
        }
        if (!(key in moves)) return false;
        step(moves[key]());
        return true;
      },
      shown: shown.length,
    };
  }

  return { decode, draw };
})();
