"""An estimated result, and what a GPU would make of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np

from pytest_torchmem.analysis.caching_allocator import Requests
from pytest_torchmem.analysis.estimated.schedule import NodeBytes, bytes_by_node
from pytest_torchmem.analysis.estimated.static import (
    allocation_events,
    build_estimated_timeline,
    by_origin,
    estimate_result,
    static_contributors,
    storages_here,
)
from pytest_torchmem.analysis.estimated.static_facts import decide_categories, settle_categories
from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.analysis.sampling import StorageLives, sketch_timeline, with_holders
from pytest_torchmem.analysis.storages.explanation import (
    Explanation,
    in_order,
    named_category,
    row_at,
)
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.json_values import OTHERWISE
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

    run: StaticRun = field(kw_only=True, repr=False, compare=False, metadata=OTHERWISE)

    @classmethod
    def of(cls, run: StaticRun, name: str = "") -> Estimate:
        result = estimate_result(run, name)
        values = {f.name: getattr(result, f.name) for f in fields(result)}
        return cls(**values, run=run)

    def picture(self) -> Picture:
        """The timeline, sampled, with the origins that held most."""
        run = settle_categories(self.run)
        lives = StorageLives(
            begins=run.lifetimes.first,
            ends=run.lifetimes.end,
            sizes=np.array([s.size_bytes for s in run.graph.storages], np.int64),
            groups=tuple(by_origin(run, storages_here(run))),
        )
        calls = Counter(node.operator for node in run.graph.operators)
        picture = sketch_timeline(build_estimated_timeline(run))
        return with_holders(picture, lives, calls, (), lambda place: ())

    def explain(
        self, category: Category | str | None = None, module: str = "", at: int | str | None = None
    ) -> tuple[Explanation, ...]:
        """Say of each storage why it has its category, as `MemoryProfile.explain` does.

        Moments are numbers of operators, and nothing is measured.
        """
        wanted, run = named_category(category), self.run
        decisions, settled = decide_categories(run), settle_categories(run)
        row = None
        if at is not None:
            timeline = build_estimated_timeline(run)
            row = row_at(timeline.times_ns, timeline.peak_row, at)
        first, end = run.lifetimes.first, run.lifetimes.end
        explanations = (
            Explanation(
                storage,
                int(first[storage] + 1) // 2 if first[storage] else None,
                int(end[storage]) // 2 if end[storage] < run.graph.row_count else None,
                static_contributors(settled, np.array([storage]))[0],
                *decisions.ground(storage),
            )
            for storage in storages_here(run, row).tolist()
        )
        return in_order(explanations, wanted, module)

    def nodes(self) -> tuple[NodeBytes, ...]:
        """The bytes on the estimate's device during and after each operator, in order."""
        return bytes_by_node(self.run)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free on the estimate's device, in order."""
        return requests_of_run(self.run)


def requests_of_run(run: StaticRun) -> Requests:
    """Return the requests of an estimate: what was there before comes first."""
    events = allocation_events(run)
    events = events[events[:, 1] != 0]
    return Requests.from_columns(events[:, 1] > 0, np.abs(events[:, 1]), events[:, 0])
