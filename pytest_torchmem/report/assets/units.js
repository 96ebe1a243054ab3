"use strict";
// Numbers as text, rounded as the terminal rounds them.
const torchmemUnits = (() => {
  const KIB = 1024;
  const UNITS = [["TiB", KIB ** 4], ["GiB", KIB ** 3], ["MiB", KIB ** 2], ["KiB", KIB]];

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
  function rounded(value, digits) {
    const scaled = value * 10 ** digits;
    const floor = Math.floor(scaled);
    const up = scaled - floor > 0.5 || (scaled - floor === 0.5 && floor % 2 !== 0);
    return (floor + (up ? 1 : 0)) / 10 ** digits;
  }

  const inTenths = (value) => rounded(value, 1).toFixed(1);

  const tick = (bytes) => size(bytes).replace(".0 ", " ");
  const signed = (bytes) => (bytes >= 0 ? "+" : "") + size(bytes);

  // "+100 %" of what was there before, as units.format_share has it; of next to nothing it is no share.
  function share(change, before) {
    if (!before || change > 1000 * before) return "";
    const percent = (100 * change) / before;
    const digits = Math.abs(percent) >= 0.95 ? 0 : 1;
    if (Math.abs(percent) < 0.05) return "";
    return `${percent > 0 ? "+" : ""}${rounded(percent, digits).toLocaleString("en", { minimumFractionDigits: digits })} %`;
  }

  function milliseconds(ns) {
    const ms = ns / 1e6;
    return `${ms.toFixed(ms < 10 ? 3 : ms < 1000 ? 1 : 0)} ms`;
  }

  const count = new Intl.NumberFormat("en").format;

  return { size, tick, signed, share, milliseconds, count };
})();
