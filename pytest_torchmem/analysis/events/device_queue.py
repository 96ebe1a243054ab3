"""Queue depth and idle time: the CPU runs ahead of a GPU, or the GPU waits for it.

Defined as in ``BasicEvaluation`` of ``torch/profiler/_utils.py``: a kernel is queued from its
launch until it starts; the device is idle between the end of an entry with an empty queue and the
start of the next one with kernels in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.trace import DeviceEventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAUNCHES: Final = int(DeviceEventKind.LAUNCH)
_KERNELS: Final = int(DeviceEventKind.KERNEL)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceQueue:
    """Queue depth and idle time of a trace that saw kernels.

    Attributes:
        depth: int64, shape (E,); kernels launched and not started when each event starts.
        idle_ns: int64, shape (E,); how long the device was idle during each event.
    """

    depth: NDArray[np.int64]
    idle_ns: NDArray[np.int64]


def find_device_queue(tree: OpTree) -> DeviceQueue:
    """Return queue depth and idle time for each event; zeros where no kernels were recorded."""
    events, table = tree.trace.events, tree.trace.device_events
    launches = _sorted(table[table["kind"] == _LAUNCHES])
    kernels = _sorted(table[table["kind"] == _KERNELS])
    if not len(launches) + len(kernels):
        zeros = np.zeros(len(events), np.int64)
        return DeviceQueue(zeros, zeros.copy())
    last_launched = _last_launched(launches, kernels)
    depth = _depth(events["start_ns"], launches, kernels, last_launched)
    entries = np.concatenate([launches, kernels])
    order = np.argsort(entries["start_ns"], kind="stable")
    entries = entries[order]
    entry_depth = _depth(entries["start_ns"], launches, kernels, last_launched)
    idle = _idle_intervals(tree, entries, entry_depth)
    return DeviceQueue(depth, _overlap(events["start_ns"], events["end_ns"], idle))


def _sorted(table: NDArray[np.void]) -> NDArray[np.void]:
    return table[np.argsort(table["start_ns"], kind="stable")]


def _last_launched(launches: NDArray[np.void], kernels: NDArray[np.void]) -> NDArray[np.int64]:
    """For each launch the number of the latest kernel launched until then, -1 for none."""
    first: dict[int, int] = {}
    for number, correlation in enumerate(kernels["correlation"].tolist()):
        first.setdefault(correlation, number)
    found = np.array([first.get(c, -1) for c in launches["correlation"].tolist()], np.int64)
    result: NDArray[np.int64] = np.maximum.accumulate(found) if len(found) else found
    return result


def _depth(
    times: NDArray[np.int64],
    launches: NDArray[np.void],
    kernels: NDArray[np.void],
    last_launched: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Kernels launched, and not started, at each time."""
    launched = np.searchsorted(launches["start_ns"], times, side="right") - 1
    newest = np.append(last_launched, -1)[launched]
    started = np.searchsorted(kernels["start_ns"], times, side="right")
    depth: NDArray[np.int64] = np.maximum(newest - started + 1, 0)
    return depth


def _idle_intervals(
    tree: OpTree, entries: NDArray[np.void], depth: NDArray[np.int64]
) -> list[tuple[int, int]]:
    events = tree.trace.events
    intervals: list[tuple[int, int]] = []
    if len(events):
        last = int(events["end_ns"][int(np.argmax(tree.rank))])
        intervals.append((int(events["start_ns"].min()), int(entries["start_ns"][0])))
        intervals.append((int(entries["end_ns"][-1]), last))
    idle_since: int | None = None
    columns = (entries["start_ns"], entries["end_ns"], depth)
    for start, end, queued in zip(*(c.tolist() for c in columns), strict=True):
        if queued == 0 and idle_since is None:
            idle_since = end
        elif queued > 0 and idle_since is not None:
            intervals.append((idle_since, start))
            idle_since = None
    return intervals


def _overlap(
    starts: NDArray[np.int64], ends: NDArray[np.int64], intervals: list[tuple[int, int]]
) -> NDArray[np.int64]:
    """Return the time that each event shares with the union of the intervals: int64, shape (E,).

    One event from 0 to 10, intervals 2 to 4, 3 to 6 and 8 to 20::

        merged      [2, 6], [8, 20]
        begins      [2, 8]      stops [6, 20]      before [0, 4, 16]
        until 0     0           until 10: before[1] + (10 - 8) = 6
        shared      6
    """
    merged: list[list[int]] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    if not merged:
        return np.zeros(len(starts), np.int64)
    begins, stops = np.array(merged, np.int64).T
    before = np.concatenate([[0], np.cumsum(stops - begins)])

    def idle_until(times: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(begins, times, side="right")
        inside = np.where(index > 0, np.minimum(times, stops[index - 1]) - begins[index - 1], 0)
        result: NDArray[np.int64] = before[np.maximum(index - 1, 0)] + inside
        return result

    return idle_until(ends) - idle_until(starts)
