"""torch's memory timeline: every action on every version, and sizes by category over time.

The definitions are those of ``MemoryProfile.timeline`` and ``MemoryProfileTimeline`` in
``torch/profiler/_memory_profiler.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.analysis.torch_view.data_flow import DataFlowGraph, TensorKeys, build_data_flow
from pytest_torchmem.analysis.torch_view.torch_labels import NOTHING, TorchLabels, label_versions
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import Role
from pytest_torchmem.values.units import Device

#: The order in which torch's exports list categories.
TORCH_ORDER: Final = (
    Category.PARAMETER,
    Category.OPTIMIZER_STATE,
    Category.INPUT,
    Category.TEMPORARY,
    Category.ACTIVATION,
    Category.GRADIENT,
    Category.AUTOGRAD_DETAIL,
    Category.UNKNOWN,
)
_TORCH_INDEX: Final = np.zeros(len(Category), np.int64)
for _index, _category in enumerate(TORCH_ORDER):
    _TORCH_INDEX[_category.column] = _index
# Categories of ours that torch has no name for.
_TORCH_INDEX[[Category.BUFFER.column, Category.WORKSPACE.column]] = len(TORCH_ORDER) - 1


class Action(enum.IntEnum):
    """The change to a version of a tensor, with torch's numbers."""

    PREEXISTING = 1
    CREATE = 2
    INCREMENT_VERSION = 3
    DESTROY = 4


ENTRY: Final = np.dtype(
    [
        ("time_ns", "i8"),
        ("action", "u1"),
        ("device", "i2"),
        ("size_bytes", "i8"),
        ("before", "u1"),
        ("after", "u1"),
        ("key", "i8"),
        ("version", "i8"),
    ]
)


@dataclass(frozen=True, eq=False)
class TorchMemoryProfile:
    """A trace under torch's labels."""

    tree: OpTree

    @cached_property
    def graph(self) -> DataFlowGraph:
        return build_data_flow(self.tree)

    @cached_property
    def labels(self) -> TorchLabels:
        return label_versions(self.graph)

    @cached_property
    def entries(self) -> NDArray[np.void]:
        """`ENTRY` rows, sorted by time and action.

        ``time_ns`` is -1 for what was there before. ``before`` is the column of the category that
        the bytes leave, ``after`` of the one they come to; only one counts but for
        INCREMENT_VERSION. ``key`` is the index of the tensor key in ``graph.keys``, -1 for memory
        without one. ``version`` is the one that the action is about: that which an
        INCREMENT_VERSION writes over, and the last one for a DESTROY. A tensor that is made,
        written to once and freed::

            CREATE              key 0, version 0
            INCREMENT_VERSION   key 0, version 0
            DESTROY             key 0, version 1
        """
        entries: NDArray[np.void] = np.concatenate(
            [_unknown_entries(self.tree), _keyed_entries(self.graph, self.labels)]
        )
        return entries[np.lexsort((entries["action"], entries["time_ns"]))]

    def timeline(self, device: Device | None = None) -> Timeline:
        """The device's timeline in microseconds resolution, columns in our order."""
        times, levels = self._levels(device)
        return Timeline(times * 1000, levels)

    def coalesced(self, device: Device | None = None) -> tuple[list[int], list[list[int]]]:
        """Times in µs, and for each the sizes by category in torch's order after a leading 0."""
        times, levels = self._levels(device)
        return times.tolist(), _in_torch_order(levels)

    def raw(self, device: Device | None = None) -> list[tuple[int, int, int, int]]:
        """(time in ns, action, bytes gained or lost, index of the category in torch's order)."""
        entries = self._of(device)
        rows: list[tuple[int, int, int, int]] = []
        columns = (
            entries["time_ns"],
            entries["action"],
            entries["size_bytes"],
            _TORCH_INDEX[entries["before"]],
            _TORCH_INDEX[entries["after"]],
        )
        for time, action, size, before, after in zip(*(c.tolist() for c in columns), strict=True):
            if action in (Action.INCREMENT_VERSION, Action.DESTROY):
                rows.append((time, action, -size, before))
            if action != Action.DESTROY:
                rows.append((time, action, size, after))
        return rows

    def _of(self, device: Device | None = None) -> NDArray[np.void]:
        devices, name = self.tree.trace.devices, self.tree.trace.device_named(device)
        number = devices.index(name) if name in devices else -1
        mine: NDArray[np.void] = self.entries[self.entries["device"] == number]
        return mine

    def _levels(self, device: Device | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        entries = self._of(device)
        if not len(entries):
            return np.empty(0, np.int64), np.empty((0, len(Category)), np.int64)
        times = _microseconds(entries["time_ns"])
        changes = np.zeros((len(entries), len(Category)), np.int64)
        rows = np.arange(len(entries))
        gains = entries["action"] != Action.DESTROY
        loses = ~gains | (entries["action"] == Action.INCREMENT_VERSION)
        changes[rows[loses], entries["before"][loses]] -= entries["size_bytes"][loses]
        changes[rows[gains], entries["after"][gains]] += entries["size_bytes"][gains]
        last = np.append(np.flatnonzero(np.diff(times)), len(times) - 1)
        times = times[last]
        started = times[times >= 0]
        times[times < 0] = started[0] if len(started) else -1
        return times, np.cumsum(changes, axis=0)[last]


def _in_torch_order(levels: NDArray[np.int64]) -> list[list[int]]:
    sizes = np.zeros((len(levels), len(TORCH_ORDER) + 1), np.int64)
    np.add.at(sizes.T, _TORCH_INDEX + 1, levels.T)
    return sizes.tolist()


def _microseconds(times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Whole microseconds as torch has them; -1 stays -1."""
    # torch divides Python ints, which rounds the exact quotient to a float before the fraction is
    # dropped: just below a whole microsecond that rounds up. A float64 division rounds differently.
    times = [time if time < 0 else int(time / 1000) for time in times_ns.tolist()]
    return np.array(times, np.int64)


def _entries(
    keys: TensorKeys,
    key: NDArray[np.int64],
    action: Action,
    time_ns: NDArray[np.int64] | int,
    version: NDArray[np.int64] | int = 0,
    before: NDArray[np.uint8] | int = NOTHING,
    after: NDArray[np.uint8] | int = NOTHING,
) -> NDArray[np.void]:
    rows = np.zeros(len(key), ENTRY)
    rows["time_ns"], rows["action"], rows["key"] = time_ns, action, key
    rows["device"], rows["size_bytes"] = keys.device[key], keys.size_bytes[key]
    rows["version"], rows["before"], rows["after"] = version, before, after
    return rows


def _unknown_entries(tree: OpTree) -> NDArray[np.void]:
    """Allocations without a tensor key, paired by pointer in the order of the tree."""
    trace = tree.trace
    table = trace.allocations[~trace.allocations["keyed"]]
    live: set[tuple[int, int]] = set()
    rows: list[tuple[int, ...]] = []
    nobodys = (NOTHING, NOTHING, -1, 0)
    columns = (
        trace.events["start_ns"][table["event"]],
        table["device"],
        table["ptr"],
        table["size_bytes"],
    )
    for time, device, ptr, size in zip(*(c.tolist() for c in columns), strict=True):
        place = (ptr, device)
        if size > 0:
            action = Action.INCREMENT_VERSION if place in live else Action.CREATE
            live.add(place)
            rows.append((time, action, device, size, *nobodys))
        else:
            rows.append((time, Action.DESTROY, device, -size, *nobodys))
            if place not in live:
                rows.append((-1, Action.PREEXISTING, device, -size, *nobodys))
            live.discard(place)
    return np.array(rows, ENTRY)


def _keyed_entries(graph: DataFlowGraph, labels_of: TorchLabels) -> NDArray[np.void]:
    """Actions on tensor keys, from the edges of the graph and what was there before it."""
    trace, keys = graph.tree.trace, graph.keys
    labels = labels_of.of_versions(graph)
    offsets = graph.version_offset
    start = trace.events["start_ns"]
    born, died = (_last_times(graph, sign) for sign in (1, -1))
    before = np.flatnonzero((born < 0) & in_snapshot(graph))
    bumps = graph.mutates & ~graph.allocates
    created, bumped, freed = (graph.key[where] for where in (graph.allocates, bumps, graph.frees))
    first, last = labels[offsets[:-1]], labels[offsets[1:] - 1]
    parts = (
        _entries(keys, before, Action.PREEXISTING, -1, after=first[before]),
        _entries(keys, created, Action.CREATE, born[created], after=first[created]),
        _entries(
            keys,
            bumped,
            Action.INCREMENT_VERSION,
            start[graph.node_event[graph.node[bumps]]],
            graph.version[bumps],
            before=labels[graph.version_in[bumps]],
            after=labels[graph.version_out[bumps]],
        ),
        _entries(
            keys,
            freed,
            Action.DESTROY,
            died[freed],
            np.diff(offsets)[freed] - 1,
            before=last[freed],
        ),
    )
    return np.concatenate(parts)


def _last_times(graph: DataFlowGraph, sign: int) -> NDArray[np.int64]:
    """Time of each key's last allocation (``sign`` 1) or free (-1), or -1: int64, shape (K,)."""
    table = graph.tree.trace.allocations
    rows = np.flatnonzero((graph.keys.of_allocation >= 0) & (np.sign(table["size_bytes"]) == sign))
    times = np.full(len(graph.keys), -1, np.int64)
    times[graph.keys.of_allocation[rows]] = graph.tree.trace.events["start_ns"][
        table["event"][rows]
    ]
    return times


def in_snapshot(graph: DataFlowGraph) -> NDArray[np.bool_]:
    """Keys that a node has an edge to, or that were labelled by id: bool, shape (K,)."""
    is_seen = np.zeros(len(graph.keys), np.bool_)
    is_seen[graph.key] = True
    tensors = graph.tree.trace.tensors
    is_seen[graph.keys.of_tensor[(tensors["role"] != Role.OPERATOR_INPUT) & tensors["keyed"]]] = (
        True
    )
    return is_seen


def coalesced(timeline: Timeline, start_ns: int) -> tuple[list[int], list[list[int]]]:
    """A timeline of ours in the form of `TorchMemoryProfile.coalesced`.

    ``start_ns`` is the absolute time that the timeline counts from. Changes within one microsecond
    become one entry; BUFFER and WORKSPACE, which torch does not know, count as none of them.
    """
    times = _microseconds(timeline.times_ns + start_ns)
    last = np.append(np.flatnonzero(np.diff(times)), len(times) - 1)[: len(times)]
    return times[last].tolist(), _in_torch_order(timeline.sizes[last])


def raw_changes(timeline: Timeline, start_ns: int) -> list[tuple[int, int, int, int]]:
    """A timeline of ours in the form of `TorchMemoryProfile.raw`.

    A storage of ours has one category for life, so nothing is ever an INCREMENT_VERSION.
    """
    changes = np.diff(timeline.sizes, axis=0, prepend=0)
    rows: list[tuple[int, int, int, int]] = []
    for row, column in zip(*(index.tolist() for index in np.nonzero(changes)), strict=True):
        amount = int(changes[row, column])
        time = int(timeline.times_ns[row]) + start_ns if row else -1
        action = Action.DESTROY if amount < 0 else Action.CREATE if row else Action.PREEXISTING
        rows.append((time, int(action), amount, int(_TORCH_INDEX[column])))
    return rows
