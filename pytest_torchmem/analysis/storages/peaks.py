"""From labelled storages to a timeline, and from a timeline to its peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.results import Peak

if TYPE_CHECKING:
    from numpy.typing import NDArray


def build_timeline(
    evidence: Evidence, labels: NDArray[np.uint8]
) -> tuple[Timeline, NDArray[np.float64]]:
    """Return the window's timeline, and the rank of each of its rows: float64, shape (T,).

    The first row is the beginning of the window, with what was there before and is touched later.
    """
    storages, window = evidence.storages, evidence.window
    counted = np.flatnonzero(evidence.counted)
    begin = np.maximum(storages.born[counted], window.begin)
    died = storages.died[counted]
    freed = died <= window.end
    ranks = np.concatenate([[window.begin], begin, died[freed]])
    sizes = storages.size_bytes[counted]
    amounts = np.concatenate([[0], sizes, -sizes[freed]])
    columns = np.concatenate([[0], labels[counted], labels[counted][freed]]).astype(np.int64)
    order = np.argsort(ranks, kind="stable")
    ranks = ranks[order]
    changes = np.zeros((len(ranks), len(Category)), np.int64)
    changes[np.arange(len(ranks)), columns[order]] = amounts[order]
    # Changes of one rank belong together: only the window's begin has several.
    last = np.append(np.flatnonzero(np.diff(ranks)), len(ranks) - 1)
    levels = np.cumsum(changes, axis=0)[last]
    ranks = ranks[last]
    return Timeline(times_of(evidence, ranks), levels), ranks


def times_of(evidence: Evidence, ranks: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ranks as nanoseconds since the first event: int64, of the same shape."""
    starts: NDArray[Any] = np.sort(evidence.tree.trace.events["start_ns"])
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
