"""Events one by one: their time, which of them hold a GPU up, and what they allocate.

Times are those of ``BasicEvaluation`` in ``torch/profiler/_utils.py``, which left torch in 2.14.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.calls import OUT_OF_MEMORY, PythonStacks, is_step
from pytest_torchmem.analysis.events.device_queue import DeviceQueue, find_device_queue
from pytest_torchmem.analysis.events.op_tree import (
    Annotations,
    OpTree,
    are_labels,
    self_times,
    start_ns,
)
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.trace import EventKind

_WEIGHT_OF_SELF_TIME: Final = 0.6
_PLACE: Final = re.compile(r"\.py\(.*\)")


@dataclass(frozen=True, slots=True, eq=False)
class EventMetrics:
    """The metrics of all events, as columns in the order of `Trace.events`.

    Attributes:
        duration_ns: int64, shape (E,); from start to end.
        self_time_ns: int64, shape (E,); the part that no child took. A kernel that the profiler
            puts below its operator counts as one, though it runs beside it: this may be negative.
        idle_ns: int64, shape (E,); the part during which the device was idle.
        queue_depth: int64, shape (E,); kernels that wait as the event starts.
        queue: The device's queue, from which the last two follow.
    """

    duration_ns: NDArray[np.int64]
    self_time_ns: NDArray[np.int64]
    idle_ns: NDArray[np.int64]
    queue_depth: NDArray[np.int64]
    queue: DeviceQueue

    @property
    def idle_fraction(self) -> NDArray[np.float64]:
        """The idle part of each event: float64, shape (E,), between 0 and 1."""
        return self.idle_ns / np.maximum(self.duration_ns, 1)


@dataclass(frozen=True, slots=True)
class Event:
    """One event with its metrics.

    Attributes:
        row: Its row in `Trace.events`.
        parent: The row of the event around it, or -1.
        depth: How many events are around it.
        name: The operator, label, or Python call; "" for an allocation, ``[OutOfMemory]`` for one
            that failed.
        kind: What it is.
        place: The nearest Python function at or around it, ``train.py(12): step``, or "".
        start_ns: When it began, on the recording's clock.
        duration_ns: How long it took.
        self_time_ns: The part that no child took.
        idle_ns: The part during which the device was idle.
        queue_depth: How many kernels waited as it began.
    """

    row: int
    parent: int
    depth: int
    name: str
    kind: EventKind
    place: str
    start_ns: int
    duration_ns: int
    self_time_ns: int
    idle_ns: int
    queue_depth: int

    @property
    def idle_fraction(self) -> float:
        """The idle part of the event, between 0 and 1."""
        return self.idle_ns / self.duration_ns if self.duration_ns else 0.0


def make_events(tree: OpTree, metrics: EventMetrics) -> list[Event]:
    """Return all events, each before those within it."""
    events, strings, kinds = tree.trace.events, tree.trace.strings, list(EventKind)
    failed = (events["kind"] == EventKind.OUT_OF_MEMORY).tolist()
    texts = PythonStacks(tree).texts.tolist()
    names = [OUT_OF_MEMORY if f else strings[text] for text, f in zip(texts, failed, strict=True)]
    parents = events["parent"].tolist()
    numbers = (
        events["start_ns"],
        metrics.duration_ns,
        metrics.self_time_ns,
        metrics.idle_ns,
        metrics.queue_depth,
    )
    columns = zip(
        range(len(events)),
        parents,
        tree.depth.tolist(),
        names,
        [kinds[kind] for kind in events["kind"].tolist()],
        _places(parents, names),
        *(column.tolist() for column in numbers),
        strict=True,
    )
    return [Event(*row) for row in columns]


def _places(parents: Sequence[int], names: Sequence[str]) -> list[str]:
    """The nearest Python function at or around each event: of the one around it, if it is none."""
    is_place = {name: _PLACE.search(name) is not None for name in set(names)}
    places: list[str] = []
    for parent, name in zip(parents, names, strict=True):
        places.append(name if is_place[name] else places[parent] if parent >= 0 else "")
    return places


def find_metrics(tree: OpTree) -> EventMetrics:
    """Return the metrics of every event of a tree."""
    events, queue = tree.trace.events, find_device_queue(tree)
    duration = events["end_ns"] - events["start_ns"]
    return EventMetrics(duration, self_times(tree), queue.idle_ns, queue.depth, queue)


def rank_events(tree: OpTree, metrics: EventMetrics) -> NDArray[np.int64]:
    """Return the rows of the events that run while a full queue runs dry, the worst first.

    An event is the worse the larger its idle part and its own time are: the first in standard
    deviations above the mean, and 0.6 times the second likewise. int64, shape (N,).
    """
    events = tree.trace.events
    falling = metrics.queue.falling()
    rows = np.flatnonzero(falling.shared_ns(events["start_ns"], events["end_ns"]))
    # Equal scores keep the order in which torch walks the tree: the last child first.
    sizes = events["end"] - np.arange(len(events))
    finished = np.arange(len(events)) + sizes - 1 - tree.depth
    rows = rows[np.argsort(-finished[rows], kind="stable")]
    if len(rows) < 2:
        return rows
    score = _standardized(metrics.idle_fraction[rows])
    score += _WEIGHT_OF_SELF_TIME * _standardized(metrics.self_time_ns[rows])
    return rows[np.argsort(-score, kind="stable")]


def _standardized(values: NDArray[np.number]) -> NDArray[np.float64]:
    # torch rounds to single precision first; equal scores stay equal.
    rounded = values.astype(np.float32).astype(np.float64)
    deviation = float(rounded.std(ddof=1))
    return (rounded - rounded.mean()) / deviation if deviation else np.zeros(len(rounded))


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """An allocation, a free, or an allocation that failed.

    Attributes:
        time_ns: When it was, since the start of the recording.
        size_bytes: What was allocated; negative for a free, 0 for an allocation that failed.
        device: ``cpu`` or ``cuda:0``; "" for an allocation that failed.
        operator: The innermost operator around it; "" where none ran on its thread, as for what
            Python frees: torch calls that a top-level memory event.
        labels: The ``record_function`` labels around it, outermost first.
        out_of_memory: Whether it failed.
    """

    time_ns: int
    size_bytes: int
    device: str
    operator: str = ""
    labels: tuple[str, ...] = ()
    out_of_memory: bool = False

    @property
    def top_level(self) -> bool:
        """Return whether no operator and no label was around it."""
        return not self.operator and not self.labels


def find_memory_events(tree: OpTree) -> tuple[MemoryEvent, ...]:
    """Return every allocation, free and failed allocation, in the order of time."""
    trace = tree.trace
    events, table = trace.events, trace.allocations
    failed = np.flatnonzero(events["kind"] == EventKind.OUT_OF_MEMORY)
    rows = np.concatenate([table["event"].astype(np.int64), failed])
    devices = [trace.devices[number] for number in table["device"].tolist()]
    is_op = (events["kind"] == EventKind.TORCH_OP) & ~are_labels(events)
    names = [trace.strings[number] for number in events["name"].tolist()]
    annotations = Annotations(tree)
    columns = zip(
        (events["start_ns"][rows] - start_ns(tree)).tolist(),
        [*table["size_bytes"].tolist(), *[0] * len(failed)],
        [*devices, *[""] * len(failed)],
        ["" if row < 0 else names[row] for row in tree.innermost(is_op)[rows].tolist()],
        [
            tuple(names[label] for label in annotations.around(float(rank)))
            for rank in tree.rank[rows].tolist()
        ],
        (np.arange(len(rows)) >= len(table)).tolist(),
        strict=True,
    )
    memory_events = [MemoryEvent(*row) for row in columns]
    return tuple(memory_events[place] for place in np.argsort(tree.rank[rows]).tolist())


def find_labels(tree: OpTree) -> Iterator[Span]:
    """Yield the ``record_function`` labels and the profiler's steps, in the order of their starts.

    A step is of the kind ``step`` and a label of the kind ``label``; times count from the start of
    the recording.
    """
    events, strings = tree.trace.events, tree.trace.strings
    rows, begin = np.flatnonzero(are_labels(events)), start_ns(tree)
    for row in rows[np.argsort(tree.rank[rows])].tolist():
        name = strings[events["name"][row]]
        kind = "step" if is_step(name) else "label"
        start, end = int(events["start_ns"][row]), int(events["end_ns"][row])
        yield Span(kind, name, start - begin, end - begin)
