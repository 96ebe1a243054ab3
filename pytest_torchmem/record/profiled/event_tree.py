"""One walk over the profiler's event tree, which reads what each kind of event has.

Every attribute crosses a language border, and an event that is held costs more than one that is
given back at once. So the walk reads each event and drops it. It keeps Python calls that led to an
event: they are worth reading if they led to something else than calls, and that is known only after
the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Final, SupportsInt

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.trace import EventKind

if TYPE_CHECKING:
    from pytest_torchmem.record.profiled.mentions import Allocation, Mentions

# Plain numbers: members of an enum cost more to compare and to turn into an array.
_OPERATOR: Final = int(EventKind.TORCH_OP)
_ALLOCATION: Final = int(EventKind.ALLOCATION)
_PY_CALL: Final = int(EventKind.PY_CALL)
_PY_C_CALL: Final = int(EventKind.PY_C_CALL)
_OTHER: Final = int(EventKind.OTHER)
_KINDS: Final = {
    profiler.TorchOpFields: _OPERATOR,
    profiler.AllocationFields: _ALLOCATION,
    profiler.PyCallFields: _PY_CALL,
    profiler.PyCCallFields: _PY_C_CALL,
    profiler.OutOfMemoryFields: int(EventKind.OUT_OF_MEMORY),
}

_children = profiler.reader(profiler.ProfilerEvent, "children")
_start_ns = profiler.reader(profiler.ProfilerEvent, "start_time_ns")
_end_ns = profiler.reader(profiler.ProfilerEvent, "end_time_ns")
_thread = profiler.reader(profiler.ProfilerEvent, "start_tid")
_scope = profiler.reader(profiler.TorchOpFields, "scope")
_sequence = profiler.reader(profiler.TorchOpFields, "sequence_number")
_allocation: Callable[[profiler.AllocationFields], Allocation] = attrgetter(
    "allocation_id", "id", "device", "ptr", "alloc_size", "total_allocated"
)
_line = attrgetter("caller.line_number")
_module = profiler.reader(profiler.PyCallFields, "module")
_optimizer = profiler.reader(profiler.PyCallFields, "optimizer")


@dataclass(slots=True)
class Times:
    """Start, end and thread of some events."""

    starts_ns: list[int] = field(default_factory=list)
    ends_ns: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def add(self, event: profiler.ProfilerEvent) -> None:
        self.starts_ns.append(_start_ns(event))
        self.ends_ns.append(_end_ns(event))
        self.threads.append(_thread(event))


@dataclass(slots=True)
class EventTree:
    """The events in depth-first order. Lists about one kind of event are in that order, too.

    Attributes:
        parents: For each event the row of the one around it, or -1: int64.
        kinds: For each event its `EventKind`: uint8.
        inner: The rows of the events that hold others.
        inner_ends: For each of these the row after the last one that it holds.
        times: Of all events but Python calls.
        shapes: For each operator the number that `Mentions` gave to the shape of its inputs.
        sequences: For each operator autograd's sequence number, or -1.
        scopes: The ``RecordScope`` of each operator whose name and inputs fit no schema.
        allocations: For each allocation event allocation id, id, device, pointer, bytes, and the
            allocator's total of allocated bytes.
        python: The Python calls themselves, not yet read; None for those that led to no event and
            are not in ``owners``, unless the tree is read whole.
        operators: The operators themselves, not yet read, where more of them is wanted.
        owners: Which of the Python calls (by its place in ``python``) is one of a module or of an
            optimizer, and the two, either of which may be None.
    """

    parents: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    kinds: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    inner: list[int] = field(default_factory=list)
    inner_ends: list[int] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    shapes: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    scopes: list[SupportsInt] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    python: list[profiler.ProfilerEvent | None] = field(default_factory=list)
    operators: list[profiler.ProfilerEvent] = field(default_factory=list)
    owners: list[tuple[int, profiler.ModuleInfo | None, profiler.OptimizerInfo | None]] = field(
        default_factory=list
    )

    def add_call(
        self, event: profiler.ProfilerEvent, fields: profiler.PyCallFields, leads_on: bool
    ) -> None:
        """Add a Python call; the event is kept where it leads to another or has an owner."""
        module, optimizer = _module(fields), _optimizer(fields)
        if is_owner := module is not None or optimizer is not None:
            self.owners.append((len(self.python), module, optimizer))
        self.python.append(event if leads_on or is_owner else None)

    def add_operator(
        self,
        event: profiler.ProfilerEvent,
        fields: profiler.TorchOpFields,
        mentions: Mentions,
        is_kept: bool,
    ) -> None:
        self.shapes.append(shape := mentions.add_operator(fields))
        self.sequences.append(_sequence(fields))
        if not mentions.shapes.known[shape].is_operator:
            self.scopes.append(_scope(fields))
        if is_kept:
            self.operators.append(event)

    def calls(self, numbers: NDArray[np.int64]) -> list[profiler.ProfilerEvent]:
        """Return Python calls that led to something, by their places in ``python``."""
        events = map(self.python.__getitem__, numbers.tolist())
        return [call for call in events if call is not None]

    def children(self, call: int) -> list[profiler.ProfilerEvent]:
        """Return the events directly below a Python call, by its place in ``python``."""
        event = self.python[call]
        return list(_children(event)) if event is not None else []


def line_of(call: profiler.ProfilerEvent) -> int:
    """Return the line on which a Python call stands.

    It takes as long to read as all else of a call, and most lead to nothing.
    """
    line: int = _line(profiler.fields_of(call))
    return line


def read_tree(
    roots: Sequence[profiler.ProfilerEvent], mentions: Mentions, whole: bool = False
) -> EventTree:
    """Walk the tree; ``mentions`` gets what operators take, and ``whole`` keeps these as well."""
    tree, parents, kinds = EventTree(), list[int](), list[int]()
    fields_of, kind_of = profiler.fields_of, _KINDS.get
    events, parent, row = iter(roots), -1, -1
    # The events around: those that are left beside each, and the row around these.
    around: list[tuple[Iterator[profiler.ProfilerEvent], int]] = []
    while True:
        for event in events:
            row += 1
            parents.append(parent)
            fields = fields_of(event)
            kinds.append(kind := kind_of(type(fields), _OTHER))
            # An allocation holds no other event.
            children = _children(event) if kind != _ALLOCATION else None
            if kind == _PY_C_CALL:
                tree.python.append(event if children or whole else None)
            elif kind == _PY_CALL:
                tree.add_call(event, fields, bool(children) or whole)
            else:
                tree.times.add(event)
                if kind == _ALLOCATION:
                    tree.allocations.append(allocation := _allocation(fields))
                    mentions.add_allocation(allocation)
                elif kind == _OPERATOR:
                    tree.add_operator(event, fields, mentions, whole)
            if children:
                around.append((events, parent))
                events, parent = iter(children), row
                break
        else:
            if not around:
                break
            tree.inner.append(parent)
            tree.inner_ends.append(row + 1)
            events, parent = around.pop()
    tree.parents, tree.kinds = np.array(parents, np.int64), np.array(kinds, np.uint8)
    return tree


def are_calls(kinds: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which kinds are those of Python calls: bool, of the same shape."""
    calls: NDArray[np.bool_] = (kinds == _PY_CALL) | (kinds == _PY_C_CALL)
    return calls


def times_of(events: Sequence[profiler.ProfilerEvent]) -> Times:
    return Times(
        list(map(_start_ns, events)), list(map(_end_ns, events)), list(map(_thread, events))
    )


@dataclass(frozen=True, slots=True)
class WorthKeeping:
    """The events worth keeping: all but the Python calls that lead to nothing.

    Attributes:
        rows: int64, shape (E,); the rows of the tree that are kept, ascending.
        row: int64, shape (T,); for each kept row of the tree its row among those.
        end: int64, shape (E,); the row after the subtree of each.
        calls: int64, shape (P,); which of the Python calls are kept.
    """

    rows: NDArray[np.int64]
    row: NDArray[np.int64]
    end: NDArray[np.int64]
    calls: NDArray[np.int64]


def find_kept(tree: EventTree, whole: bool = False) -> WorthKeeping:
    """Return what is worth keeping of a tree; of a ``whole`` one that is everything."""
    is_python = are_calls(tree.kinds)
    worth = ~is_python | whole
    worth[np.flatnonzero(is_python)[[call for call, _, _ in tree.owners]]] = True
    ends = np.arange(1, len(worth) + 1)
    ends[tree.inner] = tree.inner_ends
    before = _counts_before(worth)
    is_kept = before[ends] > before[:-1]
    rows, kept_before = np.flatnonzero(is_kept), _counts_before(is_kept)
    return WorthKeeping(
        rows, kept_before[1:] - 1, kept_before[ends[rows]], np.flatnonzero(is_kept[is_python])
    )


def _counts_before(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how many are chosen before each place, the one after the last included."""
    return np.concatenate([[0], np.cumsum(chosen)])
