"""The stages in order: trace -> operator tree -> storages -> categories -> timeline -> peaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from statistics import median_low
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.requests import Request, Requests
from pytest_torchmem.analysis.events import op_tree
from pytest_torchmem.analysis.events.device_queue import DeviceQueue, find_device_queue
from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.analysis.gpu_questions import (
    GpuQuestions,
    requests_of_window,
    storages_of_window,
)
from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.analysis.judge.holders import LeftBehind
from pytest_torchmem.analysis.storages import explanation
from pytest_torchmem.analysis.storages.attribution import Attribution
from pytest_torchmem.analysis.storages.categories import Decisions, decide
from pytest_torchmem.analysis.storages.evidence import RankWindow
from pytest_torchmem.analysis.storages.explanation import Explanation, OwnPass
from pytest_torchmem.analysis.storages.measured_facts import MeasuredFacts
from pytest_torchmem.analysis.storages.storages import (
    BEFORE,
    NEVER,
    Storages,
    find_storages,
    without_old_buckets,
)
from pytest_torchmem.analysis.storages.timeline import (
    Reconciliation,
    Timeline,
    build_timeline,
    find_peak,
    live_at,
    row_times,
)
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor
from pytest_torchmem.values.findings import Difference
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.results import Counters, Peak, ReservedSegment, Result, Retained
from pytest_torchmem.values.trace import LOOP, MarkKind, Trace
from pytest_torchmem.values.units import Device, format_size

# What another clock says may be off by so much.
_CLOCKS_NS: Final = 2000

#: How many contributors a result carries, and the smallest part of the largest one that still
#: tells a reader something; the rest is in the profile.
LIVE_LIMIT = 64
LIVE_PART = 1 / 1024


@dataclass(frozen=True, eq=False)
class MemoryProfile(GpuQuestions):
    """A trace, analysed: what was live when, and what it was for.

    Attributes:
        tree: The operator tree.
        find: Returns every storage of the recording, always the same.
        window: The stretch whose footprint is looked at.
        whole: The whole recording. What a storage is for and where it came from does not depend on
            which part of the recording one looks at.
        device: Name of the device, ``cpu`` or ``cuda:0``.
        steps_of: The text of the marks that end its steps: what is measured within another
            measurement has steps of its own.
        passes: Category passes of users.
    """

    tree: OpTree
    find: Callable[[], Storages]
    window: RankWindow
    whole: RankWindow
    device: str
    steps_of: str = ""
    passes: tuple[OwnPass, ...] = ()

    @property
    def storages(self) -> Storages:
        """Every storage of the recording; torch's own labels need none of them."""
        return self.find()

    @cached_property
    def evidence(self) -> MeasuredFacts:
        """Facts within the window: what it made and what it touches."""
        return self._evidence(self.window)

    @cached_property
    def recording(self) -> MeasuredFacts:
        """Facts within the whole recording."""
        return self.evidence if self.window == self.whole else self._evidence(self.whole)

    def _evidence(self, window: RankWindow) -> MeasuredFacts:
        devices = self.tree.trace.devices
        number = devices.index(self.device) if self.device in devices else -1
        return MeasuredFacts(self.tree, self.storages, window, number)

    @cached_property
    def decisions(self) -> Decisions:
        """The category of each storage, and the pass and the reason that it rests on."""
        if not self.passes:
            return decide(self.recording, len(self.storages))
        plain = replace(self, window=self.whole, passes=())
        return explanation.with_own_passes(self.passes, plain.decisions, plain.explain())

    @property
    def failed_passes(self) -> tuple[str, ...]:
        """A sentence for each category pass of a user that raised."""
        return self.decisions.failed_passes

    @property
    def labels(self) -> NDArray[np.uint8]:
        """The category of each storage as a column number: uint8, shape (S,)."""
        return self.decisions.labels

    @property
    def timeline(self) -> Timeline:
        return self._timeline[0]

    @property
    def ranks(self) -> NDArray[np.float64]:
        """The rank in the recording of each row of the timeline: float64, shape (T,)."""
        return self._timeline[1]

    @cached_property
    def _timeline(self) -> tuple[Timeline, NDArray[np.float64]]:
        return build_timeline(self.evidence, self.labels)

    @cached_property
    def attribution(self) -> Attribution:
        return Attribution(self.recording, self.labels, self.decisions.own_reasons)

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
        wanted = explanation.named_category(category)
        rows = np.flatnonzero(self.evidence.counted)
        if at is not None:
            timeline, ranks = self._timeline
            rows = live_at(
                self.evidence,
                float(ranks[explanation.row_at(timeline.times_ns, timeline.peak_row, at)]),
            )
        if wanted is not None:
            rows = rows[self.labels[rows] == wanted.column]
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
        return explanation.in_order(explanations, wanted, module)

    @cached_property
    def peak(self) -> Peak:
        """The peak, with everything that was live at it and at each category's own peak."""
        ranks = self.ranks
        return find_peak(self.timeline, lambda row, of: self._live_at(float(ranks[row]), of))

    @property
    def _peak_rank(self) -> float:
        return float(self.ranks[self.timeline.peak_row])

    def _live_at(self, rank: float, category: Category | None = None) -> tuple[Contributor, ...]:
        rows = live_at(self.evidence, rank)
        if category is not None:
            rows = rows[self.labels[rows] == category.column]
        return self.attribution.contributors(rows.tolist())

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

    @property
    def _freed_bytes(self) -> int:
        """Bytes that were alive when the window began, and that were freed in it."""
        begin, end = self.window.begin, self.window.end
        there = (self.storages.born <= begin) & (self.storages.died > begin)
        freed = there & (self.storages.died <= end) & self.evidence.mine
        freed &= self.labels != Category.WORKSPACE.column
        return int(self.storages.size_bytes[freed].sum())

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
        noted = self.tree.ranks_at(np.array([noted_ns]))[0]
        storages = self.storages
        return tuple(
            LeftBehind(
                (self.device, int(storages.ptr[row])),
                int(storages.size_bytes[row]),
                bool(storages.died[row] == NEVER),
                bool(storages.died[row] > noted),
                self.attribution.contributor(row),
            )
            for row in rows.tolist()
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Bytes that the window made and that are alive at the end of each of its steps.

        Of several loops it is the one whose steps leave most behind.
        """
        return tuple(self._made_until(rank) for rank in self.step_ranks)

    @cached_property
    def grown(self) -> tuple[Contributor, ...]:
        """Bytes that each origin holds more after the last step than after the first.

        A loop variable that each step replaces is as large at both ends, and grows nothing::

            y = model(x); logs.append(y[:64].clone())    # logs grow; y does not
        """
        return self._risen(self.step_ranks)

    def _risen(self, ranks: Sequence[float]) -> tuple[Contributor, ...]:
        if len(ranks) < 2:
            return ()
        first, last = self._origins_at(ranks[0]), self._origins_at(ranks[-1])
        pairs = ((now, first.get(now.holding(0, 0), now.holding(0, 0))) for now in last.values())
        more = (
            now.holding(now.size_bytes - then.size_bytes, max(1, now.count - then.count), now.order)
            for now, then in pairs
            if now.size_bytes > then.size_bytes
        )
        return tuple(sorted(more, key=lambda origin: -origin.size_bytes))

    @property
    def each_step(self) -> int:
        """Bytes that most steps add and that stay, whatever is freed beside them; 0 for none."""
        return self._each_step(self.step_ranks)

    def _each_step(self, ranks: Sequence[float]) -> int:
        """Return what most steps of a loop add; 0 where they add nothing, or nothing that stays.

        One release hides from the mean what every step leaves behind::

            alive after each step          40  41  42   3   4      +1, +1, -39, +1
            made by step 2, 3, 4 and kept       1   1   1

        A buffer that is emptied every few steps adds in most of them, too. So what is made must
        outlive the loop, and its origins must hold more after the last step than after the first.
        What the last step made is not asked: the next one may replace it.
        """
        if len(ranks) < 3:
            return 0
        added = [after - before for before, after in pairwise(map(self._made_until, ranks))]
        rows = self._retained_at(ranks[-1])
        step = np.searchsorted(ranks, self.storages.born[rows], side="left")
        kept = np.bincount(step, self.storages.size_bytes[rows], minlength=len(ranks))
        least = min(median_low(added), int(median_low(kept[1 : len(ranks) - 1].tolist())))
        if least <= 0:
            return 0
        risen_bytes = sum(origin.size_bytes for origin in self._risen(ranks))
        return min(least, -(-risen_bytes // len(added)))

    def _origins_at(self, rank: float) -> dict[Contributor, Contributor]:
        """Return what the window made and is alive, by its origin."""
        rows = self._retained_at(rank).tolist()
        return {found.holding(0, 0): found for found in self.attribution.contributors(rows)}

    @cached_property
    def step_ranks(self) -> tuple[float, ...]:
        """The ends of the steps, as ranks, in the loop whose steps leave most behind."""
        marks, names = self.tree.trace.marks, self.tree.trace.strings
        ranks = self.tree.mark_ranks
        loops: dict[str, list[float]] = {}
        for row in np.flatnonzero(marks["kind"] == MarkKind.STEP).tolist():
            name = names[marks["text"][row]]
            inside = self.window.begin <= ranks[row] <= self.window.end
            if inside and name.partition(LOOP)[0] == self.steps_of:
                loops.setdefault(name, []).append(float(ranks[row]))

        def left_behind(loop: Sequence[float]) -> float:
            if len(loop) < 2:
                return -np.inf
            rise_bytes = self._made_until(loop[-1]) - self._made_until(loop[0])
            return max(rise_bytes / (len(loop) - 1), self._each_step(loop))

        return max(map(tuple, loops.values()), key=left_behind, default=())

    def _made_until(self, rank: float) -> int:
        return int(self.storages.size_bytes[self._retained_at(rank)].sum())

    @property
    def unexplained_bytes(self) -> int:
        """Bytes that do not reconcile, with the allocator's own total or with what is alive."""
        seen = self.reconciliation
        return max(seen.drift_bytes, seen.unrecorded_bytes) + seen.unseen_bytes

    @cached_property
    def reconciliation(self) -> Reconciliation:
        """The recording held against what others know: it tells what may be missing."""
        return Reconciliation(self.recording)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free of the window's footprint, in order."""
        return requests_of_window(self.evidence)

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
        found = []
        for segment in segments:
            end = segment.address + segment.size_bytes
            inside = rows[(address >= segment.address) & (address < end)]
            if made[inside].any():
                found.append((segment, inside, int(inside[made[inside]][0])))
        last = max((born[first] for _, _, first in found), default=0)

        def free_in(segment: ReservedSegment, inside: NDArray[np.int64]) -> int:
            live = inside[(born[inside] <= last) & (died[inside] > last)]
            return max(0, segment.size_bytes - int(self.storages.size_bytes[live].sum()))

        return tuple(
            (s, replace(self.attribution.contributor(first), size_bytes=free_in(s, inside)))
            for s, inside, first in found
        )

    def reserved_if_simulated(
        self, settings: str
    ) -> tuple[tuple[ReservedSegment, Contributor], ...]:
        """Return what `reserved` does, for the caching allocator of a GPU with these settings.

        Raises what `simulate` raises.
        """
        requests, run = self.allocator_requests, self.simulate(settings)
        made = requests.kind == Request.ALLOC
        address = np.zeros(len(self.storages), np.int64)
        address[storages_of_window(self.evidence)[requests.key[made]]] = run.address[made]
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
    def own_cost_ns(self) -> int:
        """The time that settling, starting, stopping and reading the sources took; 0 if not known.

        The cost of recording while the body runs is part of the body's own time.
        """
        return int(self.tree.trace.meta.get("own_cost_ns", 0))

    @cached_property
    def queue(self) -> DeviceQueue:
        """Queue depth and idle time of the device during each event of the recording."""
        return find_device_queue(self.tree)

    def at_most(self, scratch: Iterable[tuple[int, int]]) -> int:
        """Return the most that the footprint can be if scratch of libraries was there, too.

        Args:
            scratch: For each call of a library the time, and the most bytes that it may have taken.
        """
        timeline, ranks = self._timeline
        total, moments = timeline.total, np.array(list(scratch), np.int64).reshape(-1, 2)
        before, after = (self.tree.ranks_at(moments[:, 0] + ns) for ns in (-_CLOCKS_NS, _CLOCKS_NS))
        inside = (after >= self.window.begin) & (before <= self.window.end)
        first = np.maximum(np.searchsorted(ranks, before[inside], side="right") - 1, 0)
        last = np.searchsorted(ranks, after[inside], side="right")
        calls = zip(first.tolist(), last.tolist(), moments[inside, 1].tolist(), strict=True)
        levels = (total[a:b].max(initial=0) + size_bytes for a, b, size_bytes in set(calls))
        return int(max((total.max(initial=0), *levels)))

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
        found = differences(self.peak.live, before.peak.live)
        return tuple(difference for difference in found if difference.size_bytes > 0)

    def region(self, begin_mark: int, end_mark: int, steps_of: str = "") -> MemoryProfile:
        """The part of the recording between two marks."""
        ranks = self.tree.mark_ranks
        window = RankWindow(float(ranks[begin_mark]), float(ranks[end_mark]), may_go_on=True)
        whole = replace(self.whole, may_go_on=True)
        return replace(self, window=window, whole=whole, steps_of=steps_of)

    @property
    def _block_sized_bytes(self) -> int:
        """Bytes of allocations on a GPU whose request is not known, so that their block counts."""
        if self.device == "cpu":
            return 0
        table = self.tree.trace.allocations
        unknown = (table["requested_bytes"] == 0) & (table["size_bytes"] > 0)
        unknown &= table["device"] == self.evidence.device
        return int(table["size_bytes"][unknown].sum())

    @property
    def _counters(self) -> Counters | None:
        meta = self.tree.trace.meta
        peaks, before = meta.get("counters"), meta.get("counters_before") or {}
        return Counters.of(peaks, before) if peaks else None

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

    def _retained_at(self, rank: float) -> NDArray[np.int64]:
        """Storages that came in the window and are alive; workspaces belong to their library."""
        alive = (self.storages.born <= rank) & (self.storages.died > rank)
        alive &= self.labels != Category.WORKSPACE.column
        came = self.evidence.window.holds(self.storages.born)
        return np.flatnonzero(alive & came & self.evidence.mine)


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
    told = [c for c in contributors if c.size_bytes >= largest[c.category].size_bytes * LIVE_PART]
    more = (c for c in told[LIVE_LIMIT:] if c is largest[c.category])
    return (*told[:LIVE_LIMIT], *more)


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
