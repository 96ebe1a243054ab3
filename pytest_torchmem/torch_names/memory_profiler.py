"""The names of ``torch.profiler._memory_profiler``, over our columns.

    from pytest_torchmem.torch_names.memory_profiler import MemoryProfile

    profile = MemoryProfile(finished)  # a torch.profiler.profile, or a stored Trace
    for time_ns, action, (key, version), size_bytes in profile.timeline: ...

Nothing is computed here: the graph is that of `analysis.torch_view.data_flow`, the categories those
of `torch_labels`, the timeline that of `torch_timeline`. A category that torch does not know is
None, as there. What has an underscore in torch and was used all the same goes by that name, too:
``_data_flow_graph`` is ``data_flow_graph``. Functions that look at one event take ours and torch's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from pytest_torchmem.analysis.torch_view.torch_labels import TorchLabels
from pytest_torchmem.analysis.torch_view.torch_timeline import Action, in_snapshot
from pytest_torchmem.measuring.profile import write_json, write_timeline_page
from pytest_torchmem.record.profiled.mentions import InputShapes, Signature
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.torch_names.tree_events import OpTreeView, TreeEvent, get_scopes
from pytest_torchmem.torch_names.utils import traverse_dfs
from pytest_torchmem.values.contributors import Category as _OurCategory
from pytest_torchmem.values.trace import LETTERS, Role, Scope, Trace
from pytest_torchmem.values.units import Device

__all__ = [
    "Action",
    "Category",
    "CategoryDict",
    "DataFlowEdge",
    "DataFlowGraph",
    "DataFlowNode",
    "Key",
    "MemoryProfile",
    "MemoryProfileTimeline",
    "OpTree",
    "SchemaMatcher",
    "SizeMap",
    "TensorAndID",
    "TensorKey",
    "extract_gradients",
    "extract_parameters",
    "get_scopes",
]


class TorchCategory(Enum):
    """torch's seven categories, numbered as there."""

    INPUT = auto()
    TEMPORARY = auto()
    ACTIVATION = auto()
    GRADIENT = auto()
    AUTOGRAD_DETAIL = auto()
    PARAMETER = auto()
    OPTIMIZER_STATE = auto()


_CATEGORIES: Final = tuple(TorchCategory.__members__.get(c.name) for c in _OurCategory)
_NEEDED: Final = ("record_shapes", "profile_memory", "with_stack")
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
_KEEPING: Final = ("aten::detach", "aten::add_")
_PARAMETERS: Final = (Role.MODULE_PARAMETER, Role.OPTIMIZER_PARAMETER)
_GRADIENTS: Final = (Role.MODULE_GRADIENT, Role.OPTIMIZER_GRADIENT)
_WRITES: Final = dict(zip(LETTERS, (False, True, None), strict=True))


@dataclass(frozen=True, slots=True)
class DeviceKey:
    """Memory of which no more is known than its device."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class StorageId:
    """A storage: its address, for printing, and the number that the profiler gave to it."""

    ptr: int
    allocation_id: int


@dataclass(frozen=True, slots=True)
class TensorKey(DeviceKey):
    """A tensor in one storage; keys are ordered by id, allocation id and device."""

    id: int
    storage: StorageId

    def __lt__(self, other: TensorKey) -> bool:
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, int, str]:
        return self.id, self.storage.allocation_id, str(self.device)

    @classmethod
    def from_tensor(cls, tensor: Any) -> TensorKey | None:
        """The key of a tensor as torch's profiler has it; None without a storage."""
        if tensor is None:
            return None
        return cls._of(tensor.device, tensor.id, tensor.storage_data_ptr, tensor.allocation_id)

    @classmethod
    def from_allocation(cls, allocation: Any) -> TensorKey | None:
        """The key of an allocation of torch's profiler; None where it belongs to no tensor."""
        found = allocation
        return cls._of(found.device, found.id, found.ptr, found.allocation_id)

    @classmethod
    def _of(
        cls, device: torch.device, id: int | None, ptr: int | None, allocation_id: int | None
    ) -> TensorKey | None:
        if id is None or not ptr or allocation_id is None:
            return None
        return cls(device, id, StorageId(ptr, allocation_id))


# One of our events, or one of torch's; its classes have no public names.
AnyEvent: TypeAlias = Any
TensorAndID: TypeAlias = tuple[TensorKey, int]
TimelineEntry: TypeAlias = tuple[int, Action, tuple[DeviceKey, int], int]


def extract_parameters(event: AnyEvent) -> Iterator[TensorKey]:
    """Yield the parameters of the module or optimizer that an event calls."""
    for parameter, _ in _extracted(event):
        if parameter is not None:
            yield parameter


def extract_gradients(event: AnyEvent) -> Iterator[tuple[TensorKey | None, TensorKey]]:
    """Yield the gradients that an event shows, each with its parameter where that is known.

    A call of a module or of an optimizer shows both; AccumulateGrad the gradient alone.
    """
    for parameter, gradient in _extracted(event):
        if gradient is not None:
            yield parameter, gradient


def _extracted(event: AnyEvent) -> Iterator[tuple[TensorKey | None, TensorKey | None]]:
    if not isinstance(event, TreeEvent):
        yield from _extracted_from_torchs(event)
        return
    if event.scope is Scope.BACKWARD_FUNCTION and event.name == _ACCUMULATE:
        first = next(iter(event.children), None)
        if first is not None and first.name in _KEEPING:
            yield from ((None, _key(first, row)) for row in first.tensor_rows[:1])
        return
    roles = event.columns.roles
    pairs: list[tuple[TensorKey | None, TensorKey | None]] = []
    for row in event.tensor_rows:
        # A gradient follows its parameter.
        if roles[row] in _PARAMETERS:
            pairs.append((_key(event, row), None))
        elif roles[row] in _GRADIENTS:
            pairs[-1] = pairs[-1][0], _key(event, row)
    yield from pairs


def _extracted_from_torchs(event: Any) -> Iterator[tuple[TensorKey | None, TensorKey | None]]:
    key, fields = TensorKey.from_tensor, event.extra_fields
    if isinstance(fields, profiler.TorchOpFields):
        if fields.scope.name == Scope.BACKWARD_FUNCTION.name and event.name == _ACCUMULATE:
            first = next(iter(event.children), None)
            if first is not None and first.name in _KEEPING:
                tensor = first.extra_fields.inputs[0]
                if isinstance(tensor, profiler.TensorMetadata):
                    yield None, key(tensor)
    elif isinstance(fields, profiler.PyCallFields):
        if fields.module is not None:
            for _, parameter, gradient in fields.module.parameters:
                yield key(parameter), key(gradient)
        if fields.optimizer is not None:
            for parameter, gradient, _ in fields.optimizer.parameters:
                yield key(parameter), key(gradient)


def _key(event: TreeEvent, row: int) -> TensorKey | None:
    trace = event.columns.tree.trace
    tensor = trace.tensors[row]
    if not tensor["keyed"]:
        return None
    storage = StorageId(int(tensor["ptr"]), int(tensor["allocation_id"]))
    device = torch.device(trace.devices[tensor["device"]])
    return TensorKey(device, int(tensor["id"]), storage)


class SchemaMatcher:
    """Finds the schemas that an operator may have had, as the recording holds them.

    It takes an event of ours, or the ``extra_fields`` of an operator of torch's tree.
    """

    @classmethod
    def match_schemas(cls, event: AnyEvent) -> tuple[SchemaName, ...]:
        """The overloads whose schemas fit an event's inputs, by name: ``aten::add_.Tensor``."""
        if isinstance(event, TreeEvent):
            return tuple(map(SchemaName, event.overloads))
        name = str(event.name)
        found = _signature(event).overloads
        return tuple(SchemaName(f"{name}.{overload}" if overload else name) for overload in found)

    @classmethod
    def inputs_are_mutable(cls, event: AnyEvent) -> tuple[bool | None, ...]:
        """For each argument whether it may be written to; None where no schema fits."""
        writes = event.writes if isinstance(event, TreeEvent) else _signature(event).texts[1]
        return tuple(_WRITES[letter] for letter in writes)

    @staticmethod
    def lookup_schemas(name: str) -> tuple[object, ...] | None:
        """Every schema of an operator's name, as torch gives it; None without any."""
        return dispatcher.schemas_of(name) or None


class SchemaName(str):
    """The name of an overload, ``aten::add_.Tensor``, with the parts that torch's schemas have."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self.partition(".")[0]

    @property
    def overload_name(self) -> str:
        return self.partition(".")[2]


def _signature(fields: profiler.TorchOpFields) -> Signature:
    return InputShapes(StringTable()).resolve_again(fields)


class SizeMap:
    """The bytes of each tensor key: its allocation's, or else the largest extent seen."""

    def __init__(self, op_tree: OpTreeView) -> None:
        self._graph = DataFlowGraphView(op_tree)

    def __getitem__(self, key: TensorKey) -> int:
        return int(self._graph.columns.keys.size_bytes[self._graph.numbers[key]])


@dataclass(frozen=True, slots=True)
class DataFlowEdge:
    """A node's use of a key.

    Attributes:
        input_version: The version that it takes in, None where it allocates the key.
        mutated: Whether it may write to the key, None where it frees it.
    """

    input_version: int | None
    mutated: bool | None

    @property
    def is_allocation(self) -> bool:
        return self.input_version is None

    @property
    def is_deletion(self) -> bool:
        return self.mutated is None


@dataclass(frozen=True, slots=True)
class DataFlowNode:
    """A node of the graph: an operator, or an allocation or free outside of all."""

    event: TreeEvent
    edges: Mapping[TensorKey, DataFlowEdge]

    @property
    def inputs(self) -> dict[TensorKey, tuple[bool, int]]:
        """Each key that it takes in: whether it may write to it, and the version."""
        return {
            key: (bool(edge.mutated), edge.input_version)
            for key, edge in self.edges.items()
            if edge.input_version is not None
        }

    @property
    def outputs(self) -> dict[TensorKey, int]:
        """Each key that it brings out, and the version."""
        return {
            key: 0 if edge.input_version is None else edge.input_version + 1
            for key, edge in self.edges.items()
            if (edge.is_allocation and not edge.is_deletion) or edge.mutated
        }

    @property
    def intermediates(self) -> tuple[TensorKey, ...]:
        """The keys that live and die within it."""
        return tuple(k for k, e in self.edges.items() if e.is_allocation and e.is_deletion)

    @property
    def start_time(self) -> int:
        """When it started, in nanoseconds."""
        return self.event.start_time_ns

    @property
    def _event(self) -> TreeEvent:
        return self.event

    @property
    def _edges(self) -> Mapping[TensorKey, DataFlowEdge]:
        return self.edges


class DataFlowGraphView:
    """torch's ``DataFlowGraph``: nodes and edges as objects. ``columns`` holds the same as arrays.

    Raises `TraceError` if the nodes, in their order, make no data-flow graph.
    """

    def __init__(self, op_tree: OpTreeView) -> None:
        self.op_tree = op_tree
        self.columns = op_tree.labelled.graph
        self.validate()

    def validate(self) -> None:
        """Raise `TraceError` unless each version is made once, and used as the last one made."""
        self.columns.validate()

    def dump(self) -> str:
        """Return one line for each node: its name, the versions in, and the versions out."""
        return self.columns.dump()

    @cached_property
    def keys(self) -> list[TensorKey]:
        """The tensor keys, as the columns number them."""
        keys, trace = self.columns.keys, self.columns.tree.trace
        pointers = np.zeros(len(keys), np.uint64)
        for number, table in (
            (keys.of_tensor, trace.tensors),
            (keys.of_allocation, trace.allocations),
        ):
            pointers[number[number >= 0]] = table["ptr"][number >= 0]
        columns = (keys.id, keys.allocation_id, keys.device, pointers)
        devices = [torch.device(name) for name in trace.devices]
        return [
            TensorKey(devices[device], id, StorageId(ptr, allocation_id))
            for id, allocation_id, device, ptr in zip(*(c.tolist() for c in columns), strict=True)
        ]

    @cached_property
    def numbers(self) -> dict[TensorKey, int]:
        """The number of each key."""
        return {key: number for number, key in enumerate(self.keys)}

    @property
    def leaf_events(self) -> tuple[TreeEvent, ...]:
        """The event of each node, in the order of start times."""
        lists = self.op_tree.columns
        return tuple(TreeEvent(lists, row) for row in self.columns.node_event.tolist())

    @cached_property
    def flow_nodes(self) -> tuple[DataFlowNode, ...]:
        """Every node, in the order of start times."""
        graph = self.columns
        edges: list[dict[TensorKey, DataFlowEdge]] = [{} for _ in graph.node_event]
        names = ("node", "key", "version", "allocates", "frees", "mutates")
        rows = zip(*(getattr(graph, name).tolist() for name in names), strict=True)
        for node, key, version, allocates, frees, mutates in rows:
            edges[node][self.keys[key]] = DataFlowEdge(
                None if allocates else version, None if frees else mutates
            )
        return tuple(map(DataFlowNode, self.leaf_events, edges))

    def lookup(self, key: TensorKey) -> int:
        """The last version of a key. Raises `KeyError` for one that is not in the graph."""
        return int(np.diff(self.columns.version_offset)[self.numbers[key]]) - 1

    @property
    def _active_version(self) -> dict[TensorKey, int]:
        return {key: self.lookup(key) for key in self.keys}


class CategoryDict:
    """torch's label for each version of each key."""

    def __init__(self, graph: DataFlowGraphView, labels: TorchLabels) -> None:
        self._graph = graph
        self._labels = labels

    def get(self, key: DeviceKey, version: int) -> TorchCategory | None:
        """The category of a version; None where torch has none, and for memory without a key."""
        if not isinstance(key, TensorKey):
            return None
        number = self._graph.numbers[key]
        first, after = self._graph.columns.version_offset[number : number + 2].tolist()
        labels = [self._labels.by_id[key.id], self._labels.by_key[number]]
        if first + version < after:
            labels.append(self._labels.by_version[first + version])
        return next((found for label in labels if (found := _CATEGORIES[label])), None)


class MemoryProfileView:
    """torch's ``MemoryProfile``: a finished profile, or a trace, under torch's labels.

    ``result`` is a ``torch.profiler.profile`` with shapes, memory and stacks, its
    ``kineto_results``, or a `Trace`. Raises `TraceError` for a profile that has not finished, and
    `ValueError` for one that did not record enough.
    """

    def __init__(self, result: object) -> None:
        if lacking := [name for name in _NEEDED if getattr(result, name, True) is False]:
            options = ", ".join(f"{name}=True" for name in lacking)
            raise ValueError(f"{options} required for memory profiling.")
        self._result = result
        self.op_tree = OpTreeView(result)
        self.data_flow_graph = DataFlowGraphView(self.op_tree)
        self.columns = self.op_tree.labelled

    @cached_property
    def size_map(self) -> SizeMap:
        return SizeMap(self.op_tree)

    @cached_property
    def categories(self) -> CategoryDict:
        return CategoryDict(self.data_flow_graph, self.columns.labels)

    @property
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """(time in ns, action, (key, version), bytes), by time; -1 for what was there before."""
        entries = self.columns.entries
        devices = [torch.device(name) for name in self.op_tree.tree.trace.devices]
        keys = self.data_flow_graph.keys
        names = ("time_ns", "action", "key", "version", "size_bytes", "device")
        rows = zip(*(entries[name].tolist() for name in names), strict=True)
        return tuple(
            (
                time,
                Action(action),
                (keys[key] if key >= 0 else DeviceKey(devices[device]), version),
                size,
            )
            for time, action, key, version, size, device in rows
        )

    def category_snapshot(self) -> dict[TensorAndID, TorchCategory | None]:
        """The category of each version of each key that a node or an owner mentions."""
        graph = self.data_flow_graph.columns
        counts = np.diff(graph.version_offset)
        return {
            (key, version): self.categories.get(key, version)
            for number in np.flatnonzero(in_snapshot(graph)).tolist()
            for key in (self.data_flow_graph.keys[number],)
            for version in range(int(counts[number]))
        }

    @property
    def _data_flow_graph(self) -> DataFlowGraphView:
        return self.data_flow_graph

    @property
    def _categories(self) -> CategoryDict:
        return self.categories

    @property
    def _size_map(self) -> SizeMap:
        return self.size_map

    def _category_snapshot(self) -> dict[TensorAndID, TorchCategory | None]:
        return self.category_snapshot()

    @cached_property
    def _op_tree(self) -> OpTreeView | TorchTree:
        """The tree of torch's own events; of a stored trace, which has none, that of ours."""
        return (
            OpTreeView(self._result) if isinstance(self._result, Trace) else TorchTree(self._result)
        )


class TorchTree:
    """The events of a finished profile as torch has them, with every call of Python."""

    def __init__(self, result: Any) -> None:
        inner = getattr(result, "profiler", result)
        self.roots: list[Any] = getattr(inner, "kineto_results", inner).experimental_event_tree()

    def dfs(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Yield each event before those in it."""
        yield from traverse_dfs(self.roots, *args, **kwargs)

    @property
    def sorted_nodes(self) -> tuple[Any, ...]:
        """Every event in the order of start times."""
        return tuple(sorted(self.dfs(), key=lambda event: event.start_time_ns))


class MemoryProfileTimeline:
    """The timeline of a memory profile, and the files that torch writes of it."""

    def __init__(self, memory_profile: MemoryProfileView) -> None:
        self.timeline = memory_profile.timeline
        self.categories = memory_profile.categories
        self._columns = memory_profile.columns

    def coalesce_timeline(self, device: Device | None = None) -> tuple[list[int], list[list[int]]]:
        """Times in µs, and for each the bytes by category in torch's order behind a 0."""
        return self._columns.coalesced(device)

    _coalesce_timeline = coalesce_timeline

    def export_memory_timeline(
        self, path: str | os.PathLike[str], device: Device | None = None
    ) -> None:
        """Write `coalesce_timeline` as JSON."""
        write_json(os.fspath(path), self.coalesce_timeline(device))

    def export_memory_timeline_raw(
        self, path: str | os.PathLike[str], device: Device | None = None
    ) -> None:
        """Write each change as (time in ns, action, bytes, index of the category) as JSON."""
        write_json(os.fspath(path), self._columns.raw(device))

    def export_memory_timeline_html(
        self,
        path: str | os.PathLike[str],
        device: Device | None = None,
        figsize: tuple[float, float] = (20, 12),
        title: str | None = None,
    ) -> None:
        """Write a page with a picture of bytes by category.

        ``figsize`` is taken for torch's sake: the picture is as wide as the window that shows it.
        """
        name = self._columns.tree.trace.device_named(device)
        write_timeline_page(Path(path), self._columns.timeline(device), title or name)


Category = TorchCategory
Key = DeviceKey
MemoryProfile = MemoryProfileView
OpTree = OpTreeView
DataFlowGraph = DataFlowGraphView
