"""Bytes by category over time, for measured and estimated memory; and the peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.results import Peak


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Bytes of each category that are live on one device, after each change.

    Attributes:
        times_ns: int64, shape (T,), not decreasing; the moment of each change. Estimated timelines
            count graph nodes instead.
        sizes: int64, shape (T, C); row t holds the bytes live after change t, one column for each
            `Category` in the enum's order.
        estimated: True when the numbers were not measured.
    """

    times_ns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    estimated: bool = False

    @property
    def total(self) -> NDArray[np.int64]:
        """The footprint: int64, shape (T,)."""
        total: NDArray[np.int64] = self.sizes.sum(axis=1)
        return total

    def of(self, category: Category) -> NDArray[np.int64]:
        """Bytes of one category: int64, shape (T,)."""
        return self.sizes[:, category.column]

    def at(self, row: int) -> CategoryBytes:
        """The composition after change ``row``."""
        return CategoryBytes(*(int(amount) for amount in self.sizes[row]))

    @property
    def peak_row(self) -> int:
        """The first row at which the footprint is largest; the timeline must not be empty."""
        return int(np.argmax(self.total))

    @property
    def largest(self) -> CategoryBytes:
        """Each category's own largest value over time; zeros for an empty timeline."""
        if not len(self.sizes):
            return CategoryBytes()
        return CategoryBytes(*(int(amount) for amount in self.sizes.max(axis=0)))


def build_timeline(
    evidence: Evidence, labels: NDArray[np.uint8]
) -> tuple[Timeline, NDArray[np.float64]]:
    """Return the window's timeline, and the rank of each of its rows: float64, shape (T,).

    The first row is the beginning of the window: the storages from before that it touches. Three
    storages in a window from 0 to 9: a (4 bytes, from before), b (2 bytes, 1 to 3), c (8, from 3)::

        ranks     [0,   0 (a),  1 (b),  3 (c),  3 (b is freed)]
        amounts   [0,   +4,     +2,     +8,     -2]
        levels    [0,   4,      6,      14,     12]
        rows          rank 0: 4     rank 1: 6       rank 3: 12

    Changes at one rank are one row: those at the beginning, and the end of a storage in whose place
    another one is born.
    """
    storages, window = evidence.storages, evidence.window
    counted = np.flatnonzero(evidence.counted)
    begin = np.maximum(storages.born[counted], window.begin)
    died = storages.died[counted]
    freed = died <= window.end
    ranks = np.concatenate([[window.begin], begin, died[freed]])
    sizes = storages.size_bytes[counted]
    amounts = np.concatenate([[0], sizes, -sizes[freed]])
    columns = np.concatenate([[0], labels[counted], labels[counted][freed]]).astype(np.uint8)
    order = np.argsort(ranks, kind="stable")
    ranks, amounts, columns = ranks[order], amounts[order], columns[order]
    last = np.append(np.flatnonzero(np.diff(ranks)), len(ranks) - 1)
    ranks = ranks[last]
    # Most categories stay at zero; by columns, nothing is written to these.
    levels = np.zeros((len(ranks), len(Category)), np.int64, order="F")
    for column in np.unique(columns).tolist():
        levels[:, column] = np.cumsum(np.where(columns == column, amounts, 0))[last]
    return Timeline(times_of(evidence, ranks), levels), ranks


def times_of(evidence: Evidence, ranks: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ranks as nanoseconds since the first event: int64, of the same shape."""
    starts: NDArray[np.void] = np.sort(evidence.tree.trace.events["start_ns"])
    if not len(starts):
        return np.zeros(len(ranks), np.int64)
    rows = np.clip(np.floor(ranks), 0, len(starts) - 1).astype(np.int64)
    times: NDArray[np.int64] = (starts[rows] - starts[0]).astype(np.int64)
    return times


def find_peak(timeline: Timeline) -> Peak:
    """Return the peak of a timeline, without what was live at it."""
    if not len(timeline.times_ns):
        return Peak(0, 0, CategoryBytes(), CategoryBytes())
    row = timeline.peak_row
    at_peak = timeline.at(row)
    return Peak(at_peak.total, int(timeline.times_ns[row]), at_peak, timeline.largest)


def live_at(evidence: Evidence, rank: float) -> NDArray[np.int64]:
    """Storages of the footprint that are live after the change at ``rank``."""
    storages = evidence.storages
    alive = (storages.born <= rank) & (storages.died > rank)
    return np.flatnonzero(alive & evidence.counted)
