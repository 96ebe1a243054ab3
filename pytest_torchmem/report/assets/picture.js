"use strict";
// A picture, read: exact moments, the bytes of each category at these, and who held most.
const torchmemPicture = (() => {
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

  return { decode, levels, momentAt, sums };
})();
