"""The hooks of ours that a conftest.py or another plugin can implement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_torchmem.analysis.storages.explanation import OwnPass
    from pytest_torchmem.values.results import Result


@pytest.hookspec
def pytest_torchmem_measured(
    config: pytest.Config, nodeid: str, results: Sequence[Result], failure: str
) -> None:
    """Called for each measured test when the run is over.

    Under xdist only the controller calls it. A test that was run again is reported once, as it
    ended.

    Args:
        config: pytest's configuration.
        nodeid: The test, as in pytest's reports.
        results: What was measured: the body, whose name is empty, then its regions.
        failure: The first line of the failure over memory; empty where there was none.
    """


@pytest.hookspec
def pytest_torchmem_category_passes(config: pytest.Config) -> Sequence[OwnPass]:  # type: ignore[empty-body]
    """Called once in each process that measures; returns category passes of your own.

    A pass is a function that gets an `Explanation` for each storage of a recording, as ours decided
    on it, and yields a `StorageClaim` for each that it knows better. It overrides ours; of two
    passes that claim one storage, the first one counts. A pass that raises claims nothing, and the
    end of the run names it.

    Args:
        config: pytest's configuration.
    """


@pytest.hookspec
def pytest_torchmem_report_written(config: pytest.Config, path: Path) -> None:
    """Called for each report of ``--torchmem-report``, when it is complete.

    Args:
        config: pytest's configuration.
        path: The file to open: the report, or the ``index.html`` of a folder.
    """
