"""The footprint of a window in numbers: its storages, their categories, the timeline, the steps."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.requests import Requests
from pytest_torchmem.analysis.events.device_queue import DeviceQueue, find_device_queue
from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.analysis.gpu_questions import GpuQuestions, requests_of_window
from pytest_torchmem.analysis.storages import explanation
from pytest_torchmem.analysis.storages.attribution import Attribution
from pytest_torchmem.analysis.storages.categories import Decisions, decide
from pytest_torchmem.analysis.storages.evidence import RankWindow
from pytest_torchmem.analysis.storages.explanation import Explanation, OwnPass
from pytest_torchmem.analysis.storages.measured_facts import MeasuredFacts
from pytest_torchmem.analysis.storages.storages import Storages
from pytest_torchmem.analysis.storages.timeline import (
    Reconciliation,
    Timeline,
    build_timeline,
    live_at,
)
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.results import Counters
from pytest_torchmem.values.trace import LOOP, MarkKind

# What another clock says may be off by so much.
_CLOCKS_NS: Final = 2000


@dataclass(frozen=True, eq=False)
class Footprint(GpuQuestions):
    """A part of a recording: its storages, the times at which each lived, and their categories.

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

    @abc.abstractmethod
    def explain(self) -> tuple[Explanation, ...]:
        """Say of each storage of the footprint why it has its category."""

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

    @property
    def _peak_rank(self) -> float:
        return float(self.ranks[self.timeline.peak_row])

    def _live_at(self, rank: float, category: Category | None = None) -> tuple[Contributor, ...]:
        rows = live_at(self.evidence, rank)
        if category is not None:
            rows = rows[self.labels[rows] == category.column]
        return self.attribution.contributors(rows.tolist())

    def _retained_at(self, rank: float) -> NDArray[np.int64]:
        """Storages that came in the window and are alive; workspaces belong to their library."""
        alive = (self.storages.born <= rank) & (self.storages.died > rank)
        alive &= self.labels != Category.WORKSPACE.column
        came = self.evidence.window.holds(self.storages.born)
        return np.flatnonzero(alive & came & self.evidence.mine)

    @property
    def _freed_bytes(self) -> int:
        """Bytes that were alive when the window began, and that were freed in it."""
        begin, end = self.window.begin, self.window.end
        there = (self.storages.born <= begin) & (self.storages.died > begin)
        freed = there & (self.storages.died <= end) & self.evidence.mine
        freed &= self.labels != Category.WORKSPACE.column
        return int(self.storages.size_bytes[freed].sum())

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
        kept_bytes = np.bincount(step, self.storages.size_bytes[rows], minlength=len(ranks))
        made_and_kept = (added, kept_bytes[1 : len(ranks) - 1])
        least = min(int(np.percentile(steps, 50, method="lower")) for steps in made_and_kept)
        if least <= 0:
            return 0
        risen_bytes = sum(origin.size_bytes for origin in self._risen(ranks))
        return min(least, -(-risen_bytes // len(added)))

    def _origins_at(self, rank: float) -> dict[Contributor, Contributor]:
        """Return what the window made and is alive, by its origin."""
        rows = self._retained_at(rank).tolist()
        return {
            contributor.holding(0, 0): contributor
            for contributor in self.attribution.contributors(rows)
        }

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
        reconciliation = self.reconciliation
        return (
            max(reconciliation.drift_bytes, reconciliation.unrecorded_bytes)
            + reconciliation.unseen_bytes
        )

    @cached_property
    def reconciliation(self) -> Reconciliation:
        """The recording held against what others know: it tells what may be missing."""
        return Reconciliation(self.recording)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free of the window's footprint, in order."""
        return requests_of_window(self.evidence)

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
