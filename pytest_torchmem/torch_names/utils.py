"""The names of ``torch.profiler._utils``: walks over trees, and `BasicEvaluation`.

    from pytest_torchmem.torch_names.utils import BasicEvaluation

    BasicEvaluation(finished.profiler).get_optimizable_events(3)

The figures are those of `analysis.events.metrics`; events stay the objects that the profile has.
Where idle intervals overlap none is lost, as some are in torch.
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
from pytest_torchmem.analysis.events.metrics import find_metrics
from pytest_torchmem.analysis.events.metrics import rank_events as _ranked
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.record.profiled.from_profiler import kind_by_name
from pytest_torchmem.values.trace import (
    DEVICE_EVENT,
    EVENT,
    DeviceEventKind,
    EventKind,
    Scope,
    Trace,
)

__all__ = [
    "BasicEvaluation",
    "EventKey",
    "EventMetrics",
    "Interval",
    "argmax",
    "index_of_first_match",
    "source_code_location",
    "traverse_bfs",
    "traverse_dfs",
]

T = TypeVar("T")
Children = Callable[[Any], Sequence[Any]]

_children: Final = attrgetter("children")
_LONGEST_NS: Final = np.iinfo(np.int64).max


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
class EventNumbers:
    """The time of one event, in nanoseconds, and the kernels that waited as it began."""

    duration_time_ns: int = 0
    self_time_ns: int = 0
    idle_time_ns: int = 0
    queue_depth: int = 0

    @property
    def fraction_idle_time(self) -> float:
        """The idle part, between 0 and 1."""
        return self.idle_time_ns / self.duration_time_ns if self.duration_time_ns else 0.0


@dataclass
class Interval:
    """A time from ``start`` to ``end``, in nanoseconds."""

    start: int
    end: int
    queue_depth: int = 0


class EventKey:
    """An event of a profile; two are equal if their events have the same ``id``."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def __hash__(self) -> int:
        return hash(self.event.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventKey) and bool(self.event.id == other.event.id)

    def __repr__(self) -> str:
        return str(self.event.name)

    def intervals_overlap(self, intervals: Iterable[Interval]) -> int:
        """Return for how long the event ran within intervals; where they overlap, once."""
        union = Intervals.union([(interval.start, interval.end) for interval in intervals])
        starts, ends = np.array([self.event.start_time_ns]), np.array([self.event.end_time_ns])
        return int(union.shared_ns(starts, ends)[0])


class BasicEvaluation:
    """The time of each event of a finished profile, and those that hold a GPU up.

    Attributes:
        metrics: The numbers of each event.
        event_keys: Every event, by start.
        events: The same, as the profile has them.
        cuda_events: Launches and kernels, by start.
        queue_depth_list: The depth of the queue at each of those.
    """

    def __init__(self, prof: Any) -> None:
        self.profile = prof
        events = list(traverse_dfs(prof.kineto_results.experimental_event_tree()))
        device_events = [
            (event, kind)
            for event in prof.kineto_results.events()
            if (kind := _kind_of(event)) in _IN_QUEUE
        ]
        self._tree = build_op_tree(_trace_of(events, device_events))
        self._columns = columns = find_metrics(self._tree)
        numbers = (
            columns.duration_ns,
            columns.self_time_ns,
            columns.idle_ns,
            columns.queue_depth,
        )
        rows = zip(*(column.tolist() for column in numbers), strict=True)
        self._keys = [EventKey(event) for event in events]
        self.metrics = {key: EventNumbers(*row) for key, row in zip(self._keys, rows, strict=True)}
        self.event_keys = sorted(self.metrics, key=lambda key: int(key.event.start_time_ns))
        self.events = [key.event for key in self.event_keys]
        # As in the queue: of what starts at the same time launches come first.
        found = sorted(device_events, key=lambda one: (one[0].start_ns(), _IN_QUEUE.index(one[1])))
        self.cuda_events = [event for event, _ in found]
        self.queue_depth_list = self.compute_queue_depth()

    def compute_queue_depth(self) -> list[Interval]:
        """Return for each launch and kernel when it ran, and how many kernels waited then."""
        depths = self._columns.queue.entry_depth.tolist()
        return [
            Interval(event.start_ns(), event.start_ns() + event.duration_ns(), depth)
            for event, depth in zip(self.cuda_events, depths, strict=True)
        ]

    def rank_events(self, length: int) -> list[EventKey]:
        """Return the events that run while a full queue runs dry, the worst first."""
        rows = _ranked(self._tree, self._columns)[:length]
        return [self._keys[row] for row in rows.tolist()]

    def get_optimizable_events(self, length: int = 1, print_enable: bool = True) -> list[EventKey]:
        """Return `rank_events`, and print where in the program they are."""
        found = self.rank_events(length)
        if print_enable:
            line = "-" * 80
            print("Optimizable events:" if found else "No events to optimize")
            for key in found:
                idle = self.metrics[key].fraction_idle_time
                print(f"{line}\nEvent:                {key}")
                print(f"Source code location: {source_code_location(key.event)}")
                print(f"Percentage idle time: {idle:.2%}\n{line}")
        return found


def _kind_of(event: Any) -> DeviceEventKind | None:
    name = event.name() if callable(event.name) else event.name
    return kind_by_name(str(name), event.device_type() == torch.profiler.DeviceType.CUDA)


def _trace_of(events: Sequence[Any], device_events: Sequence[tuple[Any, Any]]) -> Trace:
    """Return the times of events in a trace; each comes before those in it."""
    numbers = {event.id: row for row, event in enumerate(events)}
    table = np.zeros(len(events), EVENT)
    table["kind"], table["scope"] = list(EventKind).index(EventKind.TORCH_OP), Scope.FUNCTION
    table["file"] = table["sequence"] = -1
    rows = range(len(events))
    table["parent"] = [-1 if e.parent is None else numbers[e.parent.id] for e in events]
    table["start_ns"] = [event.start_time_ns for event in events]
    # An event that has not ended has the largest number of C++.
    table["end_ns"] = [min(event.end_time_ns, _LONGEST_NS) for event in events]
    ends = [row + 1 for row in rows]
    for row in reversed(rows):
        if (parent := int(table["parent"][row])) >= 0:
            ends[parent] = max(ends[parent], ends[row])
    table["end"] = ends
    found = [
        (kind, e.linked_correlation_id(), e.start_ns(), e.start_ns() + e.duration_ns(), 0, -1, -1)
        for e, kind in device_events
    ]
    return Trace(events=table, device_events=np.array(found, DEVICE_EVENT), strings=("",))


def index_of_first_match(
    seq: Sequence[T], predicate: Callable[[T], bool], start: int = 0, end: int | None = None
) -> int | None:
    """Return the first place from ``start`` to before ``end`` that fits; None without any."""
    places = range(len(seq))[start:end]
    return next((place for place in places if predicate(seq[place])), None)


def argmax(
    seq: Sequence[T], key: Callable[[T], Any] = lambda x: x, start: int = 0, end: int | None = None
) -> int | None:
    """Return the first place of the largest value from ``start`` to before ``end``."""
    return max(range(len(seq))[start:end], key=lambda place: key(seq[place]), default=None)


def source_code_location(event: Any) -> str:
    """Return the nearest Python function at or around an event of a profile."""
    while event is not None:
        if ".py(" in event.name and ")" in event.name:
            return str(event.name)
        event = event.parent
    return "No source code location found"


EventMetrics = EventNumbers
_IN_QUEUE: Final = (DeviceEventKind.LAUNCH, DeviceEventKind.KERNEL)
