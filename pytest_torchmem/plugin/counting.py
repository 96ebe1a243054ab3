"""Levels: where a limit on a GPU can be answered by the allocator's counters, nothing is recorded.

The counters hold what others left behind, too, so they prove that a body stays within a limit and
not that it does not. Where they prove nothing the body runs again and is recorded: then the number
is exact, and a failure can say what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.analysis.results import Result
from pytest_torchmem.analysis.verdict import COUNTERS, Finding, judge_limits
from pytest_torchmem.plugin.marker import Asked, can_rerun
from pytest_torchmem.plugin.options import LevelChoice, Settings

if TYPE_CHECKING:
    from pytest_torchmem.measurement import CounterMeasurement

_KEYS: Final = frozenset(("total", *COUNTERS))


def counters_may_do(item: pytest.Item, asked: Asked, settings: Settings, device: str) -> bool:
    """Return whether counters can answer all that is asked of a test."""
    return (
        settings.level is LevelChoice.AUTO
        and device != "cpu"
        and bool(asked.limits)
        and _KEYS.issuperset(asked.limits)
        and not asked.baseline
        and not settings.reports
        and "torchmem" not in getattr(item, "fixturenames", ())
        and can_rerun(item)
    )


class CountedRun:
    """The run of a body that is only counted.

    Attributes:
        enough: False where the body turned out to ask for more than the counters know.
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
        told = "; so said the counters of a first run, and the recorded second run stayed below"
        found = judge_limits(self._counters.least, limits)
        return tuple(replace(finding, sentence=finding.sentence + told) for finding in found)
