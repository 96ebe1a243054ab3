"""One measured test body: warm it up, measure it, hold it against what its test asked for."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.analysis.judge.holders import explain_retained
from pytest_torchmem.analysis.judge.sentences import sentences
from pytest_torchmem.analysis.judge.spread import judge_spread
from pytest_torchmem.analysis.judge.verdict import (
    judge_baseline,
    judge_blind_spots,
    judge_limits,
    judge_shrinking,
    rank,
)
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.plugin.item.comparing import find_reference, missing_baseline
from pytest_torchmem.plugin.item.counting import CountedRun, level_for
from pytest_torchmem.plugin.item.estimated import Estimates, simulated
from pytest_torchmem.plugin.item.state import State, WarmupOver
from pytest_torchmem.plugin.item.unfinished import (
    COUNTED_OUT_OF_MEMORY,
    is_failure,
    is_out_of_memory,
    live_then,
    out_of_memory_section,
    out_of_memory_sentences,
    raised,
    until_then,
)
from pytest_torchmem.plugin.options.marker import can_rerun, read_markers
from pytest_torchmem.plugin.options.option_table import relative_path, typed_nodeid
from pytest_torchmem.plugin.options.settings import Settings, Timelines
from pytest_torchmem.plugin.run.pictures import (
    drawn,
    packed_trace,
    picture_of,
    room,
    set_properties,
)
from pytest_torchmem.plugin.run.workers import PAYLOAD, TRACE, plain_nodeid
from pytest_torchmem.report.text.terminal import failure_text
from pytest_torchmem.store.baselines import (
    BaselineStore,
    Reference,
    entry_key,
    portable,
    portable_live,
)
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change
from pytest_torchmem.values.errors import TorchmemError
from pytest_torchmem.values.findings import Finding, Verdict, words
from pytest_torchmem.values.measured import MeasuredTest, Window, unjudged
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Level, Result

if TYPE_CHECKING:
    from pytest_torchmem.analysis.estimated.estimate import Estimate
    from pytest_torchmem.measuring.body import BodyMeasurement, Region

PICTURED_REGIONS: Final = 20
"""How many of a test's regions have a timeline in a report without being checked."""


class Run:
    """What the tests of one process share: the settings, and the baselines read so far."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self.rootdir = config.rootpath
        self.store = BaselineStore(config.rootpath, settings.baseline_dir, settings.fallbacks)
        self._environments: dict[str, Mapping[str, str]] = {}

    def environment(self, device: str) -> Mapping[str, str]:
        """Return what the baselines of a device are keyed by."""
        if device not in self._environments:
            from pytest_torchmem.measuring.environment import environment

            self._environments[device] = environment(device)
        return self._environments[device]


class Body:
    """The body of one test, for as long as that test runs.

    Raises `DeviceError` when its device is missing.
    """

    def __init__(self, item: pytest.Item, run: Run) -> None:
        self.item = item
        self.run = run
        self.asked = read_markers(item, run.settings.allowance)
        self.state = State.BEFORE
        self.not_measured = ""
        self.checked: list[tuple[Region, Allowance]] = []
        self.estimates = self._no_estimates()
        self.earlier: list[dict[str, Result]] = []
        self._entries: dict[str, BaselineEntry] = {}
        self._counted: CountedRun | None = None
        self.measurement = self._new_measurement()

    def _new_measurement(self) -> BodyMeasurement:
        # Here torch comes in: a process that measures nothing does without.
        from pytest_torchmem.measuring.body import BodyMeasurement

        return BodyMeasurement(self.asked.device or self.run.settings.device or None)

    def _no_estimates(self) -> Estimates:
        return Estimates(self.asked.allowance if self.asked.baseline else None)

    def warm_up(self) -> None:
        """Run the body as often as the marker says, unmeasured. What the body raises comes out."""
        self.state = State.WARMING_UP
        for _ in range(self.asked.warmup if can_rerun(self.item) else 0):
            with contextlib.suppress(WarmupOver):
                self.item.runtest()

    def measure_before(self) -> None:
        """Where an update asks for several runs, measure all but the last. What the body raises
        comes out; a run that cannot be measured leaves it to the last one to say so."""
        settings = self.run.settings
        compares = self.asked.baseline or "torchmem" in getattr(self.item, "fixturenames", ())
        if not settings.accepted or not compares or not can_rerun(self.item):
            return
        for _ in range(settings.repeat_count - 1):
            self.start()
            if self.state is State.MEASURING:
                try:
                    self.item.runtest()
                except BaseException as error:
                    self.abandon(error)
                    raise
                windows, self.not_measured = self._stop(), ""
                self.earlier.append({result.name: result for _, result in windows})
            self.measurement, self.checked = self._new_measurement(), []
            self.not_measured = ""

    def begin(self) -> None:
        """Begin to measure, at the lowest level that may answer all that is asked."""
        device = self.measurement.device
        level = level_for(self.item, self.asked, self.run.settings, device)
        if level is Level.FULL:
            self.start()
            return
        from pytest_torchmem.measuring.counted import CounterMeasurement

        self._counted = CountedRun(CounterMeasurement(device, level))
        self._counted.start()
        self.state = State.COUNTING

    def needs_recording(self) -> None:
        """Note that the body asks for more than counters know."""
        if self._counted is not None:
            self._counted.enough = False

    def _pass_by_counters(self) -> bool:
        """End a counted run; True where that was enough to pass."""
        self.state = State.AFTER
        limits = self.asked.sizes()
        result = self._counted.within(limits) if self._counted else None
        if result is None or (result.blind_spots and self.run.settings.strict):
            return False
        window = self._window(entry_key(self.nodeid), Verdict(result), limits, None)
        self._send(self._record((window,)))
        return True

    def _run_recorded(self) -> None:
        """Run the body again, and record it. What the body raises comes out."""
        self.start()
        try:
            self.item.runtest()
        except BaseException as error:
            self.abandon(error)
            raise

    def start(self) -> None:
        """Begin to record; where that is not possible, the body runs unmeasured."""
        self.estimates = self._no_estimates()
        try:
            self.measurement.start()
        except TorchmemError as error:
            self.state = State.UNMEASURED
            self.not_measured = str(error)
        else:
            self.state = State.MEASURING

    def abandon(self, error: BaseException) -> None:
        """End the measurement of a body that ended with ``error``, which is what counts."""
        state, self.state = self.state, State.AFTER
        if state is State.COUNTING and is_out_of_memory(error):
            self.item.add_report_section("call", "torchmem", COUNTED_OUT_OF_MEMORY)
        if state is not State.MEASURING:
            return
        try:
            if is_failure(error) and (self.run.settings.reports or is_out_of_memory(error)):
                self._keep_unfinished(until_then(self.measurement.stop()), error)
                return
        except Exception as problem:  # the device may be beyond use; the test's own error counts
            self.not_measured = str(problem)
        with contextlib.suppress(Exception):
            self.measurement.cancel()

    def _keep_unfinished(self, raw: Result, error: BaseException) -> None:
        """Record what was measured until the body's own exception, for reports."""
        settings, rootdir = self.run.settings, self.run.rootdir
        result, picture = portable(raw, rootdir), None
        told: tuple[str, ...] = ()
        memory_ran_out = is_out_of_memory(error)
        if memory_ran_out or settings.timelines is not Timelines.NONE:
            picture = picture_of(self.measurement, True, settings, rootdir)
        if memory_ran_out:
            live = portable_live(live_then(self.measurement), rootdir)
            told = out_of_memory_sentences(result, live)
            timeline = drawn(picture, self.item.config)
            section = out_of_memory_section(told, live, timeline, room(self.item.config))
            self.item.add_report_section("call", "torchmem", section)
        kept = picture if settings.timelines is not Timelines.NONE else None
        body = unjudged(result, kept, told)
        windows = (body, *self._regions(failed=True))
        self._send(self._record(unjudged=windows, raised=raised(error)))
        self._pack_trace()

    def finish(self) -> None:
        """End the measurement and judge it. Raises pytest's failure when something is wrong."""
        if self.state is State.COUNTING:
            if self._pass_by_counters():
                return
            self._run_recorded()
        with gc_paused():
            windows = self._stop()
            failure = self._judge(windows) if not self.not_measured else self._unmeasured()
        if failure:
            raise pytest.fail.Exception(failure, pytrace=False)

    def _stop(self) -> list[tuple[str, Result]]:
        """Return what was measured by the region's name, the whole body first."""
        measuring, self.state = self.state is State.MEASURING, State.AFTER
        if not measuring:
            return []
        try:
            windows = [("", self.measurement.stop())]
            windows += [(region.name, region.result) for region, _ in self.checked]
            windows += [(estimate.name, estimate) for estimate in self.estimates.made]
        except TorchmemError as error:
            self.not_measured = str(error)
            return []
        return windows

    def _unmeasured(self) -> str:
        """Record why nothing was measured. A limit without a reading fails: it never passes."""
        self._send(self._record(not_measured=self.not_measured))
        if self.asked.limits:
            what = ", ".join(words(key) for key in self.asked.limits)
            return f"the limit on {what} cannot be judged: {self.not_measured}"
        strict = self.run.settings.strict
        return f"the body was not measured: {self.not_measured}" if strict else ""

    def _judge(self, measured: list[tuple[str, Result]]) -> str:
        verdicts: list[Verdict] = []
        windows: list[Window] = []
        problem = ""
        drawings: dict[str, Sequence[str]] = {}
        sources: list[tuple[BodyMeasurement | Region | Estimate, Allowance]]
        sources = [(self.measurement, self.asked.allowance), *self.checked]
        sources += self.estimates.sources(self.asked.allowance)
        for (region, raw), (source, allowance) in zip(measured, sources, strict=True):
            result = portable(raw, self.run.rootdir)
            limits: Mapping[str, int] = {}
            verdict = Verdict(result)
            try:
                limits = self.estimates.limits_for(result, self.asked.sizes())
                if not limits and self._has_no_say(result):
                    continue
                result = simulated(result, limits, source)
                verdict = self._verdict(result, limits, allowance)
                # An estimate has left nothing behind.
                verdict = explain_retained(verdict, getattr(source, "find_holders", None))
            except TorchmemError as error:
                problem = problem or str(error)
            verdicts.append(verdict)
            key = entry_key(self.nodeid, region)
            failed = verdict.failed or bool(problem)
            picture = picture_of(source, failed, self.run.settings, self.run.rootdir)
            drawings[region] = drawn(picture, self.item.config) if verdict.failed else ()
            windows.append(self._window(key, verdict, limits, picture))
        failed = bool(problem) or any(verdict.failed for verdict in verdicts)
        regions = self._regions(failed, [region for region, _ in self.checked]) if windows else ()
        self._send(self._record(tuple(windows), tuple(regions), problem=problem))
        bad = [verdict for verdict in verdicts if verdict.failed]
        if bad:
            self._pack_trace()
        if not bad and not problem:
            return ""
        return failure_text(bad, problem, self._command(), drawings, room(self.item.config))

    def _has_no_say(self, result: Result) -> bool:
        """Return whether a body only made estimates, now and when its baseline was stored."""
        if not self.estimates.stand_for(result):
            return False
        environment = self.run.environment(self.measurement.device)
        return not (self.asked.baseline and self._reference(environment, entry_key(self.nodeid)))

    def _window(
        self, key: str, verdict: Verdict, limits: Mapping[str, int], picture: Picture | None
    ) -> Window:
        settings = self.run.settings
        result, change, before = verdict.result, verdict.change, verdict.baseline_bytes
        return Window(
            key,
            result,
            limits,
            change,
            before,
            verdict.sentence,
            sentences=sentences([verdict], name_regions=False),
            baseline=self._entries.get(key) if settings.reports else None,
            picture=picture if settings.timelines is not Timelines.NONE else None,
            reference=verdict.reference,
            nearest=verdict.nearest,
            notice=verdict.notice,
            kinds=verdict.kinds,
        )

    def _pack_trace(self) -> None:
        """Let the recording travel with what was just sent, where the report keeps it."""
        if self.run.settings.keeps_traces:
            self.item.stash[PAYLOAD][TRACE] = packed_trace(self.measurement)

    def _send(self, record: MeasuredTest) -> None:
        self.item.stash[PAYLOAD] = record.to_json()
        set_properties(self.item, record)

    def _verdict(self, result: Result, limits: Mapping[str, int], allowance: Allowance) -> Verdict:
        findings = judge_limits(result, limits)
        if self._counted and not result.name:
            findings = findings or self._counted.certain(limits)
        if self.run.settings.strict:
            findings = (*judge_blind_spots(result), *findings)
        if not self.estimates.compares(result):
            return Verdict(result, findings)
        settings, store, module = self.run.settings, self.run.store, self.item.path
        environment = self.run.environment(self.measurement.device)
        key = entry_key(self.nodeid, result.name)
        findings = (*findings, *self._spread(result, allowance))
        reference = self._reference(environment, key)
        if reference is None or (reference.environment and Change.NEW in settings.accepted):
            near = store.nearest(module, environment, key)
            path = relative_path(
                store.path(module, environment), self.item.config.invocation_params.dir
            )
            findings = (*findings, *missing_baseline(settings, key, path, near))
            return Verdict(result, findings, Change.NEW, nearest=near)
        self._entries[key] = reference.entry
        compared = judge_baseline(result, reference.entry, allowance, reference.environment)
        if compared.change not in settings.accepted or reference.environment:
            shrunk = judge_shrinking(compared) if settings.fail_shrunk else ()
            findings = rank([*findings, *compared.findings, *shrunk])
        return replace(compared, findings=findings)

    def _reference(self, environment: Mapping[str, str], key: str) -> Reference | None:
        return find_reference(self.run.store, self.run.settings, self.item.path, environment, key)

    def _spread(self, result: Result, allowance: Allowance) -> tuple[Finding, ...]:
        earlier = [run[result.name] for run in self.earlier if result.name in run]
        return judge_spread([*earlier, result], allowance) if earlier else ()

    def _record(
        self, windows: tuple[Window, ...] = (), unjudged: tuple[Window, ...] = (), **texts: str
    ) -> MeasuredTest:
        measured = windows or unjudged
        environment = self.run.environment(self.measurement.device) if measured else {}
        file = str(self.item.path)
        return MeasuredTest(self.nodeid, file, environment, windows, unjudged=unjudged, **texts)

    def _regions(self, failed: bool, without: Sequence[Region] = ()) -> Iterator[Window]:
        """Yield the regions of the body but some, where a report asks for them."""
        settings, rootdir = self.run.settings, self.run.rootdir
        regions = [region for region in self.measurement.regions if region not in without]
        for place, region in enumerate(regions if settings.reports else ()):
            drawn_too = place < PICTURED_REGIONS
            picture = picture_of(region, failed, settings, rootdir) if drawn_too else None
            yield unjudged(portable(region.result, rootdir), picture)

    def results_read(self) -> Iterator[Result]:
        """Yield the results whose numbers the body has read so far."""
        yield from (region.result for region in self.measurement.regions if region.was_read)
        yield from self.estimates.made

    @property
    def nodeid(self) -> str:
        return plain_nodeid(self.item)

    def _command(self) -> str:
        """Return the command that accepts what was measured, to be pasted where pytest was run."""
        test = typed_nodeid(self.item.config, self.nodeid)
        return f"pytest {shlex.quote(test)} --torchmem-update-baseline"
