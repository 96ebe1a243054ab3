"""From a pytest item to its measured body: markers checked, device found, the call wrapped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.plugin.item.body import Body
from pytest_torchmem.plugin.item.sending import set_properties
from pytest_torchmem.plugin.options.marker import Demands, read_markers
from pytest_torchmem.plugin.options.option_table import BASELINE, BUDGET, uses_fixture
from pytest_torchmem.plugin.run.workers import PAYLOAD, attach, plain_nodeid
from pytest_torchmem.plugin.stash import BAD_ARGUMENT, BODY, DEMANDS, IN_CALL, RUN, RUNNING
from pytest_torchmem.values.errors import DeviceError, MarkerError
from pytest_torchmem.values.measured import MeasuredTest

_PACKAGE: Final = Path(__file__).parents[2]


def argument_problem(item: pytest.Item) -> str:
    """Return what is wrong with the arguments of a test's markers; ``""`` when nothing is."""
    try:
        read_markers(item, item.config.stash[RUN].settings.allowance)
    except MarkerError as error:
        return f"{plain_nodeid(item)}: {error}"
    return ""


def prepare(item: pytest.Item) -> None:
    """Check the markers and the device of a test that asks to be measured, before its fixtures."""
    item.config.stash[RUN].originals.note()
    forget(item)
    set_properties(item, None)
    demands = _demands_of(item)
    if demands.anything or uses_fixture(item):
        _new_body(item, demands)


def _demands_of(item: pytest.Item) -> Demands:
    """Return what the markers ask for; they are read once, and again where a fixture adds one.

    Raises pytest's failure for one that cannot be read.
    """
    marks = _marks(item)
    cached = item.stash.get(DEMANDS, None)
    if cached is not None and cached[0] == marks:
        return cached[1]
    settings = item.config.stash[RUN].settings
    try:
        demands = read_markers(item, settings.allowance)
    except MarkerError as error:
        raise _bad_argument(item, error) from None
    if settings.baseline_all_bytes and not demands.baseline and isinstance(item, pytest.Function):
        demands = replace(demands, baseline=True, least_bytes=settings.baseline_all_bytes)
    item.stash[DEMANDS] = marks, demands
    return demands


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for mark in item.iter_markers() if mark.name in (BUDGET, BASELINE)]


def _has_new_marks(item: pytest.Item) -> bool:
    marks = _marks(item)
    return marks != (item.stash[DEMANDS][0] if DEMANDS in item.stash else [])


def _new_body(item: pytest.Item, demands: Demands) -> Body:
    """Return the body of a test, which is measured from now on; skip a test without its device."""
    run = item.config.stash[RUN]
    try:
        body = item.stash[BODY] = item.config.stash[RUNNING] = Body(item, run, demands)
    except DeviceError as error:
        record = MeasuredTest(plain_nodeid(item), str(item.path), {}, not_measured=str(error))
        item.stash[PAYLOAD] = record.to_json()
        is_failure = run.settings.strict and not run.settings.off
        ending = pytest.fail if is_failure else pytest.skip
        raise ending.Exception(f"not measured: {error}", pytrace=False) from None
    except MarkerError as error:
        raise _bad_argument(item, error) from None
    return body


def _bad_argument(item: pytest.Item, error: MarkerError) -> BaseException:
    """Return what fails a test whose markers cannot be used."""
    item.stash[BAD_ARGUMENT] = True
    return pytest.fail.Exception(f"{plain_nodeid(item)}: {error}", pytrace=False)


def forget(item: pytest.Item) -> None:
    """Drop what a run of a test left in its item, which lives on and may be run again."""
    if body := item.stash.get(BODY, None):
        del item.stash[BODY]
        if item.config.stash.get(RUNNING, None) is body:
            del item.config.stash[RUNNING]
    if PAYLOAD in item.stash:
        del item.stash[PAYLOAD]


def begin(item: pytest.Item) -> None:
    """Warm up and begin to measure, right before the body."""
    body = item.stash.get(BODY, None)
    if _has_new_marks(item):  # of fixtures
        demands = _demands_of(item)
        try:
            if body:
                body.ask_for(demands)
            else:
                body = _new_body(item, demands)
        except MarkerError as error:
            raise pytest.fail.Exception(f"{plain_nodeid(item)}: {error}", pytrace=False) from None
    elif body is None and (demands := _demands_of(item)).least_bytes and "torch" in sys.modules:
        # The run asks for all tests. One that asks for nothing is never worse off for that.
        with contextlib.suppress(DeviceError):
            body = item.stash[BODY] = Body(item, item.config.stash[RUN], demands)
            item.config.stash[RUNNING] = body
    if body and body.is_off:
        body.begin_unmeasured()
    elif body:
        body.warm_up()
        body.measure_before()
        body.start()


def ended_by(item: pytest.Item, error: BaseException) -> None:
    """Take note of the exception that ended a body."""
    if body := item.stash.get(BODY, None):
        body.abandon(error)


def end(item: pytest.Item) -> None:
    """Judge what was measured, right after the body. Raises pytest's failure."""
    body = item.stash.get(BODY, None)
    if _has_new_marks(item):
        error = MarkerError(
            "a memory marker was added while the body ran, which is too late to measure it: write "
            "it above the test, or add it in a fixture"
        )
        if body:
            body.abandon(error)
        raise pytest.fail.Exception(str(error), pytrace=False)
    # What ended the method of a `TestCase`: pytest keeps it, and raises it to nobody.
    caught: Sequence[pytest.ExceptionInfo[BaseException]] = getattr(item, "_excinfo", None) or ()
    if body and caught:
        body.abandon(caught[0].value)
    elif body:
        body.finish()


def report_on(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send what was measured along with a report of the test."""
    if item.stash.get(BAD_ARGUMENT, False) and hasattr(report, "wasxfail"):
        # A marker nobody can read is not the failure that was expected.
        del report.wasxfail
        report.outcome = "failed"
    if not report.passed:
        # The test may have replaced functions that we call.
        with item.config.stash[RUN].originals.back():
            _point_at_test(item, report)
    attach(item, report)
    if report.when == "teardown":
        forget(item)


def _point_at_test(item: pytest.Item, report: pytest.TestReport) -> None:
    """Make the test the place of a failure that we raise, and its first line the message.

    pytest shows both with ``--tb=line``, in JUnit's file and in the last lines of a run in CI. Our
    own line, which raised the failure, would help nobody there, and the tables are above.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    traceback = getattr(report.longrepr, "reprtraceback", None)
    if crash is None or traceback is None or traceback.style != "value":
        return
    if not Path(crash.path).is_relative_to(_PACKAGE):
        return
    # In place: what xdist sends has the same objects a second time.
    crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1
    # pytest writes the test before it.
    crash.message = crash.message.partition("\n")[0].replace(f"{plain_nodeid(item)}: ", "", 1)
    option = item.config.getoption
    if report.when == "call" and option("tbstyle") == "line" and not option("usepdb", False):
        traceback.reprentries.clear()


def body_of(item: pytest.Item) -> Body:
    """Return the measured body of a test; when the body itself asks first, it starts here."""
    body = item.stash.get(BODY, None)
    if body is None:
        in_call = item.stash.get(IN_CALL, False)
        # A marker that the body added itself is too late.
        demands = item.stash[DEMANDS][1] if in_call and DEMANDS in item.stash else _demands_of(item)
        body = _new_body(item, demands)
        if in_call and body.is_off:
            body.begin_unmeasured()
        elif in_call:
            body.start()
    return body
