"""The plugin behind the entry point, loaded when the first test or option asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.plugin.run.selection import Selection, is_worker

if TYPE_CHECKING:
    from pytest_torchmem.plugin.item.body import Run
    from pytest_torchmem.plugin.run.controller import Collector

RUN: Final[pytest.StashKey[Run]] = pytest.StashKey()
COLLECTOR: Final[pytest.StashKey[Collector]] = pytest.StashKey()
SELECTION: Final = pytest.StashKey[Selection]()
IN_CALL: Final = pytest.StashKey[bool]()


def is_active(config: pytest.Config) -> bool:
    return RUN in config.stash


def activate(config: pytest.Config) -> None:
    """Read the settings, and begin to gather what tests measure; once in a run.

    Raises `pytest.UsageError` for an option without meaning.
    """
    if is_active(config):
        return
    from pytest_torchmem.plugin.item.body import Run
    from pytest_torchmem.plugin.options.settings import read_settings
    from pytest_torchmem.plugin.run.controller import Collector

    run = config.stash[RUN] = Run(config, read_settings(config))
    if not is_worker(config):
        collector = config.stash[COLLECTOR] = Collector(config, run, config.stash[SELECTION])
        config.pluginmanager.register(collector, "torchmem-collector")
