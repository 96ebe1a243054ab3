"""Judging a measured body: its windows and what its test asked for in, verdicts out.

It knows neither pytest nor the recording: what a verdict needs of these it takes from the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_torchmem.analysis.judge.counters import told_by_allocator
from pytest_torchmem.analysis.judge.holders import explain_retained, judge_unknown
from pytest_torchmem.analysis.judge.verdict import (
    CodeChanges,
    judge_baseline,
    judge_blind_spots,
    judge_limits,
    judge_shrinking,
    judge_spread,
    rank,
    with_changes,
)
from pytest_torchmem.plugin.options.marker import Demands
from pytest_torchmem.plugin.options.option_table import relative_path
from pytest_torchmem.plugin.options.settings import Settings
from pytest_torchmem.store.baseline_file import EntryError
from pytest_torchmem.store.baselines import BaselineStore, entry_key
from pytest_torchmem.values.baseline import Allowance, Change, Reference
from pytest_torchmem.values.errors import (
    BaselineError,
    TorchmemError,
    is_torchmem_error,
)
from pytest_torchmem.values.findings import (
    COUNTERS,
    RETAINED,
    CodeLines,
    Finding,
    FindingKind,
)
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.analysis.gpu_questions import GpuQuestions
    from pytest_torchmem.measuring.body_measurement import BodyMeasurement, BodyRegion

__tracebackhide__ = is_torchmem_error

_PLAIN: Final = frozenset((Change.NOT_COMPARED, Change.SAME, Change.WITHIN))


def simulated(result: Result, limits: Mapping[str, int], source: GpuQuestions) -> Result:
    """Return ``result`` with what only a GPU counts, estimated, where a limit asks for that."""
    if not any(key in COUNTERS for key in limits):
        return result
    # A process that measures nothing imports neither numpy nor the engine.
    from pytest_torchmem.analysis.gpu_questions import with_counters
    from pytest_torchmem.record.environment import allocator_settings

    return with_counters(result, limits, source, allocator_settings())


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One window of a body that came to its end: the body itself or a region.

    Attributes:
        result: Its numbers; the name of a region, ``""`` for the body.
        allowance: How far they may be from its baseline.
        source: Where more can be asked: its timeline, what holds what it left behind.
    """

    result: Result
    allowance: Allowance
    source: BodyMeasurement | BodyRegion


@dataclass(frozen=True, slots=True)
class Judgement:
    """The judged windows of a whole test; ``problem`` is a failure that is no number."""

    windows: tuple[Window, ...] = ()
    problem: str = ""

    @property
    def failed(self) -> list[Window]:
        return [window for window in self.windows if window.failed]

    @property
    def is_plain(self) -> bool:
        """True where all is as it was, and nothing has to be explained."""
        changes = (window.change for window in self.windows)
        return not self.failed and not self.problem and _PLAIN.issuperset(changes)


@dataclass(frozen=True, slots=True)
class Baselines:
    """The baselines of one test.

    Attributes:
        nodeid: The test, as baselines know it.
        environment: Returns what the files are keyed by.
        start: Where pytest was started; paths are shown from there.
        in_reach: Returns those of some places that the test can reach, in the order in which it
            does.
    """

    store: BaselineStore
    settings: Settings
    module: Path
    nodeid: str
    environment: Callable[[], Mapping[str, str]]
    start: Path
    in_reach: Callable[[Sequence[CodeLines]], Sequence[CodeLines]] = lambda places: places

    @property
    def path(self) -> Path:
        """The test's baseline file."""
        return self.store.path(self.module, self.environment())

    def code(self, path: Path, key: str) -> CodeChanges:
        """Return the changes of code since an entry was stored.

        Of all places that have changed those are told that the test can reach.
        """
        since, environment = self.store.changed_lines, self.environment()
        entry = self.store.stored_entry(path, environment, key)
        return CodeChanges(
            partial(since.changed_at, entry),
            lambda: self.in_reach(since.places(entry)),
            partial(since.now_at, entry),
            partial(since.is_same, entry),
        )

    def reference(self, name: str) -> Reference | None:
        """Return what to compare a window with; None where it is new. Raises `BaselineError`."""
        key = entry_key(self.nodeid, name)
        try:
            return self.store.reference(self.module, self.environment(), key)
        except BaselineError as error:
            if isinstance(error, EntryError) and Change.NEW in self.settings.accepted:
                return None  # what is right, the new measurement says
            shown_path = relative_path(self.path, self.start)
            raise BaselineError(error.sentence.replace(str(self.path), shown_path)) from None

    def missing(self, result: Result, allowance: Allowance) -> tuple[str, tuple[Finding, ...]]:
        """Return the nearest environment that has an entry for a window, ``""`` without one; and a
        finding where an entry is required and neither there nor about to be stored.

        It says by how much a test that was renamed has grown.
        """
        key = entry_key(self.nodeid, result.name)
        near = self.store.nearest(self.module, self.environment(), key)
        stores_new = Change.NEW in self.settings.accepted
        if not self.settings.require_baseline or stores_new:
            return near, ()
        shown_path = relative_path(self.path, self.start)
        other = (
            f"; nearest is {near}, --torchmem-baseline-from={near} compares with it" if near else ""
        )
        text = f"there is no baseline for {key} in {shown_path}{other}"
        missing = Finding(FindingKind.NO_BASELINE, "total", text)
        return near, (self._with_renamed(missing, key, result, allowance),)

    def _with_renamed(
        self, missing: Finding, key: str, result: Result, allowance: Allowance
    ) -> Finding:
        environment = self.environment()
        with suppress(BaselineError):  # as no test can use it, it is none
            renamed = self.store.renamed_from(self.module, environment, key)
            if renamed and (stored := self.store.entry(renamed[0], environment, renamed[1])):
                path, old_key, name = renamed
                text = f"{missing.numbers}; it seems to be {name}, renamed"
                code = self.code(path, old_key)
                was = Reference.of(stored)
                compared = judge_baseline(result, was, allowance, code)
                for grown in with_changes(compared.findings, code, was)[:1]:
                    return replace(
                        grown, kind=missing.kind, numbers=f"{text}; against that, {grown.numbers}"
                    )
                return replace(missing, numbers=text)
        return missing


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds what a body measured against what its test asked for.

    Attributes:
        demands: What the test's markers ask for.
        baselines: What it is compared with.
        earlier_results: Those of earlier runs of the body by name, where an update repeats it.
    """

    demands: Demands
    baselines: Baselines
    earlier_results: Sequence[Mapping[str, Result]] = ()

    @property
    def settings(self) -> Settings:
        return self.baselines.settings

    def judge(self, windows: Sequence[MeasuredWindow]) -> Judgement:
        """Return the verdicts on all windows that have something to be held against."""
        judged_windows: list[Window] = []
        problem = ""
        for window in windows:
            key = entry_key(self.baselines.nodeid, window.result.name)
            judged = Window(window.result, key=key)
            try:
                limits = dict(self.demands.sizes()) if not window.result.name else {}
                # Too small for a baseline that only the run asks for.
                if not limits and not self.demands.anything and self._is_small(window.result):
                    continue
                judged = replace(judged, limits=limits)
                judged = self._judge_limits(judged, window)
                # A region that was checked is always compared.
                compares = window.result.name or self.demands.baseline
                if compares and not self._is_small(window.result):
                    judged = self._compare(judged, window)
                known_holders = self.settings.known_holders
                judged = explain_retained(judged, window.source.find_holders, known_holders)
            except TorchmemError as error:
                problem = problem or str(error)
            judged_windows.append(judged)
        return Judgement(tuple(judged_windows), problem)

    def _judge_limits(self, judged: Window, window: MeasuredWindow) -> Window:
        """Add the findings on limits, and what known holders have of what these count."""
        limits, known_holders = judged.limits, self.settings.known_holders
        result = simulated(judged.result, limits, window.source)
        findings, excused = judge_limits(result, limits), dict[str, int]()
        findings = told_by_allocator(findings, result, window.source)
        others = [f for f in findings if f.key not in RETAINED]
        if known_holders and len(others) < len(findings):
            unknown, excused = judge_unknown(
                result, limits, window.source.find_holders(), known_holders
            )
            findings = rank([*others, *unknown])
        if self.settings.strict:
            findings = (*judge_blind_spots(result), *findings)
        return replace(judged, result=result, findings=findings, excused=excused)

    def _compare(self, judged: Window, window: MeasuredWindow) -> Window:
        """Add what the baseline says."""
        result, settings, allowance = judged.result, self.settings, window.allowance
        earlier_results = [run[result.name] for run in self.earlier_results if result.name in run]
        spread = judge_spread([*earlier_results, result], allowance) if earlier_results else ()
        findings = (*judged.findings, *spread)
        reference = self.baselines.reference(result.name)
        if reference is None or (reference.environment and Change.NEW in settings.accepted):
            near, missing = self.baselines.missing(result, allowance)
            findings = (*findings, *missing)
            return replace(judged, findings=findings, change=Change.NEW, nearest=near)
        code = self.baselines.code(self.baselines.path, judged.key)
        compared = judge_baseline(result, reference, allowance, code)
        grown = told_by_allocator(compared.findings, result, window.source)
        accepted = ""
        if compared.change in settings.accepted and not reference.environment:
            grown = with_changes(grown, code, reference)
            accepted = grown[0].sentence if grown else compared.notice
        else:
            shrinking = judge_shrinking(compared) if settings.fail_shrunk else ()
            findings = rank([*findings, *grown, *shrinking])
        return replace(
            compared,
            findings=with_changes(findings, code, reference),
            excused=judged.excused,
            accepted=accepted,
            key=judged.key,
            limits=judged.limits,
            baseline=reference.entry if settings.reports else None,
        )

    def _is_small(self, result: Result) -> bool:
        """Return whether a body that did not ask for a baseline needs too little for one."""
        if result.name or result.peak.total >= self.demands.least_bytes:
            return False
        return self.baselines.reference(result.name) is None
