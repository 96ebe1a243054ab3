"""From a pytest item to its measured body: markers checked, device found, the call wrapped."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

import pytest

from pytest_torchmem.errors import DeviceError, MarkerError
from pytest_torchmem.plugin.body import RUN, Body, Run
from pytest_torchmem.plugin.marker import read_markers
from pytest_torchmem.plugin.pictures import set_properties
from pytest_torchmem.plugin.state import State, WarmupOver
from pytest_torchmem.plugin.workers import PAYLOAD, plain_nodeid
from pytest_torchmem.report.summary import MeasuredTest

BAD_ARGUMENT: Final = pytest.StashKey[bool]()
_BODY: Final = pytest.StashKey[Body]()
_IN_CALL: Final = pytest.StashKey[bool]()


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
    if problem := argument_problem(item):
        item.stash[BAD_ARGUMENT] = True
        raise pytest.fail.Exception(problem, pytrace=False)
    asked = read_markers(item, run.settings.allowance)
    try:
        if asked.anything or "torchmem" in getattr(item, "fixturenames", ()):
            item.stash[_BODY] = Body(item, run)
    except DeviceError as error:
        refuse(item, run, error)


def forget(item: pytest.Item) -> None:
    """Drop what a run of a test left in its item, which lives on and may be run again."""
    if _BODY in item.stash:
        del item.stash[_BODY]
    if PAYLOAD in item.stash:
        del item.stash[PAYLOAD]


def refuse(item: pytest.Item, run: Run, error: DeviceError) -> None:
    """Skip a test whose device is missing, or fail it where the run is strict."""
    record = MeasuredTest(plain_nodeid(item), str(item.path), {}, not_measured=str(error))
    item.stash[PAYLOAD] = record.to_json()
    if run.settings.strict:
        raise pytest.fail.Exception(f"not measured: {error}", pytrace=False) from None
    raise pytest.skip.Exception(f"not measured: {error}") from None


def measured_call(item: pytest.Item) -> Generator[None, object, object]:
    """Measure a test body around the inner ``pytest_runtest_call``."""
    item.stash[_IN_CALL] = True
    try:
        if body := item.stash.get(_BODY, None):
            body.warm_up()
            body.measure_before()
            body.begin()
        try:
            outcome = yield
        except BaseException as error:
            # A doctest gets its fixtures in the body, so look again.
            body = item.stash.get(_BODY, None)
            if not (body and body.state is State.COUNTING and isinstance(error, WarmupOver)):
                if body:
                    body.abandon(error)
                raise
            outcome = None
    finally:
        item.stash[_IN_CALL] = False
    if body := item.stash.get(_BODY, None):
        body.finish()
    return outcome


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
        item.stash[_BODY] = body
        if item.stash.get(_IN_CALL, False):
            body.start()
    body.needs_recording()
    return body
