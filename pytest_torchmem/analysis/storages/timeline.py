"""Bytes by category over time, the peak, and what others know of the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import ascends
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.analysis.storages.storages import BEFORE
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor
from pytest_torchmem.values.packed import Column, in_pieces
from pytest_torchmem.values.results import Peak
from pytest_torchmem.values.trace import Ownership
from pytest_torchmem.values.units import format_size

# What is worked out of the changes is in memory for so many of them at a time.
_CHANGES_AT_ONCE: Final = 2**18
# A number that the host reads passes through pinned memory: item(), nonzero(), a mask.
_NUMBER_BYTES: Final = 64
# To find them, all storages are looked at once for each piece.
_MOST_PIECES: Final = 16


LiveAt: TypeAlias = Callable[[int, Category | None], tuple[Contributor, ...]]


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
        row, most = 0, -1
        for first in range(0, len(self.sizes), _CHANGES_AT_ONCE):
            total = self.sizes[first : first + _CHANGES_AT_ONCE, self.columns].sum(axis=1)
            if total.max() > most:
                row, most = first + int(np.argmax(total)), total.max()
        return row

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
    storages, begin = evidence.storages, evidence.window.begin
    count = int(np.count_nonzero(evidence.counted))
    ranks = np.empty(2 * count + 1)
    # Most categories stay at zero; by columns, nothing is written to these, nor behind the end.
    levels = np.zeros((len(ranks), len(Category)), np.int64, order="F")
    sizes = storages.size_bytes
    columns = tuple(np.flatnonzero(np.bincount(labels[evidence.counted & (sizes != 0)])).tolist())
    level, ranks[0] = np.zeros(len(Category), np.int64), begin
    row = int(not np.any(evidence.counted & (storages.born <= begin)))
    for changed_at, storage, is_free in _changes(evidence, count):
        is_last = np.ones(len(changed_at), np.bool_)
        np.not_equal(changed_at[1:], changed_at[:-1], out=is_last[:-1])
        amounts = np.where(is_free, -sizes[storage], sizes[storage])
        rows = slice(row, row := row + int(np.count_nonzero(is_last)))
        ranks[rows] = changed_at[is_last]
        for column in columns:
            now = level[column] + np.cumsum(np.where(labels[storage] == column, amounts, 0))
            levels[rows, column], level[column] = now[is_last], now[-1]
    return Timeline(row_times(evidence, ranks[:row]), levels[:row], columns=columns), ranks[:row]


def _changes(
    evidence: Evidence, count: int
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]]:
    """Yield the changes of the footprint, which ``count`` storages are in, in their order.

    Of each the rank, the storage that comes or goes, and whether it goes. Those between two ranks
    come together, and nothing in between is empty.
    """
    storages, window = evidence.storages, evidence.window
    pieces = min(_MOST_PIECES, 1 + count // _CHANGES_AT_ONCE)
    bounds = np.linspace(window.begin, window.end, pieces + 1)
    bounds[0], bounds[-1] = -np.inf, np.inf
    for low, high in pairwise(bounds.tolist()):
        came, gone = (
            np.flatnonzero(evidence.counted & (low <= ranks) & (ranks < high) & (ranks <= last))
            for ranks, last in ((storages.born, np.inf), (storages.died, window.end))
        )
        ranks = np.concatenate([np.maximum(storages.born[came], window.begin), storages.died[gone]])
        order = np.argsort(ranks, kind="stable")
        if len(order):
            yield ranks[order], np.concatenate([came, gone])[order], order >= len(came)


def row_times(evidence: Evidence, ranks: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return ranks as nanoseconds since the first event: int64, of the same shape."""
    count = len(evidence.tree.rank)
    if not count:
        return np.zeros(len(ranks), np.int64)
    at = np.empty(len(ranks), np.int32)
    times = evidence.tree.starts_at(np.clip(ranks, 0, count - 1, out=at, casting="unsafe"))
    times -= evidence.tree.starts_at(np.zeros(1, np.int32))
    return times


def find_peak(timeline: Timeline, live_at: LiveAt | None = None) -> Peak:
    """Return the peak of a timeline, with what was live at it and at each category's own peak.

    ``live_at`` says of a row what was live then, of all categories or of one. Without it, nobody
    knows.
    """
    if not len(timeline.times_ns):
        return Peak(0, 0, CategoryBytes(), CategoryBytes())
    row, largest = timeline.peak_row, timeline.largest
    at_peak = timeline.at(row)
    peak = Peak(at_peak.total, int(timeline.times_ns[row]), at_peak, largest)
    if live_at is None:
        return peak
    own = [
        contributor
        for category, size_bytes in largest.items()
        if size_bytes
        for contributor in live_at(int(np.argmax(timeline.of(category))), category)
    ]
    own.sort(key=lambda contributor: -contributor.size_bytes)
    return replace(peak, live=live_at(row, None), live_by_category=tuple(own))


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

        torch's profiler tells that total with each allocation; the recorder's library does not,
        and then nothing can be said: 0.

        The allocator had 100 bytes before, and 4 came in between that nobody recorded::

            sizes      [+8, +2, -8]    sums          [8, 10, 2]
            totals                     [108, 114, 106]
            drift      [100, 104, 104], so 4 bytes
        """
        table = self.evidence.tree.trace.allocations
        if not any(total.any() for _, (total,) in in_pieces(table, "total_allocated")):
            return 0
        drifts: list[int] = []
        recorded = 0
        for size, total in self._sizes_and_totals():
            drift = total - np.cumsum(size) - recorded
            drifts += (int(drift.max()), int(drift.min()))
            recorded += int(size.sum())
        return max(drifts, default=0) - min(drifts, default=0)

    def _sizes_and_totals(self) -> Iterator[list[Column]]:
        """Yield what the device's allocations have of both, in the order of ranks, in pieces."""
        table, rank = self.evidence.tree.trace.allocations, self.evidence.tree.rank
        columns, last, is_plain = ("event", "size_bytes", "total_allocated"), -1, True
        for _, (device, event, size, total) in in_pieces(table, "device", *columns):
            ranks = rank[event]
            is_plain &= bool(np.all(device == self.evidence.device)) and last < ranks[0]
            is_plain &= ascends(ranks) and not np.any((size > 0) & (total == 0))
            last = ranks[-1]
        if is_plain:
            yield from (found for _, (_, *found) in in_pieces(table, *columns))
            return
        is_mine = table["device"] == self.evidence.device
        event, size, total = (table[name] for name in columns)
        # Shared memory, which has an allocator of its own, is reported with a total of nothing.
        is_other = is_mine & (size > 0) & (total == 0)
        rows = np.flatnonzero(is_mine & ~np.isin(table["ptr"], table["ptr"][is_other]))
        rows = rows[np.argsort(rank[event[rows]])]
        if len(rows):
            yield [size[rows], total[rows]]

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
        # Tensors of a mapped file have storages of their own, within the one of the whole file.
        covered_bytes, end = 0, 0
        for start, size_bytes in sorted(unseen[["ptr", "size_bytes"]].tolist()):
            covered_bytes += max(0, start + size_bytes - max(start, end))
            end = max(end, start + size_bytes)
        return covered_bytes

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
        # Either may hold more than lives: `allocated` the tail of a block that is too small to be
        # split off, `requested` what was freed while another stream still uses it.
        columns = {"allocated": table["size_bytes"][rows]}
        requested = table["requested_bytes"][rows]
        if "requested" in before and bool(np.all(requested != 0)):
            columns["requested"] = requested
        unrecorded = (
            int(counted[name]) - int(before[name]) - int(np.cumsum(sizes).max(initial=0))
            for name, sizes in columns.items()
        )
        return max(0, min(unrecorded))

    @property
    def pinned_bytes(self) -> tuple[int, int]:
        """Pinned memory of the host: how much was made, and how much of it is there at most.

        Nothing where it was made for numbers that the host read alone.
        """
        meta = self.evidence.tree.trace.meta
        counted, before = meta.get("counters") or {}, meta.get("counters_before") or {}
        made_bytes, requests = (
            int(counted.get(name, 0)) - int(before.get(name, 0))
            for name in ("pinned", "pinned_requests")
        )
        if made_bytes <= _NUMBER_BYTES * requests:
            return 0, 0
        return made_bytes, min(made_bytes, int(counted.get("pinned_in_use", made_bytes)))

    @cached_property
    def elsewhere(self) -> dict[str, int]:
        """Bytes that were allocated on other devices in all, by name; the CPU is no other device.

        A body on a GPU always allocates on the CPU, too.
        """
        trace = self.evidence.tree.trace
        table = trace.allocations
        born = {
            name: int(table["size_bytes"][table["device"] == number].clip(0).sum())
            for number, name in enumerate(trace.devices)
            if number != self.evidence.device and name != "cpu"
        }
        return {name: size_bytes for name, size_bytes in born.items() if size_bytes}

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each kind of memory that the figures lack, or may lack."""
        if self.foreign_is_used:
            yield (
                "the body used memory that is not in the figures: another allocator (such as "
                "numpy's) or another thread made it, or torch holds it outside Python"
            )
        if self.unseen_bytes:
            yield (
                f"{format_size(self.unseen_bytes)} that are alive at the end were made unseen by "
                "another thread, or by another allocator such as numpy's or shared memory"
            )
        if self.drift_bytes:
            yield f"{format_size(self.drift_bytes)} do not reconcile with the allocator's own total"
        elif self.unrecorded_bytes:
            yield (
                f"the allocator's own peak holds {format_size(self.unrecorded_bytes)} that "
                "another thread made unseen"
            )
        made_bytes, kept_bytes = self.pinned_bytes
        if made_bytes:
            yield (
                f"{format_size(made_bytes)} of pinned host memory were made, of which at most "
                f"{format_size(kept_bytes)} are still there: its own allocator is not measured, "
                "and no limit counts them"
            )
        for device, size_bytes in self.elsewhere.items():
            yield f"{format_size(size_bytes)} were allocated on {device}, which is not measured"
