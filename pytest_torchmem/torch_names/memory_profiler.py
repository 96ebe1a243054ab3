"""The names of ``torch.profiler._memory_profiler``, over our columns.

    from pytest_torchmem.torch_names.memory_profiler import MemoryProfile

    profile = MemoryProfile(finished)  # a torch.profiler.profile
    for time_ns, action, (key, version), size_bytes in profile.timeline: ...

Nothing is computed here: all of it is in `analysis.torch_view`. Events are torch's own. A category
that torch does not know is None, as there. What has an underscore in torch and was used all the
same goes by that name, too: ``_data_flow_graph`` is ``data_flow_graph``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.torch_view.torch_timeline import Action as Action
from pytest_torchmem.analysis.torch_view.torch_timeline import TorchMemoryProfile, in_snapshot
from pytest_torchmem.measuring.profile import write_json, write_timeline_page
from pytest_torchmem.record.profiled.event_tree import are_calls
from pytest_torchmem.record.profiled.from_profiler import trace_of
from pytest_torchmem.record.profiled.mentions import signature_of
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.torch_names import utils
from pytest_torchmem.values.contributors import Category as OurCategory
from pytest_torchmem.values.trace import Mutable
from pytest_torchmem.values.units import Device

#: torch's seven categories, numbered as there.
Category = Enum(
    "Category", "INPUT TEMPORARY ACTIVATION GRADIENT AUTOGRAD_DETAIL PARAMETER OPTIMIZER_STATE"
)
_CATEGORIES: Final = tuple(Category.__members__.get(c.name) for c in OurCategory)


@dataclass(frozen=True, slots=True)
class Key:
    """Memory of which no more is known than its device."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class StorageId:
    """A storage: its address, for printing, and the number that the profiler gave to it."""

    ptr: int
    allocation_id: int


@dataclass(frozen=True, slots=True)
class TensorKey(Key):
    """A tensor in one storage; keys are ordered by id, allocation id and device."""

    id: int
    storage: StorageId

    def __lt__(self, other: TensorKey) -> bool:
        one, two = ((k.id, k.storage.allocation_id, str(k.device)) for k in (self, other))
        return one < two

    @classmethod
    def from_tensor(cls, tensor: Any) -> TensorKey | None:
        """The key of a tensor as torch's profiler has it; None without a storage."""
        return None if tensor is None else cls._of(tensor, profiler.storage_pointer(tensor))

    @classmethod
    def from_allocation(cls, allocation: Any) -> TensorKey | None:
        """The key of an allocation of torch's profiler; None where it belongs to no tensor."""
        return cls._of(allocation, allocation.ptr)

    @classmethod
    def _of(cls, found: Any, ptr: int | None) -> TensorKey | None:
        if found.id is None or not ptr or found.allocation_id is None:
            return None
        return cls(found.device, found.id, StorageId(ptr, found.allocation_id))


AnyEvent: TypeAlias = Any  # the classes of torch's events have no public names
TensorAndID: TypeAlias = tuple[TensorKey, int]
Target: TypeAlias = str | os.PathLike[str]
TimelineEntry: TypeAlias = tuple[int, Action, tuple[Key, int], int]


def extract_parameters(event: AnyEvent) -> Iterator[TensorKey]:
    """Yield the parameters of the module or optimizer that an event calls."""
    for parameter, _ in _owned(event):
        if parameter is not None:
            yield parameter


def extract_gradients(event: AnyEvent) -> Iterator[tuple[TensorKey | None, TensorKey]]:
    """Yield the gradients that an event shows, each with its parameter where that is known."""
    is_node = event.tag.name == "TorchOp" and get_scopes(event)[0].name == "BACKWARD_FUNCTION"
    if is_node and event.name == "torch::autograd::AccumulateGrad":
        keeps = [e for e in event.children[:1] if e.name in ("aten::detach", "aten::add_")]
        for kept in (e.extra_fields.inputs[0] for e in keeps):
            if isinstance(kept, profiler.TensorMetadata) and (key := TensorKey.from_tensor(kept)):
                yield None, key
    for parameter, gradient in _owned(event):
        if gradient is not None:
            yield parameter, gradient


def _owned(event: AnyEvent) -> Iterator[tuple[TensorKey | None, TensorKey | None]]:
    """The parameters and gradients that the Python tracer found at a call."""
    key, fields = TensorKey.from_tensor, event.extra_fields
    if isinstance(fields, profiler.PyCallFields):
        if fields.module is not None:
            for _, parameter, gradient in fields.module.parameters:
                yield key(parameter), key(gradient)
        if fields.optimizer is not None:
            for parameter, gradient, _ in fields.optimizer.parameters:
                yield key(parameter), key(gradient)


def get_scopes(event: AnyEvent) -> tuple[Any, ...]:
    """Return the scopes of an event and of all around it that are operators, innermost first."""
    scopes = []
    while event is not None:
        if isinstance(fields := event.extra_fields, profiler.TorchOpFields):
            scopes.append(fields.scope)
        event = event.parent
    return tuple(scopes)


class SchemaMatcher:
    """Finds the schemas that an operator, an event's ``extra_fields``, may have had."""

    @classmethod
    def match_schemas(cls, operator: Any) -> tuple[Any, ...]:
        """The schemas of an operator's name that fit its inputs."""
        fitting = signature_of(operator).overloads
        schemas = dispatcher.schemas_of(operator.name)
        return tuple(schema for schema in schemas if schema.overload_name in fitting)

    @classmethod
    def inputs_are_mutable(cls, operator: Any) -> tuple[bool | None, ...]:
        """For each argument whether it may be written to; None where no schema fits."""
        writes = signature_of(operator).mutable
        return tuple(None if w is Mutable.UNKNOWN else w is Mutable.YES for w in writes)

    @staticmethod
    def lookup_schemas(name: str) -> tuple[Any, ...] | None:
        """Every schema of an operator's name; None without any."""
        return dispatcher.schemas_of(name) or None


class OpTree:
    """The events of a finished profile, and the columns read from them.

    Raises `TraceError` for anything else, and for a profile that has not finished.
    """

    def __init__(self, result: Any) -> None:
        self.columns = TorchMemoryProfile(build_op_tree(trace_of(result)))
        inner = getattr(result, "profiler", result)
        result = getattr(inner, "kineto_results", inner)
        self.roots: list[AnyEvent] = result.experimental_event_tree()

    def dfs(self, *args: Any, **kwargs: Any) -> Iterator[AnyEvent]:
        """Yield each event before those in it; see `utils.traverse_dfs`."""
        yield from utils.traverse_dfs(self.roots, *args, **kwargs)

    @property
    def sorted_nodes(self) -> tuple[AnyEvent, ...]:
        """Every event in the order of start times."""
        return tuple(sorted(self.dfs(), key=attrgetter("start_time_ns")))

    @cached_property
    def event_at(self) -> dict[int, AnyEvent]:
        """The event of each row of the columns, but for calls of Python: some have no row."""
        rows = np.flatnonzero(~are_calls(self.columns.tree.trace.events["kind"])).tolist()
        events = (event for event in self.dfs() if event.tag.name not in ("PyCall", "PyCCall"))
        return dict(zip(rows, events, strict=True))

    @cached_property
    def keys(self) -> list[TensorKey]:
        """The tensor keys, as the columns number them."""
        keys, trace = self.columns.graph.keys, self.columns.tree.trace
        pointers = np.zeros(len(keys), np.uint64)
        tables = ((keys.of_tensor, trace.tensors), (keys.of_allocation, trace.allocations))
        for number, table in tables:
            pointers[number[number >= 0]] = table["ptr"][number >= 0]
        columns = (keys.id, keys.allocation_id, keys.device, pointers)
        devices = [torch.device(name) for name in trace.devices]
        return [
            TensorKey(devices[device], id, StorageId(ptr, allocation_id))
            for id, allocation_id, device, ptr in zip(*(c.tolist() for c in columns), strict=True)
        ]


class SizeMap(dict[TensorKey, int]):
    """The bytes of each tensor key: its allocation's, or else the largest extent seen."""

    def __init__(self, op_tree: OpTree) -> None:
        sizes = op_tree.columns.graph.keys.size_bytes.tolist()
        super().__init__(zip(op_tree.keys, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class DataFlowEdge:
    """A node's use of a key."""

    input_version: int | None  # None where it allocates the key
    mutated: bool | None  # None where it frees the key

    @property
    def is_allocation(self) -> bool:
        return self.input_version is None

    @property
    def is_deletion(self) -> bool:
        return self.mutated is None


@dataclass(frozen=True, slots=True)
class DataFlowNode:
    """A node of the graph: an operator, or an allocation or free outside of all."""

    event: AnyEvent
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
        return int(self.event.start_time_ns)

    # Functions of Python: from 3.14 on a class with slots looks at their code.
    _event = property(lambda node: node.event)
    _edges = property(lambda node: node.edges)


class DataFlowGraph:
    """Nodes and edges as objects; ``columns`` holds the same as arrays.

    Raises `TraceError` if the nodes, in their order, make no data-flow graph.
    """

    def __init__(self, op_tree: OpTree) -> None:
        self.op_tree = op_tree
        self.columns = op_tree.columns.graph
        self.validate()

    def validate(self) -> None:
        """Raise `TraceError` unless each version is made once, and used as the last one made."""
        self.columns.validate()

    def dump(self) -> str:
        """Return one line for each node: its name, the versions in, and the versions out."""
        return self.columns.dump()

    @property
    def leaf_events(self) -> tuple[AnyEvent, ...]:
        """The event of each node, in the order of start times."""
        return tuple(map(self.op_tree.event_at.__getitem__, self.columns.node_event.tolist()))

    @cached_property
    def flow_nodes(self) -> tuple[DataFlowNode, ...]:
        """Every node, in the order of start times."""
        graph, keys = self.columns, self.op_tree.keys
        edges: list[dict[TensorKey, DataFlowEdge]] = [{} for _ in graph.node_event]
        names = ("node", "key", "version", "allocates", "frees", "mutates")
        rows = zip(*(getattr(graph, name).tolist() for name in names), strict=True)
        for node, key, version, allocates, frees, mutates in rows:
            edges[node][keys[key]] = DataFlowEdge(
                None if allocates else version, None if frees else mutates
            )
        return tuple(map(DataFlowNode, self.leaf_events, edges))

    def lookup(self, key: TensorKey) -> int:
        """The last version of a key. Raises `KeyError` for one that is not in the graph."""
        return self._active_version[key]

    @cached_property
    def _active_version(self) -> dict[TensorKey, int]:
        counts = np.diff(self.columns.version_offset)
        return dict(zip(self.op_tree.keys, (counts - 1).tolist(), strict=True))


class CategoryDict:
    """torch's label for each version of each key."""

    def __init__(self, op_tree: OpTree) -> None:
        self._columns = op_tree.columns
        self._numbers = {key: number for number, key in enumerate(op_tree.keys)}

    def get(self, key: Key, version: int) -> Category | None:
        """The category of a version; None where torch has none, and for memory without a key."""
        if not isinstance(key, TensorKey):
            return None
        labels, number = self._columns.labels, self._numbers[key]
        first, after = self._columns.graph.version_offset[number : number + 2].tolist()
        candidates = [labels.by_id[key.id], labels.by_key[number]]
        if first + version < after:
            candidates.append(labels.by_version[first + version])
        return next((known for label in candidates if (known := _CATEGORIES[label])), None)


class MemoryProfile:
    """A finished profile, or its ``kineto_results``, under torch's labels.

    Raises as `OpTree`, and `ValueError` for a profile that did not record enough.
    """

    def __init__(self, result: object) -> None:
        needed = ("record_shapes", "profile_memory", "with_stack")
        if lacking := [name for name in needed if getattr(result, name, True) is False]:
            options = ", ".join(f"{name}=True" for name in lacking)
            raise ValueError(f"{options} required for memory profiling.")
        self.op_tree = self._op_tree = OpTree(result)
        self.columns = self.op_tree.columns
        self.data_flow_graph = self._data_flow_graph = DataFlowGraph(self.op_tree)
        self.categories = self._categories = CategoryDict(self.op_tree)
        self.size_map = self._size_map = SizeMap(self.op_tree)

    @property
    def timeline(self) -> tuple[TimelineEntry, ...]:
        """(time in ns, action, (key, version), bytes), by time; -1 for what was there before."""
        entries, keys = self.columns.entries, self.op_tree.keys
        devices = [Key(torch.device(name)) for name in self.columns.tree.trace.devices]
        names = ("time_ns", "action", "key", "version", "size_bytes", "device")
        rows = zip(*(entries[name].tolist() for name in names), strict=True)
        return tuple(
            (time, Action(action), (keys[key] if key >= 0 else devices[device], version), size)
            for time, action, key, version, size, device in rows
        )

    def category_snapshot(self) -> dict[TensorAndID, Category | None]:
        """The category of each version of each key that a node or an owner mentions."""
        graph, keys = self.columns.graph, self.op_tree.keys
        labels = self.columns.labels.of_versions(graph).tolist()
        offsets = graph.version_offset.tolist()
        return {
            (keys[number], row - offsets[number]): _CATEGORIES[labels[row]]
            for number in np.flatnonzero(in_snapshot(graph)).tolist()
            for row in range(*offsets[number : number + 2])
        }

    _category_snapshot = category_snapshot


class MemoryProfileTimeline:
    """The timeline of a memory profile, and the files that torch writes of it."""

    def __init__(self, memory_profile: MemoryProfile) -> None:
        self.timeline = memory_profile.timeline
        self.categories = memory_profile.categories
        self._columns = memory_profile.columns

    def coalesce_timeline(self, device: Device | None = None) -> tuple[list[int], list[list[int]]]:
        """Times in µs, and for each the bytes by category in torch's order behind a 0."""
        return self._columns.coalesced(device)

    _coalesce_timeline = coalesce_timeline

    def export_memory_timeline(self, path: Target, device: Device | None = None) -> None:
        """Write `coalesce_timeline` as JSON."""
        write_json(os.fspath(path), self.coalesce_timeline(device))

    def export_memory_timeline_raw(self, path: Target, device: Device | None = None) -> None:
        """Write each change as (time in ns, action, bytes, index of the category) as JSON."""
        write_json(os.fspath(path), self._columns.raw(device))

    def export_memory_timeline_html(
        self, path: Target, device: Device | None = None, figsize: object = None, title: str = ""
    ) -> None:
        """Write a page with a picture, as wide as its window whatever ``figsize`` says."""
        name = self._columns.tree.trace.device_named(device)
        write_timeline_page(Path(path), self._columns.timeline(device), title or name)
