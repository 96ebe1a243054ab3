"""An estimated result, and what a GPU would make of it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np

from pytest_torchmem.analysis.caching_allocator import (
    Requests,
)
from pytest_torchmem.analysis.estimated.static import (
    allocation_events,
    estimate_result,
)
from pytest_torchmem.analysis.estimated.static_categories import settle_categories
from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.static_graph import StaticRun


@dataclass(frozen=True, slots=True)
class Estimate(Result, GpuQuestions):
    """An estimated result that can also be asked what a GPU would make of it.

    Attributes:
        run: What the estimate was made from. It does not go through JSON, and two estimates are
            equal without it.
    """

    run: StaticRun = field(kw_only=True, repr=False, compare=False)

    @classmethod
    def of(cls, run: StaticRun, name: str = "") -> Estimate:
        result = estimate_result(run, name)
        values = {f.name: getattr(result, f.name) for f in fields(result)}
        return cls(**values, run=settle_categories(run))

    def picture(self) -> Picture:
        """The timeline, sampled."""
        from pytest_torchmem.analysis.estimated.picture import sketch_estimate

        return sketch_estimate(self.run)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free on the estimate's device, in order."""
        return requests_of_run(self.run)


def requests_of_run(run: StaticRun) -> Requests:
    """Return the requests of an estimate: what was there before comes first."""
    events = allocation_events(run)
    events = events[events[:, 1] != 0]
    return Requests.from_columns(events[:, 1] > 0, np.abs(events[:, 1]), events[:, 0])
