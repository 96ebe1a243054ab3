"""The stages in order: trace -> operator tree -> storages -> categories -> timeline -> peaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.requests import Request
from pytest_torchmem.analysis.events import op_tree
from pytest_torchmem.analysis.footprint import Footprint
from pytest_torchmem.analysis.gpu_questions import storages_of_window
from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.analysis.judge.holders import LeftBehind
from pytest_torchmem.analysis.storages import explanation
from pytest_torchmem.analysis.storages.evidence import RankWindow
from pytest_torchmem.analysis.storages.explanation import Explanation, OwnPass
from pytest_torchmem.analysis.storages.storages import (
    BEFORE,
    NEVER,
    find_storages,
    without_old_buckets,
)
from pytest_torchmem.analysis.storages.timeline import (
    find_peak,
    live_at,
    row_times,
)
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor
from pytest_torchmem.values.findings import Difference
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.results import Peak, ReservedSegment, Result, Retained
from pytest_torchmem.values.trace import MarkKind, Trace
from pytest_torchmem.values.units import Device, format_size

#: How many contributors a result carries, and the smallest part of the largest one that still
#: tells a reader something; the rest is in the profile.
LIVE_LIMIT = 64
LIVE_PART = 1 / 1024


@dataclass(frozen=True, eq=False)
class MemoryProfile(Footprint):
    """A trace, analysed: its footprint, who made it, and that in words."""

    def explain(
        self, category: Category | str | None = None, module: str = "", at: int | str | None = None
    ) -> tuple[Explanation, ...]:
        """Say of each storage of the footprint why it has its category, in the order of birth.

        Args:
            category: Only storages of this one.
            module: Only storages of a module with this in its path.
            at: Only storages that are alive at this moment: ``"peak"``, or nanoseconds since the
                first event.

        Raises `MarkerError` for another category or moment.
        """
        only = explanation.named_category(category)
        rows = np.flatnonzero(self.evidence.counted)
        if at is not None:
            timeline, ranks = self._timeline
            rows = live_at(
                self.evidence,
                float(ranks[explanation.row_at(timeline.times_ns, timeline.peak_row, at)]),
            )
        if only is not None:
            rows = rows[self.labels[rows] == only.column]
        born = row_times(self.evidence, np.maximum(self.storages.born, 0)).tolist()
        died = row_times(self.evidence, np.minimum(self.storages.died, self.whole.end)).tolist()
        explanations = (
            Explanation(
                row,
                born[row] if self.storages.born[row] != BEFORE else None,
                died[row] if self.storages.died[row] != NEVER else None,
                self.attribution.contributor(row),
                *self.decisions.ground(row),
            )
            for row in rows.tolist()
        )
        return explanation.in_order(explanations, only, module)

    @cached_property
    def peak(self) -> Peak:
        """The peak, with everything that was live at it and at each category's own peak."""
        ranks = self.ranks
        return find_peak(self.timeline, lambda row, of: self._live_at(float(ranks[row]), of))

    @cached_property
    def retained(self) -> Retained:
        """The storages that the window made and left alive, without the workspaces of libraries."""
        return self._retained()

    def _retained(self, *, origins: bool = True) -> Retained:
        rows = self._retained_at(self.window.end)
        amounts = np.bincount(
            self.labels[rows], self.storages.size_bytes[rows], minlength=len(Category)
        )
        by_category = CategoryBytes(*(int(amount) for amount in amounts))
        live = self.attribution.contributors(rows.tolist()) if origins else ()
        return Retained(by_category.total, by_category, live, freed=self._freed_bytes)

    def left_behind(self, noted_ns: int = 0) -> tuple[LeftBehind, ...]:
        """Return each storage that the window made and that was alive at its end.

        Each one says, too, whether it was alive at ``noted_ns``, a time on the recording's clock.
        """
        return self._left_behind(self._retained_at(self.window.end), noted_ns)

    def left_by_steps(self, noted_ns: int) -> tuple[LeftBehind, ...]:
        """Return each storage that was alive at the end of the last step and not at the window's.

        It is part of what the steps grew by; a variable of the window held it.
        """
        if len(self.step_ranks) < 2:
            return ()
        rows = self._retained_at(self.step_ranks[-1])
        return self._left_behind(rows[self.storages.died[rows] <= self.window.end], noted_ns)

    def _left_behind(self, rows: NDArray[np.int64], noted_ns: int) -> tuple[LeftBehind, ...]:
        noted_rank = self.tree.ranks_at(np.array([noted_ns]))[0]
        storages = self.storages
        return tuple(
            LeftBehind(
                (self.device, int(storages.ptr[row])),
                int(storages.size_bytes[row]),
                bool(storages.died[row] == NEVER),
                bool(storages.died[row] > noted_rank),
                self.attribution.contributor(row),
            )
            for row in rows.tolist()
        )

    def freed(self) -> tuple[Contributor, ...]:
        """Return what the window made and freed, by origin, the largest first."""
        died = self.storages.died <= self.window.end
        rows = np.flatnonzero(self.evidence.counted & self.evidence.made & died)
        return self.attribution.contributors(rows.tolist())

    def reserved(
        self, segments: Iterable[ReservedSegment], address: NDArray[np.int64] | None = None
    ) -> tuple[tuple[ReservedSegment, Contributor], ...]:
        """Return those of the segments that serve the window, each with what came into it first.

        That is what the allocator reserved it for, unless it had the segment before. It has the
        bytes that nothing was using when the last of them was reserved. ``address`` says where
        each storage is, if not where it was recorded.
        """
        born, died, made = self.storages.born, self.storages.died, self.evidence.made
        rows = np.flatnonzero((made | self.evidence.counted) & self.evidence.mine)
        rows = rows[np.argsort(born[rows], kind="stable")]
        address = (self.storages.ptr if address is None else address)[rows].astype(np.int64)
        serving = []
        for segment in segments:
            end = segment.address + segment.size_bytes
            inside = rows[(address >= segment.address) & (address < end)]
            if made[inside].any():
                serving.append((segment, inside, int(inside[made[inside]][0])))
        last = max((born[first] for _, _, first in serving), default=0)

        def free_in(segment: ReservedSegment, inside: NDArray[np.int64]) -> int:
            live = inside[(born[inside] <= last) & (died[inside] > last)]
            return max(0, segment.size_bytes - int(self.storages.size_bytes[live].sum()))

        return tuple(
            (s, replace(self.attribution.contributor(first), size_bytes=free_in(s, inside)))
            for s, inside, first in serving
        )

    def reserved_if_simulated(
        self, settings: str
    ) -> tuple[tuple[ReservedSegment, Contributor], ...]:
        """Return what `reserved` does, for the caching allocator of a GPU with these settings.

        Raises what `simulate` raises.
        """
        requests, run = self.allocator_requests, self.simulate(settings)
        is_allocation = requests.kind == Request.ALLOC
        address = np.zeros(len(self.storages), np.int64)
        address[storages_of_window(self.evidence)[requests.key[is_allocation]]] = run.address[
            is_allocation
        ]
        segments = (ReservedSegment(s.address, s.size_bytes, bool(s.pool)) for s in run.segments)
        return self.reserved(segments, address)

    def allocated_at_peak(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the allocation event of each storage that was live at the peak, and its bytes.

        int64, shape (N,) each; the event of what was there before the recording is -1.
        """
        rows = live_at(self.evidence, self._peak_rank)
        return self.storages.event[rows].astype(np.int64), self.storages.size_bytes[rows]

    def allocated(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the event of each allocation that the window made, and its bytes: as above."""
        rows = np.flatnonzero(self.evidence.counted & self.evidence.made)
        return self.storages.event[rows].astype(np.int64), self.storages.size_bytes[rows]

    @property
    def running_at_peak(self) -> tuple[Span, ...]:
        """The annotations and operators that were running when the footprint was largest."""
        return op_tree.running_at(self.tree, self._peak_rank)

    @cached_property
    def out_of_memory(self) -> tuple[tuple[Contributor, ...], ...]:
        """For each time the allocator ran out of memory what was live then, largest first."""
        return tuple(self._live_at(float(rank)) for rank in op_tree.out_of_memory_ranks(self.tree))

    def __sub__(self, before: MemoryProfile) -> tuple[Difference, ...]:
        """Return the growth from the other's peak to this one, the largest contributor first."""
        all_differences = differences(self.peak.live, before.peak.live)
        return tuple(difference for difference in all_differences if difference.size_bytes > 0)

    def region(self, begin_mark: int, end_mark: int, steps_of: str = "") -> MemoryProfile:
        """The part of the recording between two marks."""
        ranks = self.tree.mark_ranks
        window = RankWindow(float(ranks[begin_mark]), float(ranks[end_mark]), may_go_on=True)
        whole = replace(self.whole, may_go_on=True)
        return replace(self, window=window, whole=whole, steps_of=steps_of)

    def result(self, name: str = "", *, origins: bool = True) -> Result:
        """The figures, without the arrays they come from.

        Without ``origins`` they do not say where what was alive comes from: to find that out takes
        a quarter of the analysis of a small test.
        """
        notes: tuple[str, ...] = ()
        if size_bytes := self._block_sized_bytes:
            notes = (
                f"{format_size(size_bytes)} of allocations count with the size of their block, "
                "because the allocator's history does not say what was requested",
            )
        peak = self.peak if origins else find_peak(self.timeline)
        retained = self.retained if origins else self._retained(origins=False)
        return Result(
            name=name,
            device=self.device,
            estimated=False,
            peak=replace(
                peak,
                live=_telling(peak.live),
                live_by_category=_telling_each(peak.live_by_category),
            ),
            retained=replace(retained, live=_telling(retained.live)),
            steps=self.steps,
            each_step=self.each_step,
            grown=_telling(self.grown) if origins else (),
            counters=self._counters if self.window == self.whole else None,
            has_backward=self.recording.has_backward,
            unexplained_bytes=self.unexplained_bytes,
            blind_spots=tuple(self.reconciliation.sentences()),
            notes=notes,
            failed_passes=self.failed_passes,
        )


def _telling(contributors: tuple[Contributor, ...]) -> tuple[Contributor, ...]:
    """The contributors worth a line, out of a list with the largest first.

    A workspace is as large in a small test as in a large one, and makes nothing beside it small.
    """
    own = (c.size_bytes for c in contributors if c.category is not Category.WORKSPACE)
    least_bytes = next(own, 0) * LIVE_PART
    return tuple(c for c in contributors[:LIVE_LIMIT] if c.size_bytes >= least_bytes)


def _telling_each(contributors: tuple[Contributor, ...]) -> tuple[Contributor, ...]:
    """Return those worth a line beside others of their category, and the largest of each."""
    largest: dict[Category, Contributor] = {}
    for contributor in contributors:
        largest.setdefault(contributor.category, contributor)
    contributors_told = [
        c for c in contributors if c.size_bytes >= largest[c.category].size_bytes * LIVE_PART
    ]
    more = (c for c in contributors_told[LIVE_LIMIT:] if c is largest[c.category])
    return (*contributors_told[:LIVE_LIMIT], *more)


def analyze_trace(
    trace: Trace, device: Device | None = None, passes: Sequence[OwnPass] = ()
) -> MemoryProfile:
    """Analyse a trace; ``device`` names the one to look at, by default the one recorded for.

    ``passes`` are category passes of users.

    Raises `DeviceError` if the trace holds nothing of that device.
    """
    name = trace.device_named(device)
    tree = op_tree.build_op_tree(trace)
    ranks = tree.mark_ranks
    stops = ranks[trace.marks["kind"] == MarkKind.STOP]
    end = float(stops[-1]) if len(stops) else float(len(trace.events))
    whole = RankWindow(-0.5, end)
    find = cache(lambda: without_old_buckets(tree, find_storages(tree)))
    return MemoryProfile(tree, find, whole, whole, name, passes=tuple(passes))
