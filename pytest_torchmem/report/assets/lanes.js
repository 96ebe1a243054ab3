"use strict";
// What ran when, in lanes above the data, so that colours stay what they are: regions, phases, steps.
const torchmemLanes = (() => {
  const { signed } = torchmemUnits;
  const { variable, FONT } = torchmemPlot;
  const LANE = 17;
  const MOST_LANES = 6;

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

  return { LANE, laned, drawLanes, spanName };
})();
