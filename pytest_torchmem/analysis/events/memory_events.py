"""Allocations and frees one by one, each with the operator and the labels around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pytest_torchmem.analysis.events.calls import is_step
from pytest_torchmem.analysis.events.op_tree import Annotations, OpTree, are_labels, start_ns
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.trace import EventKind


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
    found = [MemoryEvent(*row) for row in columns]
    return tuple(found[place] for place in np.argsort(tree.rank[rows]).tolist())


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
