"""Queue depth and idle time: the CPU runs ahead of a GPU, or the GPU waits for it.

Defined as in ``BasicEvaluation`` of ``torch/profiler/_utils.py`` up to torch 2.13: a kernel is
queued from its launch until it starts; the device is idle between the end of an entry with an empty
queue and the start of the next one with kernels in it. Where idle intervals overlap we count their
union; torch's function skips some that lie within others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.trace import DeviceEventKind

_LAUNCHES: Final = int(DeviceEventKind.LAUNCH)
_KERNELS: Final = int(DeviceEventKind.KERNEL)
# From this many waiting kernels on, the CPU was well ahead of the device.
_WELL_FILLED: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """Stretches of time that do not touch each other, in order.

    Attributes:
        begins_ns: int64, shape (N,).
        ends_ns: int64, shape (N,); each larger than its begin.
    """

    begins_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]

    @classmethod
    def union(cls, pairs: list[tuple[int, int]]) -> Intervals:
        """Return the union of (begin, end) pairs; those that end before they begin are none."""
        merged: list[list[int]] = []
        for begin, end in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        begins, ends = np.array(merged, np.int64).reshape(-1, 2).T
        return cls(begins, ends)

    def shared_ns(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the time that each event shares with the intervals: int64, shape (E,).

        One event from 0 to 10, intervals 2 to 6 and 8 to 20::

            begins      [2, 8]      ends [6, 20]       before [0, 4, 16]
            until 0     0           until 10: before[1] + (10 - 8) = 6

        >>> intervals = Intervals.union([(2, 6), (8, 20)])
        >>> intervals.shared_ns(np.array([0]), np.array([10])).tolist()
        [6]
        """
        if not len(self.begins_ns):
            return np.zeros(len(starts), np.int64)
        return self._until(ends) - self._until(starts)

    def _until(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        before = np.concatenate([[0], np.cumsum(self.ends_ns - self.begins_ns)])
        index = np.searchsorted(self.begins_ns, times, side="right")
        last = np.minimum(times, self.ends_ns[index - 1]) - self.begins_ns[index - 1]
        return before[np.maximum(index - 1, 0)] + np.where(index > 0, last, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceQueue:
    """Queue depth and idle time; all zero where no kernels were recorded.

    Attributes:
        depth: int64, shape (E,); kernels launched and not started when each event starts.
        idle_ns: int64, shape (E,); how long the device was idle during each event.
        entry_starts_ns: int64, shape (Q,); starts of launches and kernels, ascending.
        entry_depth: int64, shape (Q,); the depth at each of those.
        idle: When the device was idle: the queue had run dry.
    """

    depth: NDArray[np.int64]
    idle_ns: NDArray[np.int64]
    entry_starts_ns: NDArray[np.int64]
    entry_depth: NDArray[np.int64]
    idle: Intervals

    def falling(self) -> Intervals:
        """Return the intervals in which a well filled queue (4 kernels) runs dry.

        Each begins where the queue was fullest and ends where it is empty for the last time before
        it fills again. Depths ``[0, 5, 4, 2, 0, 1, 0]`` at the times 0 to 6: from 1 to 6, since
        the one kernel of time 5 does not fill the queue.
        """
        pairs: list[tuple[int, int]] = []
        starts, depths = self.entry_starts_ns.tolist(), self.entry_depth.tolist()
        runs = groupby(range(len(depths)), lambda at: depths[at] > 0)
        empty_at, spent = -1, 0
        # Backwards in time, from one stretch of waiting kernels to the one before it.
        for filled, run in reversed([(filled, list(run)) for filled, run in runs]):
            if not filled:
                # The empty moment before a stretch that counts ends no interval of its own.
                rest = run[: len(run) - spent]
                empty_at, spent = rest[-1] if rest and empty_at < 0 else empty_at, 0
                continue
            # Of several moments with the most kernels the last.
            fullest = max(run, key=lambda at: (depths[at], at))
            if empty_at >= 0 and depths[fullest] >= _WELL_FILLED:
                pairs.append((starts[fullest], starts[empty_at]))
                empty_at, spent = -1, 1
        return Intervals.union(pairs)


def find_device_queue(tree: OpTree) -> DeviceQueue:
    """Return queue depth and idle time for each event of a tree.

    The depth is how many launched kernels have not begun: the newest kernel that is launched by
    then, as a number in the order of beginnings, less the kernels that have begun. Three launches,
    of which the kernels begin one after the other, and an event at each moment::

        time                 1    2    3    4    5
        what happens         L0   L1   K0   L2   K1
        newest launched      0    1    1    2    2
        kernels begun        0    0    1    1    2
        depth                1    2    1    2    1
    """
    events, table = tree.trace.events, tree.trace.device_events
    launches = _sorted(table[table["kind"] == _LAUNCHES])
    kernels = _sorted(table[table["kind"] == _KERNELS])
    count = len(launches) + len(kernels)
    # Of what starts at the same time launches come first, then kernels, then events.
    starts = np.concatenate([launches["start_ns"], kernels["start_ns"], events["start_ns"]])
    launched = np.full(len(starts), -1, np.int64)
    launched[: len(launches)] = _kernel_of(launches, kernels)
    order = np.argsort(starts, kind="stable")
    newest = np.empty(len(starts), np.int64)
    newest[order] = np.maximum.accumulate(launched[order])
    started = np.searchsorted(np.sort(kernels["start_ns"]), starts, side="right")
    depth = np.maximum(newest - started + 1, 0)
    by_start = np.argsort(starts[:count], kind="stable")
    ends = np.concatenate([launches["end_ns"], kernels["end_ns"]])[by_start]
    entry_starts, entry_depth = starts[:count][by_start], depth[:count][by_start]
    idle = _idle(tree, entry_starts, ends, entry_depth)
    idle_ns = idle.shared_ns(events["start_ns"], events["end_ns"])
    return DeviceQueue(depth[count:], idle_ns, entry_starts, entry_depth, idle)


def _sorted(table: NDArray[np.void]) -> NDArray[np.void]:
    return table[np.argsort(table["start_ns"], kind="stable")]


def _kernel_of(launches: NDArray[np.void], kernels: NDArray[np.void]) -> NDArray[np.int64]:
    """Return the number of the kernel that each launch led to, -1 for none.

    Kernels start in the order of their launches: what a launch led to is no earlier than what the
    one before led to.
    """
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, correlation in enumerate(kernels["correlation"].tolist()):
        numbers[correlation].append(number)
    kernel_places, last = [], 0
    for correlation in launches["correlation"].tolist():
        mine = numbers.get(correlation, [])
        place = bisect_left(mine, last)
        kernel_places.append(mine[place] if place < len(mine) else -1)
        last = max(last, kernel_places[-1])
    return np.array(kernel_places, np.int64)


def _idle(
    tree: OpTree, starts: NDArray[np.int64], ends: NDArray[np.int64], depth: NDArray[np.int64]
) -> Intervals:
    events = tree.trace.events
    pairs: list[tuple[int, int]] = []
    if len(events) and len(starts):
        last = int(events["end_ns"][int(np.argmax(tree.rank))])
        pairs.append((int(events["start_ns"].min()), int(starts[0])))
        pairs.append((int(ends[-1]), last))
    idle_since: int | None = None
    for start, end, queued in zip(starts.tolist(), ends.tolist(), depth.tolist(), strict=True):
        if queued == 0 and idle_since is None:
            idle_since = end
        elif queued > 0 and idle_since is not None:
            pairs.append((idle_since, start))
            idle_since = None
    return Intervals.union(pairs)
