"""The operator tree: nesting, phases, leaf operators, and the order of things.

Every question of the form "what is the innermost X around this event" is answered for all events
at once, level by level from the roots, so its cost does not depend on how deep the tree is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.contributors import Phase
from pytest_torchmem.values.packed import Table, in_pieces
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.trace import CREATE_GRAPH, EventKind, MarkKind, Role, Scope, Trace

# Codes in `OpTree.phase`, in the order of the enum.
PHASES = tuple(Phase)
# Where torch's own entry points to a backward pass stand, and their names.
_AUTOGRAD_FILES: Final = ("torch/autograd/__init__.py", "torch/autograd/graph.py")
_ENTRY_POINTS: Final = frozenset({"backward", "grad", "_engine_run_backward"})
FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, PREEXISTING = range(len(PHASES))


@dataclass(frozen=True, eq=False)
class OpTree:
    """A trace's events with what follows from their nesting.

    Attributes:
        trace: The trace the rows belong to.
        rank: int32, shape (E,); position of each event in the order of start times. Unlike times,
            ranks are unique.
        leaf: int32, shape (E,); row of the outermost operator at or above each event (the unit of
            the data-flow graph), or -1 outside every operator. A node of the backward graph is a
            leaf whatever its name.
        backward_node: int32, shape (E,); row of the innermost node of the backward graph, or -1.
        phase: uint8, shape (E,); index into `PHASES`.
    """

    trace: Trace
    rank: NDArray[np.int32]
    leaf: NDArray[np.int32]
    backward_node: NDArray[np.int32]
    phase: NDArray[np.uint8]

    @property
    def parent(self) -> NDArray[np.int32]:
        """The row around each event, or -1: int32, shape (E,)."""
        return self.trace.events["parent"]

    @cached_property
    def depth(self) -> NDArray[np.int32]:
        """The number of events around each: int32, shape (E,)."""
        return _depths(self.trace.events["end"])

    def innermost(self, condition: NDArray[np.bool_]) -> NDArray[np.int32]:
        """For each event the row of the nearest event at or above it that meets ``condition``."""
        return _innermost(self.parent, condition)

    def name_of(self, row: int) -> str:
        """The name of an event; as in torch, an allocation or free is ``[memory]``."""
        event = self.trace.events[row]
        memory = event["kind"] == EventKind.ALLOCATION
        return "[memory]" if memory else self.trace.strings[int(event["name"])]

    def innermost_module_calls(self) -> NDArray[np.int32]:
        """For each event the row of the innermost module call around it, or -1: shape (E,)."""
        is_call = np.zeros(len(self.trace.events), np.bool_)
        is_call[self.trace.module_calls["event"]] = True
        return self.innermost(is_call)

    @cached_property
    def mark_ranks(self) -> NDArray[np.float64]:
        """The place of each mark among the ranks: float64, shape (M,).

        A mark that is not in the tree falls half-way between the events around its time.
        """
        marks = self.trace.marks
        ranks = self.ranks_at(marks["time_ns"])
        placed = marks["event"] >= 0
        ranks[placed] = self.rank[marks["event"][placed]]
        return ranks

    def starts_ns(self) -> NDArray[np.int64]:
        """Return the time at which each event began, by rank: int64, shape (E,)."""
        starts: NDArray[np.int64] = self.trace.events["start_ns"]
        return starts if ascends(starts) else np.sort(starts)

    def starts_at(self, ranks: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the times at which the events of some ranks began: int64, of the same shape."""
        if not (ascends(self.rank) and ascends(ranks)):
            return self.starts_ns()[ranks]
        found = np.empty(len(ranks), np.int64)
        for rows, (starts,) in in_pieces(self.trace.events, "start_ns"):
            # Bounds of another type would have all ranks copied.
            bounds = np.array((rows.start, rows.stop), ranks.dtype)
            places = slice(*np.searchsorted(ranks, bounds))
            found[places] = starts[ranks[places] - rows.start]
        return found

    def ranks_at(self, times_ns: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the places of moments among the ranks: float64, shape as that of ``times_ns``."""
        ranks: NDArray[np.float64] = np.searchsorted(self.starts_ns(), times_ns).astype(np.float64)
        return ranks - 0.5


def build_op_tree(trace: Trace) -> OpTree:
    """Return the operator tree of a trace."""
    events = trace.events
    rank = np.arange(len(events), dtype=np.int32)
    if not ascends(starts := events["start_ns"]):
        rank[np.argsort(starts, kind="stable")] = np.arange(len(events))
    del starts
    # Nodes of the backward graph. One that is called by another node is a part of that node.
    is_backward: NDArray[np.bool_] = events["scope"] == Scope.BACKWARD_FUNCTION
    is_backward &= ~np.append(is_backward, False)[events["parent"]]
    # The farthest operator at or above each event is one with none above it.
    is_leaf = (events["kind"] == EventKind.TORCH_OP) & (events["is_operator"] | is_backward)
    above = np.append(_innermost(events["parent"], is_leaf), np.int32(-1))[events["parent"]]
    leaf = _innermost(events["parent"], is_leaf & (above < 0))
    del above
    backward_node = _innermost(events["parent"], is_backward)
    phase = np.zeros(len(events), np.uint8)
    tree = OpTree(trace, rank, leaf, backward_node, phase)
    tree.phase[:] = _phases(tree)
    return tree


def ascends(values: NDArray[np.number[Any]]) -> bool:
    """Return whether no value is below the one before: those of one thread are in order."""
    return bool(np.all(values[:-1] <= values[1:]))


def _depths(ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the number of open subtrees before each row: a row opens one, and each ends at a row.

    A root (rows 0 to 2) with two children. Before each row [0, 0, 1] subtrees have ended:

    >>> _depths(np.array([3, 2, 3])).tolist()
    [0, 1, 1]
    """
    count = len(ends)
    closed = np.bincount(ends, minlength=count + 1)[: count + 1] if count else np.zeros(1, np.int64)
    return (np.arange(count) - np.cumsum(closed)[:count]).astype(np.int32)


def _innermost(parents: NDArray[np.int32], condition: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return, for each event, the nearest row at or above it that meets ``condition``, or -1.

    A row refers to itself where it meets the condition, and to its parent elsewhere; an entry at
    the end stands for -1. Then each refers to what that one refers to, until nothing changes. Four
    rows, each within the one before, of which the first meets the condition::

        [0, 0, 1, 2, -1]    [0, 0, 0, 1, -1]    [0, 0, 0, 0, -1]

    Where no row meets it, the result takes no memory, and must not be written to.
    """
    if not condition.any():
        return np.broadcast_to(np.int32(-1), len(parents))
    own = np.arange(len(parents), dtype=np.int32)
    nearest = np.append(np.where(condition, own, parents), np.int32(-1))
    while ((further := nearest[nearest]) != nearest).any():
        nearest = further
    return nearest[:-1]


def _phases(tree: OpTree) -> NDArray[np.uint8]:
    """Phase of each event.

    Backward is what happens while the engine runs, on whatever thread. Inside it gradients are
    switched off, so what was recorded with a sequence number is watched by autograd: a forward pass
    run again, unless the backward pass itself is being differentiated. So is all that a module does
    that is called there and was called before: what it does for no gradient has no number.
    """
    events, marks = tree.trace.events, tree.trace.marks
    ranks = tree.mark_ranks
    phase = np.full(len(events), FORWARD, np.uint8)
    in_optimizer = _is_inside(tree, ranks, MarkKind.OPTIMIZER_BEGIN, MarkKind.OPTIMIZER_END)
    stepping = np.zeros(len(events), np.bool_)
    roles = tree.trace.tensors["role"]
    stepping[tree.trace.tensors["event"][roles == Role.OPTIMIZER_PARAMETER]] = True
    watched = tree.innermost(events["is_operator"] & (events["sequence"] >= 0))
    # A step switches gradients off, but not for a closure that it calls.
    phase[(in_optimizer | (tree.innermost(stepping) >= 0)) & (watched < 0)] = OPTIMIZER
    in_backward = _is_inside(tree, ranks, MarkKind.BACKWARD_BEGIN, MarkKind.BACKWARD_END)
    in_backward |= (tree.backward_node >= 0) | (tree.innermost(calls_of_engine(tree)) >= 0)
    phase[in_backward] = BACKWARD
    differentiated = [
        tree.trace.strings[text] == CREATE_GRAPH
        for text in marks["text"][marks["kind"] == MarkKind.BACKWARD_BEGIN].tolist()
    ]
    if not any(differentiated):
        # Below the innermost backward node only: the node itself carries its forward's number.
        phase[in_backward & (watched > tree.backward_node)] = RECOMPUTE
        is_recomputed = _called_again(tree, in_backward)
        phase[in_backward & (tree.innermost(is_recomputed) > tree.backward_node)] = RECOMPUTE
    return phase


def _called_again(tree: OpTree, in_backward: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the calls, within a backward pass, of modules that were also called outside of one."""
    calls = tree.trace.module_calls
    within = in_backward[calls["event"]]
    again = within & np.isin(calls["module"], calls["module"][~within])
    mask = np.zeros(len(tree.trace.events), np.bool_)
    mask[calls["event"][again]] = True
    return mask


def calls_of_engine(tree: OpTree) -> NDArray[np.bool_]:
    """Return which events are Python calls of ``torch.autograd``'s own entry points, shape (E,).

    They make the first gradients, and wait while the engine runs a backward pass.
    """
    events, texts_are = tree.trace.events, tree.trace.texts_are
    is_entry: NDArray[np.bool_] = events["kind"] == EventKind.PY_CALL
    is_entry &= texts_are(events["file"], lambda text: text.endswith(_AUTOGRAD_FILES))
    is_entry &= texts_are(events["name"], _ENTRY_POINTS.__contains__)
    return is_entry


def _is_inside(
    tree: OpTree, ranks: NDArray[np.float64], begin: MarkKind, end: MarkKind
) -> NDArray[np.bool_]:
    """Return the events between a ``begin`` mark and its ``end``; pairs may nest.

    Four events with ranks 0 to 3, a ``begin`` at 0.5 and its ``end`` at 2.5::

        steps             [0, +1, 0, -1, 0]     at the first rank behind each mark
        sum so far        [0,  1, 1,  0]
        inside, by rank   [no, yes, yes, no]
    """
    kinds = tree.trace.marks["kind"]
    steps = np.zeros(len(tree.rank) + 1, np.int64)
    count = len(tree.rank)
    for kind, step in ((begin, 1), (end, -1)):
        at = np.ceil(ranks[kinds == kind]).astype(np.int64).clip(0, count)
        np.add.at(steps, at, step)
    return (np.cumsum(steps)[:-1] > 0)[tree.rank]


@dataclass(frozen=True, eq=False)
class Annotations:
    """The stretches of a recording that code put a name on with ``record_function``.

    The tree cannot tell what lies within one. An annotation begins and ends inside the Python calls
    ``__enter__`` and ``__exit__``, and the profiler closes everything that began in a call when
    that call returns::

        __enter__
            "loss"          <- begins here, and no child will ever be added to it
        aten::mse_loss      <- though it ends only after this
        __exit__

    So an annotation is taken as what its own times say, whatever its place in the tree.

    Threads are not told apart: while the engine runs a backward pass on threads of its own, the
    caller waits inside whatever annotation it is in.
    """

    tree: OpTree

    def around(self, rank: float) -> tuple[int, ...]:
        """Return the rows of the annotations that are open at a moment, outermost first."""
        innermost, outer = self._nesting
        rows: list[int] = []
        row = int(innermost[int(rank)]) if 0 <= rank < len(innermost) else -1
        while row >= 0:
            rows.append(row)
            row = outer[row]
        return tuple(reversed(rows))

    @cached_property
    def _nesting(self) -> tuple[NDArray[np.int32], dict[int, int]]:
        """The innermost annotation at each rank, -1 for none; and the one around each, by row.

        Without any the first is empty.
        """
        events, rank = self.tree.trace.events, self.tree.rank
        outer: dict[int, int] = {}
        rows = np.flatnonzero(are_labels(events))
        if not len(rows):
            return np.empty(0, np.int32), outer
        innermost = np.full(len(events), -1, np.int32)
        starts = self.tree.starts_ns()
        ends = np.searchsorted(starts, events["end_ns"][rows], side="right")
        for row, end in sorted(
            zip(rows.tolist(), ends.tolist(), strict=True), key=lambda pair: int(rank[pair[0]])
        ):
            begin = int(rank[row])
            outer[row] = int(innermost[begin])
            innermost[begin:end] = row
        return innermost, outer


def are_labels(events: Table) -> NDArray[np.bool_]:
    """Return which events are names that code put on a stretch with ``record_function``."""
    is_operator: NDArray[np.bool_] = events["kind"] == EventKind.TORCH_OP
    is_operator &= events["scope"] == Scope.OTHER
    return is_operator


def start_ns(tree: OpTree) -> int:
    """The time of the first event on the recording's clock; 0 where there is none."""
    events = tree.trace.events
    return int(events["start_ns"].min()) if len(events) else 0


def out_of_memory_ranks(tree: OpTree) -> tuple[int, ...]:
    """Return the ranks at which the allocator ran out of memory."""
    rows = np.flatnonzero(tree.trace.events["kind"] == EventKind.OUT_OF_MEMORY)
    return tuple(np.sort(tree.rank[rows]).tolist())


def running_at(tree: OpTree, rank: float) -> tuple[Span, ...]:
    """The annotations and operators around a moment of the recording, outermost first.

    Times count from the start of the recording.
    """
    events = tree.trace.events
    row = int(np.flatnonzero(tree.rank == int(rank))[0]) if 0 <= rank < len(events) else -1
    around = set(Annotations(tree).around(rank))
    while row >= 0:
        if events["kind"][row] == EventKind.TORCH_OP:
            around.add(row)
        row = int(events["parent"][row])
    names, begin = tree.trace.strings, start_ns(tree)
    return tuple(
        Span(
            "running",
            names[events["name"][row]],
            int(events["start_ns"][row]) - begin,
            int(events["end_ns"][row]) - begin,
        )
        for row in sorted(around, key=lambda row: int(tree.rank[row]))
    )


def self_times(tree: OpTree) -> NDArray[np.int64]:
    """Time of each event that none of its children took: int64 nanoseconds, shape (E,)."""
    events = tree.trace.events
    return own_amounts(events["end_ns"] - events["start_ns"], events["parent"])


def own_amounts(
    amounts: NDArray[np.int64], parents: NDArray[np.signedinteger]
) -> NDArray[np.int64]:
    """Return the part of each amount that is in none of those below it; a root's parent is -1."""
    own: NDArray[np.int64] = amounts.copy()
    below = parents >= 0
    np.subtract.at(own, parents[below], amounts[below])
    return own


# Names that wrappers put between a module and its parts; not what the user wrote.
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class _Path:
    root: int
    class_name: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Edge:
    """The place of a module, noted at a mark; parent 0 where its ``id()`` was first met."""

    mark: int
    rank: float
    parent: int
    name: str
    class_name: str


#: Behind every mark.
_LAST: Final = 2**31


class ModulePaths:
    """Resolves paths as of a moment: an ``id()`` may stand for another module later."""

    def __init__(self, tree: OpTree) -> None:
        trace, edges = tree.trace, tree.trace.module_edges
        strings, ranks = trace.strings, tree.mark_ranks[edges["mark"]].tolist()
        born = edges[edges["parent"] == 0]
        self._births: dict[int, list[int]] = defaultdict(list)
        for child, mark in zip(born["child"].tolist(), born["mark"].tolist(), strict=True):
            self._births[child].append(mark)
        self._edges: dict[int, list[_Edge]] = {}
        # Each backward pass notes all places again: the first note says what later ones do.
        noted: dict[int, set[tuple[int, int, int, int]]] = defaultdict(set)
        columns = ("child", "mark", "parent", "name", "class_name")
        for rank, child, mark, parent, name, class_name in zip(
            ranks, *(edges[column].tolist() for column in columns), strict=True
        ):
            if not parent:
                noted[child].clear()
            place = (parent, self.end(parent, mark), name, class_name)
            if place not in noted[child]:
                noted[child].add(place)
                edge = _Edge(mark, rank, parent, strings[name], strings[class_name])
                self._edges.setdefault(child, []).append(edge)
        calls = trace.module_calls
        names = zip(calls["module"].tolist(), calls["class_name"].tolist(), strict=True)
        self._class_names: dict[int, str] = {}
        for module, number in names:
            self._class_names.setdefault(module, trace.strings[number])
        self._edge_ranks = sorted(edge.rank for each in self._edges.values() for edge in each)
        self._known: dict[tuple[int, int, int], str] = {}

    def path(self, module: int, rank: float, since: int = _LAST) -> str:
        """The path of the module with that ``id()`` at ``rank``, from the class of its root.

        If it is the module of the mark ``since``, which may be dead, the path is its last one.
        """
        before = self.end(module, since)
        # Between two edges no path changes.
        key = (module, bisect_right(self._edge_ranks, rank), before)
        if key not in self._known:
            best = self._best(self._paths(module, rank, before, frozenset()))
            self._known[key] = ".".join((best.class_name, *best.names)).strip(".")
        return self._known[key]

    def end(self, module: int, since: int) -> int:
        """Return the mark at which another module had the ``id()`` of the one at ``since``."""
        births = self._births.get(module, ())
        later = bisect_right(births, since)
        return births[later] if later < len(births) else _LAST

    def _best(self, paths: list[_Path]) -> _Path:
        """The path by which a user knows a module that can be reached by several.

        A container made on the way, such as a slice of a ModuleList, holds modules too, but nobody
        calls it, and it does not reach as deep as the model. Within the model the shortest name is
        the one to use.
        """
        depth: dict[int, int] = {}
        for path in paths:
            depth[path.root] = max(depth.get(path.root, 0), len(path.names))
        return min(
            paths,
            key=lambda p: (
                p.root not in self._class_names,
                -depth[p.root],
                len(p.names),
                p.names,
                p.class_name,
            ),
        )

    def _paths(self, module: int, rank: float, before: int, below: frozenset[int]) -> list[_Path]:
        """The paths of a module at ``rank``, from what was noted ``before`` a mark."""
        edges = [edge for edge in self._edges.get(module, []) if edge.mark < before]
        current = [edge for edge in edges if edge.rank <= rank]
        # The profiler names all modules that have an ``id()`` one after the other like the first.
        class_name = current[-1].class_name if current else self._class_names.get(module, "")
        # A module dead before the first sample is found by what came later, if by anything.
        current = current or edges[:1]
        # What came before an id was first met was another module's.
        births = [i for i, edge in enumerate(current) if edge.parent == 0]
        parents = {
            (edge.parent, edge.name, self.end(edge.parent, edge.mark))
            for edge in current[births[-1] + 1 if births else 0 :]
        }
        paths = [
            _child_path(path, name, module, class_name)
            for parent, name, end in sorted(parents)
            if parent not in below and parent not in (0, module)
            for path in self._paths(parent, rank, min(before, end), below | {module})
        ]
        return paths or [_Path(module, class_name, ())]


def _child_path(path: _Path, name: str, module: int, class_name: str) -> _Path:
    if name not in _WRAPPERS:
        return _Path(path.root, path.class_name, (*path.names, name))
    # A wrapper at the root is none of the user's modules either: the path begins at what it wraps.
    return path if path.names else _Path(module, class_name, ())


def folded(path: str) -> str:
    """``GPT.layers.3.mlp`` as ``GPT.layers.*.mlp``: repeated layers are one."""
    return _INDEX.sub("*", path)
