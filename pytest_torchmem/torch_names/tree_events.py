"""The events of a trace as objects, as ``experimental_event_tree()`` has them.

A trace keeps no calls of Python functions that lead to nothing, so there are fewer of those here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree, build_op_tree
from pytest_torchmem.analysis.torch_view.torch_timeline import TorchMemoryProfile
from pytest_torchmem.measuring.events import trace_in
from pytest_torchmem.values.trace import OVERLOADS_JOIN, EventKind, Scope

_KINDS: Final = tuple(EventKind)
_SCOPES: Final = tuple(Scope)
_NONE: Final[tuple[tuple[str, ...], str]] = ((), "")


class EventLists:
    """The columns of a tree as lists: one event after the other is read from those in a tenth of
    the time that numpy takes.
    """

    def __init__(self, tree: OpTree) -> None:
        self.tree = tree
        events = tree.trace.events
        self.kinds: list[int] = events["kind"].tolist()
        self.scopes: list[int] = events["scope"].tolist()
        self.starts_ns: list[int] = events["start_ns"].tolist()
        self.ends_ns: list[int] = events["end_ns"].tolist()
        self.parents: list[int] = events["parent"].tolist()
        self.ends: list[int] = events["end"].tolist()

    @cached_property
    def names(self) -> list[str]:
        return [self.tree.name_of(row) for row in range(len(self.kinds))]

    @cached_property
    def tensor_rows(self) -> list[int]:
        """The first row in ``trace.tensors`` of each event, and the number of all rows."""
        rows = np.arange(len(self.kinds) + 1)
        found: list[int] = np.searchsorted(self.tree.trace.tensors["event"], rows).tolist()
        return found

    @cached_property
    def roles(self) -> list[int]:
        roles: list[int] = self.tree.trace.tensors["role"].tolist()
        return roles

    @cached_property
    def overloads(self) -> dict[int, tuple[tuple[str, ...], str]]:
        """For each operator the overloads that fit, and a letter for each argument."""
        trace = self.tree.trace
        is_operator = trace.events["is_operator"].tolist()
        names = self.names

        @cache
        def told(name: str, text: str) -> tuple[str, ...]:
            return tuple(f"{name}.{o}" if o else name for o in text.split(OVERLOADS_JOIN))

        return {
            row: (
                told(names[row], trace.strings[text]) if is_operator[row] else (),
                trace.strings[letters],
            )
            for row, text, letters in np.asarray(trace.overloads).tolist()
        }


@dataclass(frozen=True, slots=True)
class TreeEvent:
    """One event of a tree, as torch's ``_ProfilerEvent``.

    Attributes:
        columns: The tree that it is part of, as lists.
        row: Its row in ``trace.events``, which takes the place of torch's ``id``.
    """

    columns: EventLists
    row: int

    @property
    def name(self) -> str:
        return self.columns.names[self.row]

    @property
    def kind(self) -> EventKind:
        """The kind of the event; torch's ``tag`` and ``typed[0]``."""
        return _KINDS[self.columns.kinds[self.row]]

    @property
    def scope(self) -> Scope:
        """The ``RecordScope`` of an operator, NONE for anything else."""
        return _SCOPES[self.columns.scopes[self.row]]

    @property
    def start_time_ns(self) -> int:
        return self.columns.starts_ns[self.row]

    @property
    def end_time_ns(self) -> int:
        return self.columns.ends_ns[self.row]

    @property
    def duration_time_ns(self) -> int:
        return self.end_time_ns - self.start_time_ns

    @property
    def parent(self) -> TreeEvent | None:
        row = self.columns.parents[self.row]
        return TreeEvent(self.columns, row) if row >= 0 else None

    @property
    def children(self) -> list[TreeEvent]:
        ends = self.columns.ends
        found, row = [], self.row + 1
        while row < ends[self.row]:
            found.append(TreeEvent(self.columns, row))
            row = ends[row]
        return found

    @property
    def overloads(self) -> tuple[str, ...]:
        """The overloads whose schemas fit the inputs: ``aten::add.Tensor``, ``aten::ones``."""
        return self.columns.overloads.get(self.row, _NONE)[0]

    @property
    def writes(self) -> str:
        """One of `pytest_torchmem.values.trace.LETTERS` for each argument."""
        return self.columns.overloads.get(self.row, _NONE)[1]

    @property
    def tensor_rows(self) -> range:
        """Its rows in ``trace.tensors``."""
        return range(*self.columns.tensor_rows[self.row : self.row + 2])


class OpTreeView:
    """torch's ``OpTree``: the events of a finished profile, or of a trace, as objects.

    ``result`` is a ``torch.profiler.profile``, its ``kineto_results``, a `Trace` or an `OpTree`.
    """

    def __init__(self, result: object) -> None:
        self.tree = result if isinstance(result, OpTree) else build_op_tree(trace_in(result))

    @cached_property
    def labelled(self) -> TorchMemoryProfile:
        """The columns that everything else is read from."""
        return TorchMemoryProfile(self.tree)

    @property
    def roots(self) -> list[TreeEvent]:
        return self._events(np.flatnonzero(self.tree.trace.events["parent"] < 0))

    def dfs(
        self, children_fn: Callable[[TreeEvent], Sequence[TreeEvent]] = attrgetter("children")
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

    @cached_property
    def columns(self) -> EventLists:
        return EventLists(self.tree)

    def _events(self, rows: NDArray[np.int64]) -> list[TreeEvent]:
        return [TreeEvent(self.columns, row) for row in rows.tolist()]


def get_scopes(event: TreeEvent | None) -> tuple[Scope, ...]:
    """Return the scopes of an event and of all around it that are operators, innermost first."""
    scopes: list[Scope] = []
    if event is not None:
        columns, row = event.columns, event.row
        while row >= 0:
            if columns.kinds[row] == EventKind.TORCH_OP:
                scopes.append(_SCOPES[columns.scopes[row]])
            row = columns.parents[row]
    return tuple(scopes)
