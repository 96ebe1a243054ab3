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
  function inTenths(value) {
    const tenths = Math.floor(value * 10);
    const rest = value * 10 - tenths;
    const up = rest > 0.5 || (rest === 0.5 && tenths % 2 !== 0);
    return ((tenths + (up ? 1 : 0)) / 10).toFixed(1);
  }

  const tick = (bytes) => size(bytes).replace(".0 ", " ");
  const signed = (bytes) => (bytes >= 0 ? "+" : "") + size(bytes);

  // "+100.0 %" of what was there before; nothing of nothing is no share.
  function share(change, before) {
    if (!before || !change) return "";
    const percent = (100 * change) / before;
    return `${percent > 0 ? "+" : ""}${percent.toFixed(1)} %`;
  }

  function milliseconds(ns) {
    const ms = ns / 1e6;
    return `${ms.toFixed(ms < 10 ? 3 : ms < 1000 ? 1 : 0)} ms`;
  }

  const count = new Intl.NumberFormat("en").format;

  return { size, tick, signed, share, milliseconds, count };
})();
