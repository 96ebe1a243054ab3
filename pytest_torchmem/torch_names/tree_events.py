"""The events of a trace as objects, as ``experimental_event_tree()`` has them.

A trace keeps no calls of Python functions that lead to nothing, so there are fewer of those here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.analysis.events.op_tree import OpTree, build_op_tree
from pytest_torchmem.analysis.torch_view.torch_timeline import TorchMemoryProfile
from pytest_torchmem.values.trace import OVERLOADS_JOIN, EventKind, Scope, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One event of a tree, as torch's ``_ProfilerEvent``.

    Attributes:
        tree: The tree that it is part of.
        row: Its row in ``tree.trace.events``, which takes the place of torch's ``id``.
    """

    tree: OpTree
    row: int

    @property
    def name(self) -> str:
        return self.tree.name_of(self.row)

    @property
    def kind(self) -> EventKind:
        """What it is; torch's ``tag`` and ``typed[0]``."""
        return EventKind(self._column("kind"))

    @property
    def scope(self) -> Scope:
        """The ``RecordScope`` of an operator, NONE for anything else."""
        return Scope(self._column("scope"))

    @property
    def start_time_ns(self) -> int:
        return self._column("start_ns")

    @property
    def end_time_ns(self) -> int:
        return self._column("end_ns")

    @property
    def duration_time_ns(self) -> int:
        return self.end_time_ns - self.start_time_ns

    @property
    def parent(self) -> TreeEvent | None:
        row = self._column("parent")
        return TreeEvent(self.tree, row) if row >= 0 else None

    @property
    def children(self) -> list[TreeEvent]:
        ends = self.tree.trace.events["end"]
        found, row = [], self.row + 1
        while row < ends[self.row]:
            found.append(TreeEvent(self.tree, row))
            row = int(ends[row])
        return found

    @property
    def overloads(self) -> tuple[str, ...]:
        """The overloads whose schemas fit the inputs: ``aten::add.Tensor``, ``aten::ones``."""
        name = self.name
        is_operator = bool(self.tree.trace.events["is_operator"][self.row])
        if not is_operator or (text := self._overload_text("names")) is None:
            return ()
        return tuple(f"{name}.{o}" if o else name for o in text.split(OVERLOADS_JOIN))

    @property
    def writes(self) -> str:
        """One of `pytest_torchmem.values.trace.LETTERS` for each argument."""
        return self._overload_text("writes") or ""

    @property
    def tensor_rows(self) -> range:
        """Its rows in ``tree.trace.tensors``, which is in the order of events."""
        events = self.tree.trace.tensors["event"]
        first, last = np.searchsorted(events, [self.row, self.row + 1])
        return range(int(first), int(last))

    def _column(self, name: str) -> int:
        return int(self.tree.trace.events[name][self.row])

    def _overload_text(self, column: str) -> str | None:
        trace = self.tree.trace
        place = int(np.searchsorted(trace.overloads["event"], self.row))
        if place == len(trace.overloads) or trace.overloads["event"][place] != self.row:
            return None
        return trace.strings[int(trace.overloads[column][place])]


def children_of(event: TreeEvent) -> Sequence[TreeEvent]:
    return event.children


class OpTreeView:
    """torch's ``OpTree``: the events of a finished profile, or of a trace, as objects.

    ``result`` is a ``torch.profiler.profile``, its ``kineto_results``, a `Trace` or an `OpTree`.
    """

    def __init__(self, result: object) -> None:
        self.tree = result if isinstance(result, OpTree) else build_op_tree(_trace_of(result))

    @cached_property
    def labelled(self) -> TorchMemoryProfile:
        """The columns that everything else is read from."""
        return TorchMemoryProfile(self.tree)

    @property
    def roots(self) -> list[TreeEvent]:
        return self._events(np.flatnonzero(self.tree.trace.events["parent"] < 0))

    def dfs(
        self, children_fn: Callable[[TreeEvent], Sequence[TreeEvent]] = children_of
    ) -> Iterator[TreeEvent]:
        """Yield each event before those in it; ``children_fn`` says which those are."""
        waiting = self.roots[::-1]
        while waiting:
            event = waiting.pop()
            yield event
            waiting += reversed(children_fn(event))

    @property
    def sorted_nodes(self) -> tuple[TreeEvent, ...]:
        """Every event in the order of start times."""
        return tuple(self._events(np.argsort(self.tree.rank)))

    def _events(self, rows: NDArray[np.int64]) -> list[TreeEvent]:
        return [TreeEvent(self.tree, row) for row in rows.tolist()]


def _trace_of(result: object) -> Trace:
    if isinstance(result, Trace):
        return result
    from pytest_torchmem.record.tree.from_profiler import trace_of

    return trace_of(result)


def get_scopes(event: TreeEvent | None) -> tuple[Scope, ...]:
    """Return the scopes of an event and of all around it that are operators, innermost first."""
    scopes = []
    while event is not None:
        if event.kind is EventKind.TORCH_OP:
            scopes.append(event.scope)
        event = event.parent
    return tuple(scopes)
