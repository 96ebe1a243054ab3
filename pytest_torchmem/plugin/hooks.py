"""The entry point: what pytest calls, and where it is done.

A run in which nothing asks for a measurement pays for this module and what it imports, and for a
look at each test's markers. The rest is imported when the first test or option asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.plugin import hookspecs
from pytest_torchmem.plugin.options.option_table import (
    MARKERS,
    add_options,
    anything_set,
    asks,
    is_overridden,
    refuse_misplaced,
    simulation_asked,
)
from pytest_torchmem.plugin.run.workers import Selection, controls_workers, is_worker
from pytest_torchmem.plugin.stash import IN_CALL, RUN, SELECTION
from pytest_torchmem.simulate import GPU_VARIABLE

if TYPE_CHECKING:
    from pytest_torchmem.plugin.item.fixture import Torchmem


_COLLECTOR: Final = "torchmem-collector"


def is_active(config: pytest.Config) -> bool:
    """Return whether anything asked for a measurement in this run."""
    return RUN in config.stash


def _is_whole(config: pytest.Config) -> bool:
    """Return what `is_active` does. Our modules are then where a test may have taken them away."""
    if is_active(config):
        config.stash[RUN].own_modules.put_back()
    return is_active(config)


def activate(config: pytest.Config) -> None:
    """Read the settings, and begin to gather what tests measure; once in a run.

    Raises `pytest.UsageError` for an option without meaning.
    """
    if is_active(config):
        return
    from pytest_torchmem.plugin.options.settings import Run, read_settings
    from pytest_torchmem.plugin.run.controller import Collector
    from pytest_torchmem.plugin.run.updates import require_named

    run = config.stash[RUN] = Run(config, read_settings(config))
    if not is_worker(config):
        require_named(config, run)
        collector = Collector(config, run, config.stash[SELECTION])
        config.pluginmanager.register(collector, _COLLECTOR)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before output is captured, and before a conftest
def pytest_load_initial_conftests(early_config: pytest.Config) -> Generator[None, object, object]:
    typed = early_config.known_args_namespace
    if simulation_asked(early_config)[0]:
        from pytest_torchmem.plugin.run.simulated import start_again

        start_again(early_config)
    elif is_overridden(early_config, "world"):  # what an ini file asks for may wait
        raise pytest.UsageError(
            "-o torchmem_world needs a simulated GPU; add --torchmem-simulate=H100 [bad-argument]"
        )
    asks_to_store = typed.torchmem_ask and typed.torchmem_update_baseline
    is_worker_of_xdist = "PYTEST_XDIST_WORKER" in os.environ  # its controller asks
    if asks_to_store and not typed.torchmem_dry_run and not is_worker_of_xdist:
        from pytest_torchmem.plugin.run.asking import require_terminal

        require_terminal()
    return (yield)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    assert isinstance(config, pytest.Config)
    add_options(parser, config)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    refuse_misplaced(config)
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    selection = config.stash[SELECTION] = Selection(config)
    config.pluginmanager.register(selection, "torchmem-selection")
    if os.environ.get(GPU_VARIABLE):
        from pytest_torchmem.plugin.run.simulated import InexactReads

        config.pluginmanager.register(InexactReads(), "torchmem-inexact-reads")
    if anything_set(config) or controls_workers(config):
        activate(config)


@pytest.hookimpl(trylast=True)  # after everybody who adds markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(map(asks, items)):
        activate(config)
    # A bad argument fails its test when that runs. Where no test will run, it is said at the end.
    collector = config.pluginmanager.get_plugin(_COLLECTOR)
    if config.option.collectonly and collector:
        from pytest_torchmem.plugin.options.marker import argument_problem

        for item in items:
            if problem := argument_problem(item):
                collector.add_problem(problem)


@pytest.hookimpl  # after the marks that skip, and before fixtures, which may need the device
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_whole(item.config):
        from pytest_torchmem.plugin.item.body import prepare

        prepare(item)


@pytest.hookimpl(wrapper=True, trylast=True)  # as close to the body as can be
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[IN_CALL] = True
    try:
        if _asked_of(item):
            from pytest_torchmem.plugin.item.body import begin

            begin(item)
        outcome = yield
    except BaseException as error:
        if _is_whole(item.config):
            from pytest_torchmem.plugin.item.body import end

            end(item, error)
        raise
    finally:
        item.stash[IN_CALL] = False
    # The body itself may have been the first to ask.
    if _asked_of(item):
        from pytest_torchmem.plugin.item.body import end

        end(item)
    return outcome


def _asked_of(item: pytest.Item) -> bool:
    """Return whether anything was asked of this run; a fixture may just have added a marker."""
    if not is_active(item.config) and asks(item):
        activate(item.config)
    return _is_whole(item.config)


def pytest_assertrepr_compare(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    if not is_active(config):
        return None
    from pytest_torchmem.plugin.item.comparisons import explain_comparison

    return explain_comparison(config, op, left, right)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the hook that handles xfail
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _is_whole(item.config):
        from pytest_torchmem.plugin.item.sending import report_on

        report_on(item, report)
        if report.when == "teardown":
            from pytest_torchmem.plugin.item.body import forget

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
    activate(request.config)
    from pytest_torchmem.plugin.item.body import body_of
    from pytest_torchmem.plugin.item.fixture import Torchmem

    return Torchmem(body_of(request.node))
