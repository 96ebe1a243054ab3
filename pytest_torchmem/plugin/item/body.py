"""One measured test, from its markers to its verdict.

The hooks call `prepare`, `begin` and `end`; a body that asks for itself calls `body_of`. Each moves
the test's one `Body` on:

    BEFORE  ->  WARMING_UP  ->  MEASURING or UNMEASURED  ->  AFTER
            begin         start                 finish or abandon
"""

from __future__ import annotations

import contextlib
import enum
import gc
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.contexts import gc_paused, numpy_in_place
from pytest_torchmem.plugin.item import sending
from pytest_torchmem.plugin.item.judging import Baselines, Judge, MeasuredWindow
from pytest_torchmem.plugin.item.reachable import reached_by
from pytest_torchmem.plugin.item.sending import Sender, set_properties
from pytest_torchmem.plugin.options.marker import (
    DEMANDS,
    Demands,
    bad_argument_fails,
    can_rerun,
    demands_of,
    has_new_marks,
)
from pytest_torchmem.plugin.options.option_table import uses_fixture
from pytest_torchmem.plugin.options.settings import Run
from pytest_torchmem.plugin.run.workers import PAYLOAD
from pytest_torchmem.plugin.stash import IN_CALL, RUN
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.store.baselines import portable
from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.errors import (
    DeviceError,
    MarkerError,
    RecordingError,
    TorchmemError,
    is_of_a_signal,
    is_torchmem_error,
)
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.measuring.body_measurement import BodyRegion, Region

__tracebackhide__ = is_torchmem_error

BODY: Final[pytest.StashKey[Body]] = pytest.StashKey()
"""Of a test: its measured body."""

RUNNING: Final[pytest.StashKey[Body]] = pytest.StashKey()
"""Of a run: the body of the test that runs now."""

_PACKAGE: Final = Path(__file__).parents[2]
OFF: Final = "--torchmem=off measures no test"


def prepare(item: pytest.Item) -> None:
    """Check the markers and the device of a test that asks to be measured, before its fixtures."""
    item.config.stash[RUN].originals.note()
    forget(item)
    set_properties(item, None)
    demands = demands_of(item)
    if demands.anything or uses_fixture(item):
        _new_body(item, demands)


def begin(item: pytest.Item) -> None:
    """Warm up and begin to measure, right before the body."""
    demands = demands_of(item)  # a fixture may have added a marker
    body = item.stash.get(BODY, None)
    if body is not None:
        with bad_argument_fails(item):
            body.ask_for(demands)
    elif demands.anything:
        body = _new_body(item, demands)
    elif demands.least_bytes and "torch" in sys.modules:
        # The run asks for all tests. One that asks for nothing is never worse off for that.
        with contextlib.suppress(DeviceError):
            body = Body(item, demands)
    if body is not None:
        body.begin()


def end(item: pytest.Item, error: BaseException | None = None) -> None:
    """Judge what was measured, right after the body. Raises pytest's failure.

    The measurement of a body that ended with ``error`` is given up.
    """
    body = item.stash.get(BODY, None)
    failure = None
    if error is None and has_new_marks(item):
        text = (
            "a memory marker was added while the body ran, which is too late to measure it: write "
            "it above the test, or add it in a fixture"
        )
        error = MarkerError(text)
        failure = pytest.fail.Exception(str(error), pytrace=False)
    if error is None:
        # What ended the method of a `TestCase`: pytest keeps it, and raises it to nobody.
        caught: Sequence[pytest.ExceptionInfo[BaseException]] = (
            getattr(item, "_excinfo", None) or ()
        )
        error = caught[0].value if caught else None
    if body is not None and error is not None:
        body.abandon(error)
    elif body is not None:
        body.finish()
    if failure is not None:
        raise failure


def body_of(item: pytest.Item) -> Body:
    """Return the measured body of a test; when the body itself asks first, it starts here."""
    body = item.stash.get(BODY, None)
    if body is None:
        in_call = item.stash.get(IN_CALL, False)
        # A marker that the body added itself is too late.
        demands = item.stash[DEMANDS][1] if in_call and DEMANDS in item.stash else demands_of(item)
        body = _new_body(item, demands)
        if in_call:
            body.start()
    return body


def forget(item: pytest.Item) -> None:
    """Drop what a run of a test left in its item, which lives on and may be run again."""
    if body := item.stash.get(BODY, None):
        del item.stash[BODY]
        if item.config.stash.get(RUNNING, None) is body:
            del item.config.stash[RUNNING]
    if PAYLOAD in item.stash:
        del item.stash[PAYLOAD]


def _new_body(item: pytest.Item, demands: Demands) -> Body:
    """Return the body of a test, which is measured from now on; skip a test without its device."""
    try:
        with bad_argument_fails(item):
            return Body(item, demands)
    except DeviceError as error:
        run = item.config.stash[RUN]
        Sender(item, run).not_measured(str(error))
        is_failure = run.settings.strict and not run.settings.off
        ending = pytest.fail if is_failure else pytest.skip
        raise ending.Exception(f"not measured: {error}", pytrace=False) from None


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

    def __init__(self, item: pytest.Item, demands: Demands) -> None:
        self.state = State.BEFORE
        self.demands = demands
        self._item = item
        self._run: Run = item.config.stash[RUN]
        self._earlier_results: list[dict[str, Result]] = []
        self._renew()
        self.ask_for(demands)
        item.stash[BODY] = item.config.stash[RUNNING] = self

    def _renew(self) -> None:
        """Have a measurement that has not begun."""
        # Here torch comes in: a process that measures nothing does without.
        from pytest_torchmem.measuring.body_measurement import BodyMeasurement

        device = self.demands.device or self._run.settings.device
        self.measurement = BodyMeasurement(device or None, self._run.passes, self._run.say)
        self._checked: list[tuple[BodyRegion, Allowance]] = []
        self._problem: TorchmemError | None = None

    # --- its way, transition by transition

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

    def begin(self) -> None:
        """Run the body as often as the marker and an update ask for but once; measure from now on.

        The marker's runs are not measured. What the body raises comes out.
        """
        settings, reruns = self._run.settings, can_rerun(self._item) and not self.is_off
        self.state = State.WARMING_UP
        for _ in range(self.demands.warmup if reruns else 0):
            with contextlib.suppress(WarmupOver):
                self._item.runtest()
        compares = settings.accepted and (self.demands.baseline or uses_fixture(self._item))
        for _ in range(settings.repeat_count - 1 if reruns and compares else 0):
            if self.start():
                self._item.runtest()
                with contextlib.suppress(Exception):  # the last run says it
                    self._earlier_results.append({w.result.name: w.result for w in self._stop()})
            self._renew()
        self.start()

    def start(self) -> bool:
        """Begin to record, and return whether that is possible; else the body runs unmeasured."""
        self.state = State.UNMEASURED
        # What the body frees of others' garbage would count as freed.
        if self.demands.collect or "net_retained" in self.demands.limits:
            gc.collect()
        # The allocator's cache is in these numbers.
        compares = self.demands.baseline and GPU_VARIABLE in os.environ
        empties_cache = compares or "reserved" in self.demands.limits
        try:
            if self.is_off:
                raise RecordingError(OFF)
            with self._run.originals.back():
                self.measurement.start(empties_cache=empties_cache)
        except Exception as error:
            if is_of_a_signal(error):
                raise
            self._problem = _as_ours(error)
        else:
            self.state = State.MEASURING
        return self.state is State.MEASURING

    def abandon(self, error: BaseException) -> None:
        """End the measurement of a body that ended with ``error``, which is what counts."""
        state, self.state = self.state, State.AFTER
        if state is not State.MEASURING:
            return
        is_failure = sending.is_failure(error)
        if is_failure and self._asks:
            self._sender.raised(error)
        # The device may be beyond use; the test's own error counts.
        with contextlib.suppress(Exception), self._run.originals.back():
            reports = self._run.settings.reports and self._asks
            if is_failure and (reports or sending.is_out_of_memory(error)):
                self._sender.unfinished(self.measurement.stop(), self.measurement, error)
                return
        with contextlib.suppress(Exception), self._run.originals.back():
            self.measurement.cancel()

    def finish(self) -> None:
        """End the measurement and judge it. Raises pytest's failure when something is wrong."""
        # Of a test that does not ask, and cannot be measured from the start, nothing is said.
        says = not self.is_off and (self._asks or self.state is State.MEASURING)
        failure = ""
        try:
            with self._run.originals.back(), gc_paused(), numpy_in_place():
                try:
                    windows = self._stop()
                    if self._problem is None:
                        failure = self._judge(windows)
                except Exception as error:
                    if is_of_a_signal(error):
                        raise
                    self._problem = _as_ours(error)
                if self._problem is not None and says:
                    failure = self._unmeasured(self._problem)
        except BaseException:  # a signal's handler may raise before the measurement has ended
            if self.measurement.is_under_way:
                self.measurement.cancel()
            raise
        if failure:
            raise pytest.fail.Exception(failure, pytrace=False)

    def _stop(self) -> list[MeasuredWindow]:
        """Return what was measured, the whole body first."""
        state, self.state = self.state, State.AFTER
        if state is not State.MEASURING:
            return []
        if self.demands.collect:
            gc.collect()
        result = self.measurement.stop(origins=self._run.keeps_origins)
        windows = [MeasuredWindow(result, self.demands.allowance, self.measurement)]
        windows += (MeasuredWindow(r.result, allowed, r) for r, allowed in self._checked)
        rootdir = self._run.rootdir
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
        f"measuring ended with {sending.raised(error)}{place}: a fault of "
        "pytest-torchmem, unless the test replaced something that it needs"
    )
