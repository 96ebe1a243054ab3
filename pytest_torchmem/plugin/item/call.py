"""From a pytest item to its measured body: markers checked, device found, the call wrapped."""

from __future__ import annotations

from typing import Final

import pytest

from pytest_torchmem.plugin.activation import IN_CALL, RUN
from pytest_torchmem.plugin.item.asserts import readable
from pytest_torchmem.plugin.item.body import Body, Run
from pytest_torchmem.plugin.item.state import State, WarmupOver
from pytest_torchmem.plugin.options.marker import Asked, read_markers
from pytest_torchmem.plugin.options.option_table import BASELINE, BUDGET
from pytest_torchmem.plugin.run.pictures import set_properties
from pytest_torchmem.plugin.run.workers import PAYLOAD, attach, plain_nodeid
from pytest_torchmem.values.errors import DeviceError, MarkerError
from pytest_torchmem.values.measured import MeasuredTest

BAD_ARGUMENT: Final = pytest.StashKey[bool]()
_BODY: Final = pytest.StashKey[Body]()
_MARKS: Final = pytest.StashKey[list[pytest.Mark]]()
"""The markers of a test that were read."""
_RUNNING: Final = pytest.StashKey[Body]()
"""The body of the test that runs now, in the stash of the run."""


def argument_problem(item: pytest.Item) -> str:
    """Return what is wrong with the arguments of a test's markers; ``""`` when nothing is."""
    try:
        read_markers(item, item.config.stash[RUN].settings.allowance)
    except MarkerError as error:
        return f"{plain_nodeid(item)}: {error}"
    return ""


def prepare(item: pytest.Item) -> None:
    """Check the markers and the device of a test that asks to be measured, before its fixtures."""
    forget(item)
    set_properties(item, None)
    run = item.config.stash[RUN]
    asked = _asked(item, run)
    try:
        if asked.anything or "torchmem" in getattr(item, "fixturenames", ()):
            _keep(item, Body(item, run))
    except DeviceError as error:
        refuse(item, run, error)


def _asked(item: pytest.Item, run: Run) -> Asked:
    """Return what the markers ask for. Raises pytest's failure for one that cannot be read."""
    if problem := argument_problem(item):
        item.stash[BAD_ARGUMENT] = True
        raise pytest.fail.Exception(problem, pytrace=False)
    item.stash[_MARKS] = _marks(item)
    return read_markers(item, run.settings.allowance)


def _marks(item: pytest.Item) -> list[pytest.Mark]:
    return [mark for name in (BUDGET, BASELINE) for mark in item.iter_markers(name)]


def forget(item: pytest.Item) -> None:
    """Drop what a run of a test left in its item, which lives on and may be run again."""
    if body := item.stash.get(_BODY, None):
        del item.stash[_BODY]
        if item.config.stash.get(_RUNNING, None) is body:
            del item.config.stash[_RUNNING]
    if PAYLOAD in item.stash:
        del item.stash[PAYLOAD]


def refuse(item: pytest.Item, run: Run, error: DeviceError) -> None:
    """Skip a test whose device is missing, or fail it where the run is strict."""
    record = MeasuredTest(plain_nodeid(item), str(item.path), {}, not_measured=str(error))
    item.stash[PAYLOAD] = record.to_json()
    if run.settings.strict:
        raise pytest.fail.Exception(f"not measured: {error}", pytrace=False) from None
    raise pytest.skip.Exception(f"not measured: {error}") from None


def _keep(item: pytest.Item, body: Body) -> None:
    item.stash[_BODY] = item.config.stash[_RUNNING] = body


def explain_comparison(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    """Return the lines for a failed comparison in a body that has read its numbers."""
    body = config.stash.get(_RUNNING, None)
    return readable(op, left, right, body.results_read()) if body else None


def begin(item: pytest.Item) -> None:
    """Warm up and begin to measure, right before the body."""
    _heed_fixtures(item)
    if body := item.stash.get(_BODY, None):
        body.warm_up()
        body.measure_before()
        body.begin()


def _heed_fixtures(item: pytest.Item) -> None:
    """Take in the markers that fixtures have added."""
    run = item.config.stash[RUN]
    if _marks(item) == item.stash.get(_MARKS, []):
        return
    asked = _asked(item, run)
    body = item.stash.get(_BODY, None)
    try:
        if body is None:
            _keep(item, Body(item, run))
        elif body.asked.device != asked.device:
            raise MarkerError(f"{BUDGET}, device: a fixture sets it, after torchmem was set up")
        else:
            body.asked = asked
    except DeviceError as error:
        refuse(item, run, error)
    except MarkerError as error:
        raise pytest.fail.Exception(f"{plain_nodeid(item)}: {error}", pytrace=False) from None


def ended_by(item: pytest.Item, error: BaseException) -> bool:
    """Take note of the exception that ended a body; return whether it is none of the body's own."""
    body = item.stash.get(_BODY, None)
    if body and body.state is State.COUNTING and isinstance(error, WarmupOver):
        return True
    if body:
        body.abandon(error)
    return False


def end(item: pytest.Item) -> None:
    """Judge what was measured, right after the body. Raises pytest's failure."""
    if _marks(item) != item.stash.get(_MARKS, []):
        error = MarkerError(
            "a memory marker was added while the body ran, which is too late to measure it: write "
            "it above the test, or add it in a fixture"
        )
        if body := item.stash.get(_BODY, None):
            body.abandon(error)
        raise pytest.fail.Exception(str(error), pytrace=False)
    if body := item.stash.get(_BODY, None):
        body.finish()


def report_on(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send what was measured along with a report of the test."""
    if item.stash.get(BAD_ARGUMENT, False) and hasattr(report, "wasxfail"):
        # A marker nobody can read is not the failure that was expected.
        del report.wasxfail
        report.outcome = "failed"
    attach(item, report)
    if report.when == "teardown":
        forget(item)


def body_of(item: pytest.Item) -> Body:
    """Return the measured body of a test; when the body itself asks first, it starts here."""
    body = item.stash.get(_BODY, None)
    if body is None:
        run = item.config.stash[RUN]
        try:
            body = Body(item, run)
        except DeviceError as error:
            refuse(item, run, error)
            raise
        _keep(item, body)
        if item.stash.get(IN_CALL, False):
            body.start()
    body.needs_recording()
    return body
