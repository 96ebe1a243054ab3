"""The events of a recording and the time they took: a front end beside the analysis of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from pytest_torchmem.analysis.events import metrics
from pytest_torchmem.analysis.events.averages import Average, find_averages
from pytest_torchmem.analysis.events.calls import CallList, list_calls
from pytest_torchmem.analysis.events.metrics import Event, EventMetrics, MemoryEvent
from pytest_torchmem.analysis.events.op_tree import OpTree, build_op_tree
from pytest_torchmem.report.text.event_tables import averages_table, optimizable_text
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.trace import Trace


def trace_in(profile: object, *, whole: bool = False) -> Trace:
    """Return a `Trace` as it is, or that of a finished profile; see `trace_of`."""
    if isinstance(profile, Trace):
        return profile
    from pytest_torchmem.record.profiled.from_profiler import trace_of  # reading needs no torch

    return trace_of(profile, whole)


@dataclass(frozen=True, eq=False)
class Events:
    """Operators, labels, Python calls and memory events, with the time that they took."""

    tree: OpTree

    @classmethod
    def of(cls, profile: object) -> Events:
        """Return the events of a finished ``torch.profiler.profile``, or of a trace."""
        return cls(build_op_tree(trace_in(profile, whole=True)))

    @cached_property
    def metrics(self) -> EventMetrics:
        """Duration, own time, idle time and queue depth of every event, as columns.

        Those of ``BasicEvaluation`` in ``torch/profiler/_utils.py`` up to torch 2.13.
        """
        return metrics.find_metrics(self.tree)

    def depth_first(self) -> Iterator[Event]:
        """Yield each event before those within it, as ``torch.profiler._utils.traverse_dfs``."""
        yield from self._all

    def breadth_first(self) -> Iterator[Event]:
        """Yield the events level by level, as ``torch.profiler._utils.traverse_bfs``."""
        yield from sorted(self._all, key=attrgetter("depth"))

    def ranked(self, length: int = 1) -> tuple[Event, ...]:
        """Return the events that hold a GPU up most: while they run, a full queue runs dry.

        ``BasicEvaluation.rank_events`` and ``get_optimizable_events``; `optimizable` has the text.
        """
        rows = metrics.rank_events(self.tree, self.metrics)[:length]
        return tuple(self._all[row] for row in rows.tolist())

    def optimizable(self, length: int = 1) -> str:
        """Return the text that ``BasicEvaluation.get_optimizable_events`` printed."""
        return optimizable_text(self.ranked(length))

    @cached_property
    def _all(self) -> list[Event]:
        return metrics.make_events(self.tree, self.metrics)

    @cached_property
    def calls(self) -> CallList:
        """The calls one by one, as columns: ``profile.events()``."""
        return list_calls(self.tree)

    def averages(
        self,
        *,
        by_inputs: bool = False,
        by_overload: bool = False,
        by_stack: int = 0,
        top_level: bool = False,
    ) -> tuple[Average, ...]:
        """Return the calls of one name together: ``key_averages()``, in nanoseconds and bytes.

        Args:
            by_inputs: Tell calls apart by the sizes of their inputs.
            by_overload: Tell them apart by the overload, where the profiler was asked for it.
            by_stack: Tell them apart by so many Python calls around them.
            top_level: Leave out what lies within other calls.
        """
        return find_averages(
            self.calls,
            by_inputs=by_inputs,
            by_overload=by_overload,
            by_stack=by_stack,
            top_level=top_level,
        )

    def table(
        self,
        sort_by: str = "self_time_ns",
        limit: int = 100,
        *,
        by_inputs: bool = False,
        by_overload: bool = False,
        by_stack: int = 0,
        top_level: bool = False,
    ) -> str:
        """Return `averages` as a table, the largest ``sort_by`` first: ``key_averages().table()``.

        ``sort_by`` is a number of `Average`. Raises `ValueError` for another name.
        """
        averages = self.averages(
            by_inputs=by_inputs, by_overload=by_overload, by_stack=by_stack, top_level=top_level
        )
        return averages_table(averages, sort_by, limit)

    @cached_property
    def memory(self) -> tuple[MemoryEvent, ...]:
        """Every allocation, free and failed allocation, with its operator and labels, in order."""
        return metrics.find_memory_events(self.tree)

    @cached_property
    def labels(self) -> tuple[Span, ...]:
        """The ``record_function`` labels and the steps of ``profile.step()``, in order."""
        return tuple(metrics.find_labels(self.tree))

    @property
    def own_cost_ns(self) -> int:
        """The time that starting, stopping and reading the recording took; 0 if not known.

        Of a ``torch.profiler.profile`` it is the time of preparing, starting and stopping it.
        """
        return int(self.tree.trace.meta.get("own_cost_ns", 0))
