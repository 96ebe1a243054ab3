"""The data-flow graph: which operator reads, writes, allocates and frees which version of what.

A node is a leaf operator, or an allocation or free outside of every operator. A tensor key is the
profiler's identity of a tensor in one storage (id, allocation id, device). Writing to a tensor
makes a new version of it; allocating makes version 0.

The definitions are those of ``torch/profiler/_memory_profiler.py``; the computation is columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.trace import EventKind, Mutable, Role

_READ: Final = 1
_WRITTEN: Final = 2
_AMBIGUOUS: Final = 4
_FREED: Final = 8
_ALLOCATED: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class TensorKeys:
    """Every tensor key of a trace, sorted. All columns have shape (K,).

    Attributes:
        id: int64, the profiler's tensor id; several keys may share one.
        allocation_id: int64.
        device: int16.
        size_bytes: int64; the allocation's, or else the largest extent seen.
        of_tensor: int64, shape (N,); key of each row of ``trace.tensors``, -1 without one.
        of_allocation: int64, shape (A,); key of each row of ``trace.allocations``, -1 without one.
    """

    id: NDArray[np.int64]
    allocation_id: NDArray[np.int64]
    device: NDArray[np.int16]
    size_bytes: NDArray[np.int64]
    of_tensor: NDArray[np.int64]
    of_allocation: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.id)


@dataclass(frozen=True, eq=False)
class DataFlowGraph:
    """Nodes in the order they started, and their edges.

    Attributes:
        tree: The operator tree it was built from.
        keys: The tensor keys that edges refer to.
        node_event: int64, shape (V,); event row of each node.
        node: int64, shape (F,); node of each edge, ascending.
        key: int64, shape (F,); key of each edge, ascending within a node.
        version: int64, shape (F,); version that the edge takes in; 0 for an allocation.
        allocates: bool, shape (F,); the node allocates the key.
        frees: bool, shape (F,); the node frees the key.
        mutates: bool, shape (F,); the node may write to the key, and does not free it.
    """

    tree: OpTree
    keys: TensorKeys
    node_event: NDArray[np.int64]
    node: NDArray[np.int64]
    key: NDArray[np.int64]
    version: NDArray[np.int64]
    allocates: NDArray[np.bool_]
    frees: NDArray[np.bool_]
    mutates: NDArray[np.bool_]

    @cached_property
    def is_input(self) -> NDArray[np.bool_]:
        """Edges that take a version in: a free does, an allocation does not."""
        return ~self.allocates

    @cached_property
    def is_output(self) -> NDArray[np.bool_]:
        """Edges that bring a version out: what is allocated and kept, or written to."""
        return (self.allocates & ~self.frees) | self.mutates

    @cached_property
    def is_intermediate(self) -> NDArray[np.bool_]:
        """Edges of tensors that live and die within the node."""
        return self.allocates & self.frees

    @cached_property
    def version_offset(self) -> NDArray[np.int64]:
        """Number of the first version of each key, and the count of all: int64, shape (K + 1,).

        Versions of all keys are numbered through; version v of key k has number offset[k] + v.
        """
        counts = np.ones(len(self.keys), np.int64)
        bumps = self.mutates & ~self.allocates
        np.add.at(counts, self.key[bumps], 1)
        return np.concatenate([[0], np.cumsum(counts)])

    @cached_property
    def version_in(self) -> NDArray[np.int64]:
        """Number of the version each edge takes in; meaningful for inputs: int64, shape (F,)."""
        return self.version_offset[self.key] + self.version

    @cached_property
    def version_out(self) -> NDArray[np.int64]:
        """Number of the version each edge brings out; meaningful for outputs: int64, shape (F,)."""
        return self.version_in + ~self.allocates

    @cached_property
    def in_backward(self) -> NDArray[np.bool_]:
        """Nodes within a node of the backward graph: bool, shape (V,)."""
        return self.tree.backward_node[self.node_event] >= 0

    def validate(self) -> None:
        """Raise `TraceError` unless the nodes, in their order, make a data-flow graph.

        Each version of a key is brought out once, and each node takes in the version that the last
        node before it brought out, or version 0. Three nodes and their edges of one key::

            empty     -> version 0
            add_      takes version 0 in -> version 1
            mul       takes version 1 in
        """
        latest: dict[int, int] = {}
        made: set[tuple[int, int]] = set()
        for _, key, taken, brought in self._edges():
            tensor = f"tensor {self.keys.id[key]}"
            if taken is not None and taken != latest.get(key, 0):
                raise TraceError(
                    f"version {taken} of {tensor} is used where version {latest.get(key, 0)} is "
                    "the last"
                )
            if brought is not None:
                latest[key] = brought
                if (key, brought) in made:
                    raise TraceError(f"version {brought} of {tensor} is made twice")
                made.add((key, brought))

    def _edges(self) -> Iterator[tuple[int, int, int | None, int | None]]:
        """Yield node, key, version in and version out of each edge; None for no version."""
        columns = (self.node, self.key, self.version, self.is_input, self.is_output, self.allocates)
        for node, key, version, takes, brings, allocates in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            brought = version + (not allocates) if brings else None
            yield node, key, version if takes else None, brought

    def dump(self) -> str:
        """Return one line for each node: its name, the versions in, and the versions out.

        Tensors are numbered in the order in which they appear::

            aten::ones                                -> T0(v0)
            aten::add_   T0(v0)                       -> T0(v1)
            aten::mul    T0(v1)                       -> T1(v0)
            [memory]     T0(v1)
        """
        names = [self.tree.name_of(row) for row in self.node_event.tolist()]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(self.key.tolist()))}
        sides: tuple[list[str], list[str]] = ([""] * len(names), [""] * len(names))
        for node, key, *versions in self._edges():
            for side, version in zip(sides, versions, strict=True):
                if version is not None:
                    before = f"{side[node]}, " if side[node] else ""
                    side[node] = f"{before}T{numbers[key]}(v{version})"
        wide = [max(map(len, texts), default=0) for texts in (names, sides[0])]
        lines = [
            f"{name:<{wide[0]}}  {ins:<{wide[1]}}  {'-> ' if outs else ''}{outs}".rstrip()
            for name, ins, outs in zip(names, *sides, strict=True)
        ]
        return "\n".join(lines)


def build_data_flow(tree: OpTree) -> DataFlowGraph:
    """Return the data-flow graph of a trace."""
    trace = tree.trace
    keys = find_keys(tree)
    node_event, node_of_event = _nodes(tree)
    rows = (
        (trace.tensors["role"] == Role.OPERATOR_INPUT)
        & trace.tensors["keyed"]
        & (node_of_event[trace.tensors["event"]] >= 0)
    )
    flags = np.where(
        trace.tensors["mutable"] == Mutable.YES,
        _WRITTEN,
        np.where(trace.tensors["mutable"] == Mutable.UNKNOWN, _AMBIGUOUS, _READ),
    )
    freed = trace.allocations["size_bytes"] < 0
    keyed = keys.of_allocation >= 0
    node = np.concatenate(
        [
            node_of_event[trace.tensors["event"][rows]],
            node_of_event[trace.allocations["event"][keyed]],
        ]
    )
    key = np.concatenate([keys.of_tensor[rows], keys.of_allocation[keyed]])
    flag = np.concatenate([flags[rows], np.where(freed, _FREED, _ALLOCATED)[keyed]])
    node, key, merged = _merge(node, key, flag.astype(np.uint8), max(1, len(keys)))

    frees = (merged & _FREED) > 0
    # When no schema fits, nobody knows what the operator does, so it may do anything; one mention
    # with a schema that only reads is enough to know better.
    ambiguous = (merged & (_READ | _AMBIGUOUS)) == _AMBIGUOUS
    mutates = (((merged & _WRITTEN) > 0) | ambiguous) & ~frees
    allocates = (merged & _ALLOCATED) > 0
    version = _versions(key, mutates & ~allocates)
    version[allocates] = 0
    return DataFlowGraph(tree, keys, node_event, node, key, version, allocates, frees, mutates)


def find_keys(tree: OpTree) -> TensorKeys:
    """Return the tensor keys of a trace, ordered by id, allocation id and device.

    A key is numbered where it differs from the one before it. Four mentions of three keys::

        id, allocation id, device   (2, 1, 0)  (1, 1, 0)  (2, 1, 0)  (2, 2, 0)
        in order                    (1, 1, 0)  (2, 1, 0)  (2, 1, 0)  (2, 2, 0)
        new                         [1, 1, 0, 1], so numbers [0, 1, 1, 2]
        number, as mentioned        [1, 0, 1, 2]
    """
    trace = tree.trace
    tensors, allocations = trace.tensors, trace.allocations
    with_tensor, with_allocation = tensors["keyed"], allocations["keyed"]
    columns = [
        np.concatenate([tensors[name][with_tensor], allocations[name][with_allocation]])
        for name in ("id", "allocation_id", "device")
    ]
    order = np.lexsort(columns[::-1])
    ordered = [column[order] for column in columns]
    new = np.ones(len(order), np.bool_)
    if len(order):
        new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in ordered])
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(new) - 1
    of_tensor = np.full(len(tensors), -1, np.int64)
    of_allocation = np.full(len(allocations), -1, np.int64)
    split = int(with_tensor.sum())
    of_tensor[with_tensor], of_allocation[with_allocation] = number[:split], number[split:]

    sizes = np.zeros(int(new.sum()), np.int64)
    np.maximum.at(sizes, of_tensor[with_tensor], tensors["size_bytes"][with_tensor])
    rows = np.flatnonzero(with_allocation)
    rows = rows[np.argsort(tree.rank[allocations["event"][rows]])][::-1]
    # Assigned from the last to the first: the first allocation event of a key has the word.
    sizes[of_allocation[rows]] = np.abs(allocations["size_bytes"][rows])
    ids, allocation_ids, devices = (column[new] for column in ordered)
    return TensorKeys(ids, allocation_ids, devices, sizes, of_tensor, of_allocation)


def _nodes(tree: OpTree) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Event row of each node in order, and the node of each event (-1: none)."""
    events, leaf = tree.trace.events, tree.leaf
    rows = np.arange(len(events))
    alone = (events["kind"] == EventKind.ALLOCATION) & (leaf < 0)
    node_event = np.flatnonzero((leaf == rows) | alone)
    node_event = node_event[np.argsort(tree.rank[node_event])]
    number = np.full(len(events) + 1, -1, np.int64)
    number[node_event] = np.arange(len(node_event))
    return node_event, np.where(alone, number[:-1], number[leaf])


def _merge(
    node: NDArray[np.int64], key: NDArray[np.int64], flag: NDArray[np.uint8], key_count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
    """Return one edge for each node and key, with the union of the flags.

    Node 0 reads key 0 (flag 1) and writes to it (2), node 1 allocates key 1 (4). With two keys in
    all the pairs are [0, 0, 3]:

    >>> node, key, flag = np.array([0, 0, 1]), np.array([0, 0, 1]), np.array([1, 2, 4], np.uint8)
    >>> [column.tolist() for column in _merge(node, key, flag, key_count=2)]
    [[0, 1], [0, 1], [3, 4]]
    """
    pair = node * key_count + key
    order = np.argsort(pair, kind="stable")
    pair = pair[order]
    first = np.flatnonzero(np.diff(pair, prepend=-1))
    merged = np.bitwise_or.reduceat(flag[order], first) if len(first) else np.empty(0, np.uint8)
    return pair[first] // key_count, pair[first] % key_count, merged


def _versions(key: NDArray[np.int64], bumps: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each edge how many edges of its key before it made a new version.

    Four edges; the first and the third are of key 5, and both write to it::

        key      [5, 7, 5, 5]       in order of key [5, 5, 5, 7]
        bumps    [1, 0, 1, 0]                       [1, 1, 0, 0]
        before   what came earlier:                 [0, 1, 2, 2]
        version  less that of the key's first:      [0, 1, 2, 0]

    >>> _versions(np.array([5, 7, 5, 5]), np.array([True, False, True, False])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(key, kind="stable")
    before: NDArray[np.int64] = np.cumsum(bumps[order]) - bumps[order]
    first = np.flatnonzero(np.diff(key[order], prepend=-1))
    counts = np.diff(np.append(first, len(order)))
    version = np.empty(len(key), np.int64)
    version[order] = before - np.repeat(before[first], counts)
    return version
