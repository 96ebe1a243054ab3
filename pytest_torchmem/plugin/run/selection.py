"""Find out whether every test of a module runs, and in which kind of process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pytest

_PARTIAL: Final = "torchmem_partial"


def is_worker(config: pytest.Config) -> bool:
    """True in a process that runs tests for an xdist controller."""
    return hasattr(config, "workerinput")


def controls_workers(config: pytest.Config) -> bool:
    """True in the process of an xdist run that runs no tests itself."""
    return getattr(config.option, "dist", "no") != "no" and not is_worker(config)


class Selection:
    """Notices when not every test of a module is run: in a worker, for its controller as well."""

    def __init__(self, config: pytest.Config) -> None:
        self.partial = False
        self._output: dict[str, object] = getattr(config, "workeroutput", {})
        self._output[_PARTIAL] = False
        self._collected_count = 0

    def _note(self) -> None:
        self.partial = self._output[_PARTIAL] = True

    @pytest.hookimpl
    def pytest_itemcollected(self) -> None:
        self._collected_count += 1

    @pytest.hookimpl
    def pytest_deselected(self) -> None:
        self._note()

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed and "::" in report.nodeid:  # a class of a module that is there
            self._note()

    @pytest.hookimpl
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        # A conftest.py may take tests out of the list without saying so.
        if self._collected_count > len(session.items):
            self._note()


def ran_partially(node: object) -> bool:
    """True for a worker that deselected tests, and for one that died before it could say."""
    output: Mapping[str, object] = getattr(node, "workeroutput", {})
    return bool(output.get(_PARTIAL, True))
