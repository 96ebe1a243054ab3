"""The entry point: what pytest calls, and where it is done."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_torchmem.plugin.body import RUN, Run
from pytest_torchmem.plugin.call import (
    BAD_ARGUMENT,
    argument_problem,
    body_of,
    forget,
    measured_call,
    prepare,
)
from pytest_torchmem.plugin.fixture import Torchmem
from pytest_torchmem.plugin.marker import REGISTRATION
from pytest_torchmem.plugin.options import add_options, read_settings
from pytest_torchmem.plugin.session import Collector
from pytest_torchmem.plugin.workers import Selection, attach, is_worker

_COLLECTOR = pytest.StashKey[Collector]()


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    for line in REGISTRATION:
        config.addinivalue_line("markers", line)
    run = config.stash[RUN] = Run(config, read_settings(config))
    selection = Selection(config)
    config.pluginmanager.register(selection, "torchmem-selection")
    if not is_worker(config):
        collector = config.stash[_COLLECTOR] = Collector(config, run, selection)
        config.pluginmanager.register(collector, "torchmem-collector")


@pytest.hookimpl(trylast=True)  # after everybody who adds markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A bad argument fails its test when that runs. Where no test will run, it is said at the end.
    if not config.option.collectonly or _COLLECTOR not in config.stash:
        return
    for item in items:
        if problem := argument_problem(item):
            config.stash[_COLLECTOR].add_problem(problem)


@pytest.hookimpl(tryfirst=True)  # before fixtures, which may need the device
def pytest_runtest_setup(item: pytest.Item) -> None:
    prepare(item)


@pytest.hookimpl(wrapper=True, trylast=True)  # as close to the body as can be
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    return (yield from measured_call(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the hook that handles xfail
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.stash.get(BAD_ARGUMENT, False) and hasattr(report, "wasxfail"):
        # A marker nobody can read is not the failure that was expected.
        del report.wasxfail
        report.outcome = "failed"
    attach(item, report)
    if report.when == "teardown":
        forget(item)
    return report


@pytest.fixture
def torchmem(request: pytest.FixtureRequest) -> Torchmem:
    """Measures the memory of the test body, of named regions of it, and its growth per step.

    torchmem.device is where to put tensors. ``with torchmem.measure("forward") as forward:`` gives
    forward.peak and forward.retained in bytes, torchmem.check(forward) compares the region with
    its own baseline, and ``for _ in torchmem.steps(4, warmup=1):`` marks the steps that growth is
    counted over.
    """
    return Torchmem(body_of(request.node))
