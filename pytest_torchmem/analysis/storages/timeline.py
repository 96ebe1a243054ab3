"""Bytes by category over time, the peak, and what others know of the same memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import ascends
from pytest_torchmem.analysis.storages.evidence import Evidence, RankWindow
from pytest_torchmem.analysis.storages.storages import BEFORE
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.results import Peak
from pytest_torchmem.values.trace import Ownership
from pytest_torchmem.values.units import format_size


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Bytes of each category that are live on one device, after each change.

    Attributes:
        times_ns: int64, shape (T,), not decreasing; the moment of each change. Estimated timelines
            count graph nodes instead.
        sizes: int64, shape (T, C); row t holds the bytes live after change t, one column for each
            `Category` in the enum's order.
        estimated: True when the numbers were not measured.
        columns: The columns of ``sizes`` that may differ from zero. To read the others would take
            memory for them.
    """

    times_ns: NDArray[np.int64]
    sizes: NDArray[np.int64]
    estimated: bool = False
    columns: tuple[int, ...] = tuple(range(len(Category)))

    @property
    def total(self) -> NDArray[np.int64]:
        """The footprint: int64, shape (T,)."""
        total = np.zeros(len(self.sizes), np.int64)
        for column in self.columns:
            total += self.sizes[:, column]
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
        largest = np.zeros(len(Category), np.int64)
        for column in self.columns:
            largest[column] = self.sizes[:, column].max()
        return CategoryBytes(*(int(amount) for amount in largest))


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
    ranks, amounts, columns = _changes(evidence, labels)
    last = np.append(np.flatnonzero(np.diff(ranks)), len(ranks) - 1)
    ranks = ranks[last]
    times_ns = times_of(evidence, ranks)
    # Most categories stay at zero; by columns, nothing is written to these.
    levels = np.zeros((len(ranks), len(Category)), np.int64, order="F")
    used = tuple(np.unique(columns[amounts != 0]).tolist())
    for column in used:
        levels[:, column] = np.cumsum(np.where(columns == column, amounts, 0))[last]
    return Timeline(times_ns, levels, columns=used), ranks


def _changes(
    evidence: Evidence, labels: NDArray[np.uint8]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return rank, bytes and category of each change of the footprint, in their order."""
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
    return ranks[order], amounts[order], columns[order]


def times_of(evidence: Evidence, ranks: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ranks as nanoseconds since the first event: int64, of the same shape."""
    starts = evidence.tree.starts_ns()
    if not len(starts):
        return np.zeros(len(ranks), np.int64)
    times: NDArray[np.int64] = starts[np.clip(ranks, 0, len(starts) - 1).astype(np.int32)]
    times -= starts[0]
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


@dataclass(frozen=True, eq=False)
class Reconciliation:
    """The gaps of a recording. ``evidence`` covers all of it, on one device."""

    evidence: Evidence

    @cached_property
    def drift_bytes(self) -> int:
        """Largest difference between the recorded sizes and the allocator's own running total.

        The allocator had 100 bytes before, and 4 came in between that nobody recorded::

            sizes      [+8, +2, -8]    sums          [8, 10, 2]
            totals                     [108, 114, 106]
            drift      [100, 104, 104], so 4 bytes
        """
        tree = self.evidence.tree
        table = tree.trace.allocations
        size, total = table["size_bytes"], table["total_allocated"]
        is_mine = table["device"] == self.evidence.device
        # Shared memory, which has an allocator of its own, is reported with a total of nothing.
        is_other = is_mine & (size > 0) & (total == 0)
        if is_other.any():
            is_mine &= ~np.isin(table["ptr"], table["ptr"][is_other])
        # The total has what was counted of other threads, and nobody knows in which order.
        if not is_mine.any() or len(self._others[0]):
            return 0
        ranks = tree.rank[table["event"]]
        if not (is_mine.all() and ascends(ranks)):
            rows = np.flatnonzero(is_mine)
            rows = rows[np.argsort(ranks[rows])]
            size, total = size[rows], total[rows]
        del ranks
        drift = np.cumsum(size)
        np.subtract(total, drift, out=drift)
        return int(drift.max() - drift.min())

    @cached_property
    def unseen_bytes(self) -> int:
        """Bytes alive at the end of the recording that it did not see being made."""
        owners, storages = self.evidence.tree.trace.owners, self.evidence.storages
        rows = np.flatnonzero(
            (owners["kind"] == Ownership.SURVIVOR) & (owners["device"] == self.evidence.device)
        )
        # A survivor without a storage in the recording has index -1, the entry that is appended: it
        # counts as freed before the recording began.
        died = np.append(storages.died, BEFORE)[storages.of_owner[rows]]
        rows = rows[died <= self.evidence.window.end]
        within = [self._is_within(ptr, self.evidence.window.end) for ptr in owners["ptr"][rows]]
        unseen = owners[rows[~np.array(within, np.bool_)]]
        sizes = dict(zip(unseen["ptr"].tolist(), unseen["size_bytes"].tolist(), strict=True))
        return sum(sizes.values())

    def others_bytes(self, window: RankWindow) -> int:
        """The most by which memory that other threads made rose within a window.

        Where they held 0 4 1 9 bytes it rose by 8, from 1 to 9: the one was there before.
        """
        ranks, changes = self._others
        first = np.searchsorted(ranks, window.begin)
        last = np.searchsorted(ranks, window.end, side="right")
        held = np.cumsum(np.append(0, changes[first:last]))
        return int((held - np.minimum.accumulate(held)).max())

    @cached_property
    def _others(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Changes of the memory of other threads, in order; the recorded one frees some of it, too.

        Ranks, and bytes below zero for a free: shape (N,) each.
        """
        tree, storages = self.evidence.tree, self.evidence.storages
        others = tree.trace.meta.get("other_threads", {"times_ns": (), "held_bytes": ()})
        if not others["times_ns"]:
            return np.zeros(0), np.zeros(0, np.int64)
        foreign = self.evidence.foreign & np.isfinite(storages.died)
        again, sizes = self._freed_again
        ranks = tree.ranks_at(np.array(others["times_ns"], np.int64))
        ranks = np.concatenate([ranks, storages.died[foreign], again])
        held = np.array([0, *others["held_bytes"]], np.int64)
        changes = [held[1:] - held[:-1], -storages.size_bytes[foreign], sizes]
        order = np.argsort(ranks, kind="stable")
        return ranks[order], np.concatenate(changes)[order]

    @property
    def _freed_again(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Frees at an address that was freed just before: somebody else allocated in between.

        Ranks, and bytes below zero: shape (N,) each.
        """
        tree = self.evidence.tree
        table = tree.trace.allocations
        table = table[table["device"] == self.evidence.device]
        ranks = tree.rank[table["event"]]
        order = np.lexsort((ranks, table["ptr"]))
        ptr, size = table["ptr"][order], table["size_bytes"][order]
        again = np.zeros(len(ptr), np.bool_)
        again[1:] = (ptr[1:] == ptr[:-1]) & (size[1:] < 0) & (size[:-1] < 0)
        return ranks[order][again].astype(np.float64), size[again]

    @cached_property
    def foreign_is_used(self) -> bool:
        """Memory was used that is in no figure; see `Evidence.foreign`."""
        evidence = self.evidence
        foreign = np.flatnonzero(evidence.foreign & evidence.mine).tolist()
        first: list[float] = evidence.first_mentions.tolist() if foreign else []
        return any(not self._is_within(evidence.storages.ptr[row], first[row]) for row in foreign)

    def _is_within(self, ptr: np.uint64, rank: float) -> bool:
        """Return whether an address was within a living storage, such as a mapped file."""
        storages = self.evidence.storages
        over = (storages.event >= 0) & (storages.device == self.evidence.device)
        over &= (storages.ptr <= ptr) & (ptr < storages.ptr + storages.size_bytes.astype(np.uint64))
        over &= (storages.born <= rank) & (storages.died > rank)
        return bool(over.any())

    @cached_property
    def unrecorded_bytes(self) -> int:
        """Bytes by which the allocator's own peak exceeds the allocations in the recording."""
        trace = self.evidence.tree.trace
        counted, before = trace.meta.get("counters"), trace.meta.get("counters_before")
        if not counted or not before:
            return 0
        table = trace.allocations
        rows = np.flatnonzero(table["device"] == self.evidence.device)
        rows = rows[np.argsort(self.evidence.tree.rank[table["event"][rows]])]
        recorded = int(np.cumsum(table["size_bytes"][rows]).max(initial=0))
        return max(0, int(counted["allocated"]) - int(before["allocated"]) - recorded)

    @cached_property
    def elsewhere(self) -> dict[str, int]:
        """Bytes that were allocated on other devices in all, by name; the CPU is no other device.

        A body on a GPU always allocates on the CPU, too.
        """
        trace = self.evidence.tree.trace
        device, size = trace.allocations["device"], trace.allocations["size_bytes"]
        born = {
            name: size[(device == number) & (size > 0)]
            for number, name in enumerate(trace.devices)
            if number != self.evidence.device and name != "cpu"
        }
        return {name: int(sizes.sum()) for name, sizes in born.items() if len(sizes)}

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each kind of memory that the figures lack, or may lack."""
        spots = []
        if self.foreign_is_used:
            spots.append(
                "the body used memory that is not in the figures: another allocator (such as "
                "numpy's) or another thread made it, or torch holds it outside Python"
            )
        if self.unseen_bytes:
            spots.append(
                f"{format_size(self.unseen_bytes)} that are alive at the end were made unseen by "
                "another thread, or by another allocator such as numpy's or shared memory"
            )
        meta = self.evidence.tree.trace.meta
        if others := self.others_bytes(self.evidence.window):
            names = ", ".join(meta["other_threads"]["names"])
            spots.append(
                f"other threads held {format_size(others)} that are not in the figures: {names}"
            )
        if threads := meta.get("unseen_threads", ()):
            spots.append(
                f"memory of other threads is not in the figures: {', '.join(threads)} ran torch"
            )
        if threads := self.evidence.tree.trace.meta.get("unfollowed_threads", ()):
            spots.append(
                "memory of other threads may be missing from the figures: "
                f"{', '.join(threads)} made too many calls to be followed"
            )
        if self.drift_bytes:
            spots.append(
                f"{format_size(self.drift_bytes)} do not reconcile with the allocator's own total"
            )
        elif self.unrecorded_bytes:
            spots.append(
                f"the allocator's own peak holds {format_size(self.unrecorded_bytes)} that "
                "another thread made unseen"
            )
        spots += [
            f"{format_size(size_bytes)} were allocated on {device}, which is not measured"
            for device, size_bytes in self.elsewhere.items()
        ]
        return tuple(spots)
