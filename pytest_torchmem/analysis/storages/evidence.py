"""Evidence: everything a category pass may look at, each fact worked out once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import BACKWARD, FORWARD, OpTree
from pytest_torchmem.analysis.storages.storages import BEFORE, Storages, bucket_mentions
from pytest_torchmem.values.trace import EventKind, MarkKind, Mutable, Ownership, Role, are_among


@dataclass(frozen=True, slots=True)
class RankWindow:
    """A stretch of a recording, by ranks: from ``begin`` to ``end``, both included.

    ``may_go_on`` says that the body is not over at ``end``: a backward pass may follow.
    """

    begin: float
    end: float
    may_go_on: bool = False

    def holds(self, ranks: NDArray[np.number]) -> NDArray[np.bool_]:
        """Return which ranks are in it."""
        return (ranks >= self.begin) & (ranks <= self.end)


# The arguments of an operator that was not observed.
_OPERANDS: Final = (Ownership.USED, Ownership.WRITTEN)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Facts about storages within a window, on the device with number ``device``.

    Masks are bool arrays of shape (S,), one entry per storage.
    """

    tree: OpTree
    storages: Storages
    window: RankWindow
    device: int

    @cached_property
    def made(self) -> NDArray[np.bool_]:
        """Allocated within the window, by torch."""
        return self.window.holds(self.storages.born) & ~self.outside

    @cached_property
    def outside(self) -> NDArray[np.bool_]:
        """Memory of another allocator, such as numpy's, or of a file that is mapped.

        It is there from where an operator met it first: until then nobody knows of it.
        """
        kinds = np.append(self.tree.trace.events["kind"], np.uint8(EventKind.ALLOCATION))
        outside: NDArray[np.bool_] = kinds[self.storages.event] == EventKind.OTHER
        return outside

    @cached_property
    def touched(self) -> NDArray[np.bool_]:
        """Alive when the window begins, and used within it.

        Operators name their inputs; compiled code does not. So two more things count as a use. A
        call of a module uses everything that the module and its children hold. A graph that was
        built in the window has used what it keeps, and the leaves that it gives gradients to; a
        graph that an earlier test left behind has not. And no operator is observed in fused
        kernels: there the recorder notes the arguments of the call as USED.
        """
        mentioned = self.window.holds(self._tensor_ranks)
        owners, at = self.tree.trace.owners, self._owner_ranks
        is_called = set(self._modules_called).__contains__
        is_used = np.fromiter(map(is_called, owners["module"].tolist()), np.bool_, len(owners))
        is_used |= (at >= self.window.begin) & are_among(
            owners["kind"], (Ownership.SAVED, Ownership.LEAF, *_OPERANDS)
        )
        is_used &= (at <= self.window.end) & ~self._left_behind
        alive = (self.storages.born < self.window.begin) & (self.storages.died > self.window.begin)
        alive |= self.outside & self.window.holds(self.storages.born)
        return (
            alive
            & ~self.foreign
            & (self.in_rows(mentioned) | self._mask(self.storages.of_owner[is_used]))
        )

    @cached_property
    def foreign(self) -> NDArray[np.bool_]:
        """Used, but neither allocated in the recording nor there when it began.

        Such memory belongs to another allocator, such as numpy's, or to another thread. Nobody
        knows when it came and went, so it can be part of no footprint. DDP's buckets look the same
        and are known. Only the CPU's memory is judged, and only in a recording that lists the
        storages that were alive at its start.
        """
        trace = self.tree.trace
        kinds = trace.marks["kind"][trace.owners["mark"]]
        at_start = (trace.owners["kind"] == Ownership.LIVE) & (kinds == MarkKind.START)
        if not trace.meta.get("live_at_start_known"):
            return np.zeros(len(self.storages), np.bool_)
        is_cpu = np.array([*(name == "cpu" for name in trace.devices), False], np.bool_)
        there = self._mask(self.storages.of_owner[at_start])
        # What a compiler traces with has no memory.
        is_real = (self.storages.ptr > 0) & (self.storages.size_bytes > 0)
        came_before = (self.storages.born == BEFORE) & is_cpu[self.storages.device]
        foreign: NDArray[np.bool_] = came_before & is_real & ~there & ~self.buckets
        return foreign

    @cached_property
    def buckets(self) -> NDArray[np.bool_]:
        """DDP copies gradients to it."""
        return self._mask(self.storages.of_tensor[bucket_mentions(self.tree.trace)])

    @cached_property
    def first_mentions(self) -> NDArray[np.float64]:
        """Rank at which a tensor of each storage is first mentioned; infinite if none is."""
        of_tensor = self.storages.of_tensor
        is_seen = of_tensor >= 0
        first = np.full(len(self.storages), np.inf)
        np.minimum.at(first, of_tensor[is_seen], self._tensor_ranks[is_seen])
        return first

    @cached_property
    def _left_behind(self) -> NDArray[np.bool_]:
        """Rows of owners about graphs that were there before the recording: bool, shape (O,).

        Such a graph becomes part of the recording when a backward pass in it uses the graph.
        """
        trace, of_owner = self.tree.trace, self.storages.of_owner
        in_graph = are_among(trace.owners["kind"], (Ownership.SAVED, Ownership.LEAF))
        at = trace.marks["kind"][trace.owners["mark"]]
        kept_before = self._mask(of_owner[in_graph & (at == MarkKind.START)])
        is_known = np.append(kept_before, False)[of_owner]
        is_left: NDArray[np.bool_] = in_graph & is_known & (at != MarkKind.BACKWARD_BEGIN)
        return is_left

    @cached_property
    def _modules_called(self) -> list[int]:
        """The ``id()`` of each module that is called within the window, or is part of one."""
        trace = self.tree.trace
        inside = self.window.holds(self.tree.rank[trace.module_calls["event"]])
        edges = trace.module_edges
        parts: dict[int, set[int]] = {}
        for parent, child in set(
            zip(edges["parent"].tolist(), edges["child"].tolist(), strict=True)
        ):
            parts.setdefault(parent, set()).add(child)
        calls: set[int] = set()
        waiting = set(trace.module_calls["module"][inside].tolist())
        while waiting:
            calls |= waiting
            waiting = set().union(*(parts.get(module, ()) for module in waiting)) - calls
        return sorted(calls)

    @cached_property
    def counted(self) -> NDArray[np.bool_]:
        """It is part of the window's footprint."""
        return (self.made | self.touched) & self.mine

    @cached_property
    def mine(self) -> NDArray[np.bool_]:
        """On the device of the evidence."""
        mine: NDArray[np.bool_] = self.storages.device == self.device
        return mine

    @cached_property
    def birth_phase(self) -> NDArray[np.uint8]:
        """Phase each storage was allocated in; FORWARD for those without an allocation."""
        phase = np.full(len(self.storages), FORWARD, np.uint8)
        recorded = self.storages.event >= 0
        phase[recorded] = self.tree.phase[self.storages.event[recorded]]
        return phase

    @cached_property
    def birth_leaf(self) -> NDArray[np.int32]:
        """Row of the leaf operator each storage was allocated in, or -1."""
        return self.at_birth(self.tree.leaf)

    def at_birth(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return what an array of shape (E,) says of the events of allocations, or -1: (S,).

        A storage that was there before has -1 for its event, the place behind the last one.
        """
        return np.append(rows, np.int32(-1))[self.storages.event]

    @cached_property
    def module_call(self) -> NDArray[np.int32]:
        """For each event the row of the innermost module call around it, or -1: shape (E,)."""
        return self.tree.innermost_module_calls()

    @cached_property
    def has_backward(self) -> bool:
        """A backward pass began within the window, or may yet begin.

        One may begin as long as a graph is alive that keeps a storage of the window.
        """
        began = self.tree.trace.marks["kind"] == MarkKind.BACKWARD_BEGIN
        nodes = self.tree.backward_node >= 0
        for ranks in (self.tree.mark_ranks[began], self.tree.rank[nodes]):
            if self.window.holds(ranks).any():
                return True
        return bool((self._kept_by_graphs & self.made & self.owned(Ownership.SAVED)).any())

    @cached_property
    def _kept_by_graphs(self) -> NDArray[np.bool_]:
        """Kept by a graph that is alive at the end of the recording, or of a region in it."""
        trace = self.tree.trace
        kinds = trace.marks["kind"][trace.owners["mark"]]
        ends = (MarkKind.STOP, MarkKind.REGION_END) if self.window.may_go_on else (MarkKind.STOP,)
        rows = (trace.owners["kind"] == Ownership.SAVED) & are_among(kinds, ends)
        rows &= ~self._left_behind
        return self._mask(self.storages.of_owner[rows])

    def owned(self, *kinds: Ownership, in_operators: bool = True) -> NDArray[np.bool_]:
        """Held as any of ``kinds`` at any mark within the window or before it.

        Marks within an operator of the forward pass are left out unless ``in_operators``.
        """
        owners = self.tree.trace.owners
        rows = are_among(owners["kind"], kinds) & (self.storages.of_owner >= 0)
        rows &= self._owner_ranks <= self.window.end
        if not in_operators:
            rows &= ~self._in_operator[owners["mark"]]
        return self._mask(self.storages.of_owner[rows])

    @cached_property
    def _in_operator(self) -> NDArray[np.bool_]:
        """Marks within a forward operator with a node in the graph: bool, shape (M,)."""
        tree, events = self.tree, self.tree.trace.events
        watched = (events["kind"] == EventKind.TORCH_OP) & (events["sequence"] >= 0)
        inside = (tree.innermost(watched) >= 0) & (tree.backward_node < 0)
        at = self.tree.trace.marks["event"]
        in_operator: NDArray[np.bool_] = np.append(inside, False)[at]
        return in_operator

    def mentioned(self, *roles: Role) -> NDArray[np.bool_]:
        """Mentioned in any of ``roles`` up to the end of the window."""
        rows = np.flatnonzero(are_among(self.tree.trace.tensors["role"], roles))
        ranks = self.tree.rank[self.tree.trace.tensors["event"][rows]]
        return self._mask(self.storages.of_tensor[rows[ranks <= self.window.end]])

    @property
    def operands(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
        """The arguments of operators, those included that no profiler observed: shape (I,) each.

        The row of the operator, the storage that it is called with, or -1, and whether it writes to
        that. They take as much memory as all else that is worked out, so each call makes them anew.
        """
        trace = self.tree.trace
        is_input = trace.tensors["role"] == Role.OPERATOR_INPUT
        tensors = slice(None) if is_input.all() else np.flatnonzero(is_input)
        at = trace.marks["event"][trace.owners["mark"]]
        owners = np.flatnonzero(are_among(trace.owners["kind"], _OPERANDS) & (at >= 0))
        written = trace.owners["kind"][owners] == Ownership.WRITTEN
        return (
            np.concatenate([trace.tensors["event"][tensors], at[owners]]),
            np.concatenate([self.storages.of_tensor[tensors], self.storages.of_owner[owners]]),
            np.concatenate([trace.tensors["mutable"][tensors] == Mutable.YES, written]),
        )

    def read_in(self, *phases: int) -> NDArray[np.bool_]:
        """Read by an operator of one of ``phases``, up to the end of the window."""
        event, storage, written = self.operands
        rows = ~written & are_among(self.tree.phase[event], phases)
        return self._mask(storage[rows & (self.tree.rank[event] <= self.window.end)])

    @cached_property
    def read_by_backward(self) -> NDArray[np.bool_]:
        """Read by an operator within a node of the backward graph, up to the end of the window."""
        tensors, tree = self.tree.trace.tensors, self.tree
        rows = (tensors["role"] == Role.OPERATOR_INPUT) & (tensors["mutable"] != Mutable.YES)
        rows &= (tree.phase == BACKWARD)[tensors["event"]]
        rows &= tree.backward_node[tensors["event"]] >= 0
        return self.in_rows(rows & (self._tensor_ranks <= self.window.end))

    def outlives(self, event: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Alive when the event given for each storage (-1: none) is over."""
        outlives = np.zeros(len(event), np.bool_)
        rows = np.flatnonzero(event >= 0)
        ends = self.tree.trace.events["end"][event[rows]] - 1
        last = np.maximum(self.tree.rank[ends], self.tree.rank[event[rows]])
        outlives[rows] = self.storages.died[rows] > last
        return outlives

    @property
    def _tensor_ranks(self) -> NDArray[np.int32]:
        ranks: NDArray[np.int32] = self.tree.rank[self.tree.trace.tensors["event"]]
        return ranks

    @cached_property
    def _owner_ranks(self) -> NDArray[np.float64]:
        ranks: NDArray[np.float64] = self.tree.mark_ranks[self.tree.trace.owners["mark"]]
        return ranks

    def in_rows(self, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Mentioned in any of those rows of ``trace.tensors``."""
        return self._mask(self.storages.of_tensor[rows])

    def _mask(self, indices: NDArray[np.int32]) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.storages), np.bool_)
        mask[indices[indices >= 0]] = True
        return mask
