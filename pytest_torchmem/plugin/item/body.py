"""One measured test body: warm it up, run it, measure it; then have it judged and sent."""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.contexts import gc_paused, numpy_in_place
from pytest_torchmem.plugin.item import sending
from pytest_torchmem.plugin.item.judging import Baselines, Judge, MeasuredWindow
from pytest_torchmem.plugin.item.reachable import reached_by
from pytest_torchmem.plugin.item.sending import Sender
from pytest_torchmem.plugin.options.marker import Demands, can_rerun
from pytest_torchmem.plugin.options.option_table import uses_fixture
from pytest_torchmem.plugin.options.settings import Run
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.store.baselines import portable
from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.errors import (
    MarkerError,
    RecordingError,
    TorchmemError,
    is_torchmem_error,
)
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.measuring.body_measurement import BodyMeasurement, BodyRegion, Region

__tracebackhide__ = is_torchmem_error

_PACKAGE: Final = Path(__file__).parents[2]
OFF: Final = "--torchmem=off measures no test"


class State(enum.Enum):
    """The place of a test, seen from its body."""

    BEFORE = "before the test body"
    WARMING_UP = "in a warm-up run"
    MEASURING = "in the measured run"
    UNMEASURED = "in a run that cannot be measured"
    AFTER = "after the test body"


class WarmupOver(BaseException):
    """Ends a warm-up run where the body reads a measured number: there is none to give it.

    Not an `Exception`, so that no handler in the body takes it for one of its own.
    """


class Body:
    """The body of one test, for as long as that test runs.

    Raises `DeviceError` when its device is missing, `MarkerError` when limits are given by device
    and not for this one.

    Attributes:
        state: Where the test is.
        demands: What its markers ask for.
        measurement: The recording of the run that counts.
    """

    def __init__(self, item: pytest.Item, run: Run, demands: Demands) -> None:
        self.state = State.BEFORE
        self._item = item
        self._run = run
        self._problem: TorchmemError | None = None
        self._checked: list[tuple[BodyRegion, Allowance]] = []
        self._earlier_results: list[dict[str, Result]] = []
        self.demands = demands
        self.measurement = self._new_measurement()
        self.ask_for(demands)

    def _new_measurement(self) -> BodyMeasurement:
        # Here torch comes in: a process that measures nothing does without.
        from pytest_torchmem.measuring.body_measurement import BodyMeasurement

        device = self.demands.device or self._run.settings.device
        return BodyMeasurement(device or None, self._run.passes, self._run.say)

    @property
    def _empties_cache(self) -> bool:
        """True where a number that is judged has the allocator's cache in it."""
        compares = self.demands.baseline and GPU_VARIABLE in os.environ
        return "reserved" in self.demands.limits or compares

    # --- its run

    def ask_for(self, demands: Demands) -> None:
        """Take in what is asked of the device that is measured, by a fixture's markers, too.

        Raises `MarkerError` for another device.
        """
        if self.demands.device != demands.device:
            raise MarkerError("memory_budget, device: a fixture sets it, after torchmem was set up")
        if demands.differs_by_device:
            from pytest_torchmem.record.environment import device_names

            demands = demands.on_device(*device_names(self.device))
        self.demands = demands

    def warm_up(self) -> None:
        """Run the body as often as the marker says, unmeasured. What the body raises comes out."""
        self.state = State.WARMING_UP
        for _ in range(self.demands.warmup if can_rerun(self._item) else 0):
            with contextlib.suppress(WarmupOver):
                self._item.runtest()

    def measure_before(self) -> None:
        """Measure all runs but the last, if an update asks for several. The body's exceptions come
        out; the last run alone says that a run cannot be measured."""
        settings = self._run.settings
        compares = self.demands.baseline or uses_fixture(self._item)
        if not settings.accepted or not compares or not can_rerun(self._item):
            return
        for _ in range(settings.repeat_count - 1):
            if self.start():
                try:
                    self._item.runtest()
                except BaseException as error:
                    self.abandon(error)
                    raise
                self._earlier_results.append({w.result.name: w.result for w in self._stop()})
            self.measurement, self._checked, self._problem = self._new_measurement(), [], None

    def begin_unmeasured(self) -> None:
        """Let the body run as if nothing was asked of it: the run measures no test."""
        self.state, self._problem = State.UNMEASURED, RecordingError(OFF)

    def start(self) -> bool:
        """Begin to record, and return whether that is possible; else the body runs unmeasured."""
        # What the body frees of others' garbage would count as freed.
        if self.demands.collect or "net_retained" in self.demands.limits:
            gc.collect()
        try:
            with self._run.originals.back():
                self.measurement.start(empties_cache=self._empties_cache)
        except Exception as error:
            self.state, self._problem = State.UNMEASURED, _as_ours(error)
        else:
            self.state = State.MEASURING
        return self.state is State.MEASURING

    def abandon(self, error: BaseException) -> None:
        """End the measurement of a body that ended with ``error``, which is what counts."""
        state, self.state = self.state, State.AFTER
        if state is not State.MEASURING:
            return
        if sending.is_failure(error) and self._asks:
            self._sender.raised(error)
        # The device may be beyond use; the test's own error counts.
        with contextlib.suppress(Exception), self._run.originals.back():
            reports = self._run.settings.reports and self._asks
            if sending.is_failure(error) and (reports or sending.is_out_of_memory(error)):
                self._sender.unfinished(self.measurement.stop(), self.measurement, error)
                return
        with contextlib.suppress(Exception), self._run.originals.back():
            self.measurement.cancel()

    def finish(self) -> None:
        """End the measurement and judge it. Raises pytest's failure when something is wrong."""
        # Of a test that does not ask, and cannot be measured from the start, nothing is said.
        says = not self.is_off and (self._asks or self.state is State.MEASURING)
        with self._run.originals.back(), gc_paused(), numpy_in_place():
            failure, windows = "", self._stop()
            if self._problem is None:
                try:
                    failure = self._judge(windows)
                except Exception as error:
                    self._problem = _as_ours(error)
            if self._problem is not None and says:
                failure = self._unmeasured(self._problem)
        if failure:
            raise pytest.fail.Exception(failure, pytrace=False)

    def _stop(self) -> list[MeasuredWindow]:
        """Return what was measured, the whole body first."""
        measuring, self.state = self.state is State.MEASURING, State.AFTER
        if not measuring:
            return []
        if self.demands.collect:
            gc.collect()
        allowance, rootdir = self.demands.allowance, self._run.rootdir
        try:
            result = self.measurement.stop(origins=self._run.keeps_origins)
            windows = [MeasuredWindow(result, allowance, self.measurement)]
            windows += (MeasuredWindow(r.result, allowed, r) for r, allowed in self._checked)
        except Exception as error:
            self._problem = _as_ours(error)
            return []
        return [replace(window, result=portable(window.result, rootdir)) for window in windows]

    # --- its judgement

    @property
    def _sender(self) -> Sender:
        return Sender(self._item, self._run)

    def _unmeasured(self, problem: TorchmemError) -> str:
        """Send why nothing was measured. A limit without a reading fails: it never passes."""
        self._sender.not_measured(str(problem))
        if self.demands.limits:
            what = ", ".join(words(key) for key in self.demands.limits)
            return f"the limit on {what} cannot be judged: {problem}"
        strict = self._run.settings.strict and self._asks
        return f"the body was not measured: {problem}" if strict else ""

    def _judge(self, windows: list[MeasuredWindow]) -> str:
        """Judge and send what was measured; return the text of the failure."""
        baselines = Baselines(
            self._run.store,
            self._run.settings,
            self._item.path,
            self._sender.baseline_nodeid,
            lambda: self._run.environment(self.device),
            self._item.config.invocation_params.dir,
            partial(reached_by, self._item, self._run.rootdir),
        )
        judge = Judge(self.demands, baselines, self._earlier_results)
        judgement = judge.judge(windows)
        if not judgement.is_plain and not self._run.keeps_origins:
            result = portable(self.measurement.numbers(), self._run.rootdir)
            judgement = judge.judge([replace(windows[0], result=result), *windows[1:]])
        if not judgement.windows and not self._asks:
            return ""
        sources = {window.result.name: window.source for window in windows}
        return self._sender.send_judged(judgement, sources, self.measurement)

    # --- what its test asks of it

    @property
    def _asks(self) -> bool:
        """False where the run alone asks; then nothing is said but of what is large enough."""
        return self.demands.anything or uses_fixture(self._item)

    @property
    def is_off(self) -> bool:
        """True where the run measures no test."""
        return self._run.settings.off

    @property
    def device(self) -> str:
        return self.measurement.device

    @property
    def problem(self) -> str:
        """Why the body cannot be measured, without a slug; ``""`` where it can."""
        return self._problem.sentence if self._problem else ""

    def check_region(self, region: Region, allowance: Allowance) -> None:
        """Compare a region with its baseline when the body is over. Raises `MarkerError`."""
        regions = self.measurement.regions if self.state is State.MEASURING else []
        own = next((one for one in regions if one is region), None)
        if own is None:
            raise MarkerError(f"torchmem.check needs a region of this body, got {region!r}")
        if any(region.name == checked.name for checked, _ in self._checked):
            raise MarkerError(
                f"two regions named {region.name!r} are checked, and a baseline has one entry "
                "for that name; name them apart"
            )
        self._checked.append((own, allowance))
        own.note_holders()

    def windows_read(self) -> Iterator[MeasuredWindow]:
        """Yield the regions whose numbers the body has read so far."""
        for region in self.measurement.regions:
            if region.was_read:
                yield MeasuredWindow(region.result, self.demands.allowance, region)


def _as_ours(error: Exception) -> TorchmemError:
    """Return an exception that a user can read: of our own code, one says where it comes from.

    It is a mistake of ours, or the test has left something that we need in an odd state.
    """
    if isinstance(error, TorchmemError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE)]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return RecordingError(
        f"measuring ended with {sending.raised(error)}{place}, which is a mistake of "
        "pytest-torchmem's unless the test has replaced something that it needs"
    )
