"""Levels: what a GPU's allocator can answer by itself is not recorded.

Its counters prove a limit on the total or on their own figures, its history one on what is
retained. The counters hold what others left behind, too, so they prove that a body stays within a
limit and not that it does not. Where nothing is proved the body runs again and is recorded: then
the number is exact, and a failure can say what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.plugin.options.marker import Asked, can_rerun
from pytest_torchmem.plugin.options.settings import LevelChoice, Settings
from pytest_torchmem.values.findings import COUNTERS, Finding
from pytest_torchmem.values.results import Level, Result

if TYPE_CHECKING:
    from pytest_torchmem.measuring.counted import CounterMeasurement

_COUNTED: Final = frozenset(("total", *COUNTERS))
_IN_HISTORY: Final = _COUNTED | {"retained"}


def level_for(item: pytest.Item, asked: Asked, settings: Settings, device: str) -> Level:
    """Return the lowest level that may answer all that is asked of a test."""
    if (
        settings.level is LevelChoice.FULL
        or device == "cpu"
        or not asked.limits
        or asked.baseline
        or settings.reports
        or "torchmem" in getattr(item, "fixturenames", ())
        or not can_rerun(item)
    ):
        return Level.FULL
    if _COUNTED.issuperset(asked.limits):
        return Level.COUNTERS
    # Of accelerators other than CUDA's only the counters can be read.
    has_history = device.partition(":")[0] == "cuda"
    return Level.EVENTS if has_history and _IN_HISTORY.issuperset(asked.limits) else Level.FULL


class CountedRun:
    """The run of a body whose allocator is asked, and which is not recorded.

    Attributes:
        enough: False where the body turned out to ask for more than the allocator knows.
    """

    def __init__(self, counters: CounterMeasurement) -> None:
        self._counters = counters
        self.enough = True

    def start(self) -> None:
        self._counters.start()

    def within(self, limits: Mapping[str, int]) -> Result | None:
        """End the run; return what was counted, or None where that proves nothing."""
        result = self._counters.stop()
        return result if self.enough and not judge_limits(result, limits) else None

    def certain(self, limits: Mapping[str, int]) -> tuple[Finding, ...]:
        """Return what was over a limit in the counted run whatever else was in the counters."""
        told = "; so said the allocator in a first run, and the recorded second run stayed below"
        found = judge_limits(self._counters.least, limits)
        return tuple(replace(finding, numbers=finding.numbers + told) for finding in found)
