"""The names of ``torch.profiler._utils``: walks over trees, and `BasicEvaluation`.

    from pytest_torchmem.torch_names.utils import BasicEvaluation

    BasicEvaluation(finished.profiler).get_optimizable_events(3)

The figures are those of `measuring.events`. Where idle intervals overlap none is lost, as some are
in torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, TypeVar

import numpy as np
import torch

from pytest_torchmem.analysis.events.device_queue import Intervals
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.record.profiled.from_profiler import kind_by_name
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values import trace

T = TypeVar("T")
Children = Callable[[Any], Sequence[Any]]

_children: Final = attrgetter("children")
_IN_QUEUE: Final = (trace.DeviceEventKind.LAUNCH, trace.DeviceEventKind.KERNEL)


def traverse_dfs(tree: Iterable[Any], children_fn: Children = _children) -> Iterator[Any]:
    """Yield each event of a tree before those in it. Any objects with ``children`` make a tree."""
    waiting = list(tree)[::-1]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += reversed(children_fn(event))


def traverse_bfs(tree: Iterable[Any], children_fn: Children = _children) -> Iterator[Any]:
    """Yield the events of a tree level by level."""
    waiting = deque(tree)
    while waiting:
        event = waiting.popleft()
        yield event
        waiting += children_fn(event)


@dataclass
class EventMetrics:
    """The time of one event, in nanoseconds, and the kernels that waited as it began."""

    duration_time_ns: int = 0
    self_time_ns: int = 0
    idle_time_ns: int = 0
    queue_depth: int = 0

    @property
    def fraction_idle_time(self) -> float:
        return self.idle_time_ns / self.duration_time_ns if self.duration_time_ns else 0.0


@dataclass
class Interval:
    """A time from ``start`` to ``end``, in nanoseconds."""

    start: int
    end: int
    queue_depth: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class EventKey:
    """An event of a profile; two are equal if their events have the same ``id``."""

    event: Any

    def __hash__(self) -> int:
        return hash(self.event.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventKey) and bool(self.event.id == other.event.id)

    def __repr__(self) -> str:
        return profiler.name_of(self.event)

    def intervals_overlap(self, intervals: Iterable[Interval]) -> int:
        """Return for how long the event ran within intervals; where they overlap, once."""
        union = Intervals.union([(interval.start, interval.end) for interval in intervals])
        starts, ends = np.array([self.event.start_time_ns]), np.array([self.event.end_time_ns])
        return int(union.shared_ns(starts, ends)[0])


class BasicEvaluation:
    """The time of each event of a finished profile, and those that hold a GPU up.

    ``cuda_events`` are launches and kernels, ``queue_depth_list`` how many waited at each.
    """

    def __init__(self, prof: Any) -> None:
        self.profile = prof
        events = list(traverse_dfs(prof.kineto_results.experimental_event_tree()))
        kinds = [(event, _kind_of(event)) for event in prof.kineto_results.events()]
        # As in the queue: of what starts at the same time launches come first.
        queued = [one for kind in _IN_QUEUE for one in kinds if one[1] is kind]
        queued.sort(key=lambda one: int(one[0].start_ns()))
        self._answers = Events(build_op_tree(_trace_of(events, queued)))
        self._keys = [EventKey(event) for event in events]
        self.metrics = {
            key: EventMetrics(row.duration_ns, row.self_time_ns, row.idle_ns, row.queue_depth)
            for key, row in zip(self._keys, self._answers.depth_first(), strict=True)
        }
        self.event_keys = sorted(self.metrics, key=lambda key: int(key.event.start_time_ns))
        self.events = [key.event for key in self.event_keys]
        self.cuda_events = [event for event, _ in queued]
        self.queue_depth_list = self.compute_queue_depth()

    def compute_queue_depth(self) -> list[Interval]:
        """Return for each launch and kernel when it ran, and how many kernels waited then."""
        depths = self._answers.metrics.queue.entry_depth.tolist()
        return [
            Interval(event.start_ns(), event.start_ns() + event.duration_ns(), depth)
            for event, depth in zip(self.cuda_events, depths, strict=True)
        ]

    def rank_events(self, length: int) -> list[EventKey]:
        """Return the events that run while a full queue runs dry, the worst first."""
        return [self._keys[event.row] for event in self._answers.ranked(length)]

    def get_optimizable_events(self, length: int = 1, print_enable: bool = True) -> list[EventKey]:
        """Return `rank_events`, and print where in the program they are."""
        if print_enable:
            print(self._answers.optimizable(length))
        return self.rank_events(length)


def _kind_of(event: Any) -> trace.DeviceEventKind | None:
    name = event.name() if callable(event.name) else event.name
    return kind_by_name(str(name), event.device_type() == torch.profiler.DeviceType.CUDA)


def _trace_of(events: Sequence[Any], queued: Sequence[tuple[Any, object]]) -> trace.Trace:
    """Return names and times of events in a trace; each comes before those in it."""
    strings = StringTable()
    rows = {event.id: row for row, event in enumerate(events)}
    table = np.zeros(len(events), trace.EVENT)
    table["kind"], table["scope"] = trace.EventKind.TORCH_OP, trace.Scope.FUNCTION
    table["file"] = table["sequence"] = -1
    table["name"] = [strings.number(profiler.name_of(event)) for event in events]
    table["parent"] = [-1 if e.parent is None else rows[e.parent.id] for e in events]
    table["start_ns"] = [event.start_time_ns for event in events]
    # An event that has not ended has the largest number of C++.
    table["end_ns"] = [min(event.end_time_ns, np.iinfo(np.int64).max) for event in events]
    sizes = [1] * (len(events) + 1)  # the last one is of no event: what roots are in
    for row, parent in reversed(list(enumerate(table["parent"].tolist()))):
        sizes[parent] += sizes[row]
    table["end"] = np.arange(len(events)) + sizes[:-1]
    found = [
        (kind, e.linked_correlation_id(), e.start_ns(), e.start_ns() + e.duration_ns(), 0, -1, -1)
        for e, kind in queued
    ]
    device_events = np.array(found, trace.DEVICE_EVENT)
    return trace.Trace(events=table, device_events=device_events, strings=strings.values())


def index_of_first_match(
    seq: Sequence[T], predicate: Callable[[T], bool], start: int = 0, end: int | None = None
) -> int | None:
    """Return the first place from ``start`` to before ``end`` that fits; None without any."""
    return next((n for n in range(len(seq))[start:end] if predicate(seq[n])), None)


def argmax(
    seq: Sequence[T], key: Callable[[T], Any] = lambda x: x, start: int = 0, end: int | None = None
) -> int | None:
    """Return the first place of the largest value from ``start`` to before ``end``."""
    return max(range(len(seq))[start:end], key=lambda place: key(seq[place]), default=None)


def source_code_location(event: Any) -> str:
    """Return the nearest Python function at or around an event of a profile."""
    while event is not None:
        name = profiler.name_of(event)
        if ".py(" in name and ")" in name:
            return name
        event = event.parent
    return "No source code location found"
