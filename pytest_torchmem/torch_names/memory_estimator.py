"""The names of ``torch._inductor.fx_passes.memory_estimator``, for graphs of any device.

    from pytest_torchmem.torch_names.memory_estimator import MemoryTracker, build_memory_profile

    rows = build_memory_profile(graph, is_releasable=lambda node: node.op == "call_function")

Arguments and results are torch's, with three differences: every function takes a
``device_filter``, which by default accepts every device (torch's leaves out the CPU, and so
answers 0 for a graph on it); sizes that are symbolic are their hints before ``size_of`` sees them;
``get_peak_memory`` gives a number, where torch 2.13 raises. Graphs may be whatever `estimate`
takes. Sizes are bytes. Raises `EstimateError` for a graph whose nodes carry no fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Protocol, TypeAlias

from pytest_torchmem.analysis.estimated.estimated_result import ScheduledMemory
from pytest_torchmem.analysis.estimated.static import (
    interactions,
    memory_profile,
    not_primal,
    pair_peak_bytes,
)
from pytest_torchmem.record.devices import named_device
from pytest_torchmem.record.graphs.fx_graphs import (
    graph_nodes,
    read_graph,
    read_pair,
    with_fx_nodes,
)
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode

__all__ = [
    "GraphAliasTracker",
    "MemoryTracker",
    "StorageKey",
    "build_memory_profile",
    "device_filter",
    "get_fwd_bwd_interactions",
    "get_peak_memory",
]


class FxNode(Protocol):
    """The part of a ``torch.fx.Node`` that is looked at here."""

    @property
    def name(self) -> str: ...


class DeviceType(Protocol):
    """The part of a ``torch.device`` that filters look at."""

    @property
    def type(self) -> str: ...


IsReleasable: TypeAlias = Callable[[FxNode], bool]
SizeOf: TypeAlias = Callable[[int], int]
SizeOfNode: TypeAlias = Callable[[FxNode], int]
DeviceFilter: TypeAlias = Callable[[DeviceType], bool]


def device_filter(device: DeviceType) -> bool:
    """The filter that torch's functions have by default: everything but the CPU."""
    return device.type != "cpu"


def build_memory_profile(
    graph: object,
    is_releasable: IsReleasable | SizeOfNode,
    size_of: SizeOf | SizeOfNode | IsReleasable | None = None,
    device_filter: DeviceFilter | None = None,
) -> list[int]:
    """Return the bytes in use before the first node, and during and after each: 1 + 2 N numbers.

    ``is_releasable`` says of the node that made a storage whether its last use releases it.

    The older form is answered, too: ``build_memory_profile(graph, size_of, is_releasable)``, where
    ``size_of`` takes a node. Of two functions the one that answers True or False for a node is
    ``is_releasable``. A ``size_of`` that cannot take a number, or whose parameter is called
    ``node``, takes a node; where that makes several storages, each gets its share by size.
    """
    releasable: Any = is_releasable
    sizes: Any = size_of
    if sizes is not None and _answers_bool(graph, sizes):
        releasable, sizes = sizes, releasable
    read = read_graph(graph)
    if sizes is not None and _takes_node(sizes):
        read = _sized_by_node(read, with_fx_nodes(graph, sizes))
    else:
        read = _sized(read, sizes)
    return memory_profile(read, with_fx_nodes(graph, releasable), _by_name(device_filter))


def get_fwd_bwd_interactions(
    fwd_graph: object,
    bwd_graph: object,
    size_of: SizeOf | None = None,
    device_filter: DeviceFilter | None = None,
) -> tuple[int, set[str]]:
    """Return the bytes that stay throughout the backward graph, and what it may not release.

    The former are outputs of the forward that the backward does not take; the latter are names of
    backward inputs that look into primals, or that the forward did not make.
    """
    forward, backward = (_sized(read, size_of) for read in read_pair(fwd_graph, bwd_graph))
    return interactions(forward, backward, _by_name(device_filter))


def get_peak_memory(
    fwd_graph: object, bwd_graph: object, device_filter: DeviceFilter | None = None
) -> int:
    """Return the larger peak of a forward graph and its backward, with what stays between them.

    As torch defines it: primals that the backward does not take are left out of its peak.
    `pytest_torchmem.estimate(forward, backward=backward)` counts them.
    """
    return pair_peak_bytes(*read_pair(fwd_graph, bwd_graph), _by_name(device_filter))


class MemoryTracker:
    """The bytes in use while the nodes of a graph are scheduled in an order of one's own."""

    def __init__(
        self,
        graph: object,
        is_releasable: IsReleasable | None = None,
        device_filter: DeviceFilter | None = None,
    ) -> None:
        releasable = not_primal if is_releasable is None else with_fx_nodes(graph, is_releasable)
        self._memory = ScheduledMemory(read_graph(graph), releasable, _by_name(device_filter))

    def schedule_node(self, node: FxNode) -> None:
        """Run a node next. Raises `EstimateError` for one that ran, or that needs another first."""
        self._memory.schedule(node.name)

    def get_current_memory_bytes(self) -> int:
        """Return the bytes in use after what was scheduled."""
        return self._memory.current_bytes

    @property
    def peak_memory(self) -> int:
        """The most bytes that were in use so far."""
        return self._memory.peak_bytes


@dataclass(frozen=True, slots=True)
class StorageKey:
    """A storage of a graph: its number there, its device, and its bytes."""

    number: int
    device: str
    size_bytes: int


class GraphAliasTracker:
    """The nodes of a graph that make a storage, that use it, and that use it last.

    ``nodes`` are a graph's, all of them, in order.
    """

    def __init__(self, nodes: Iterable[FxNode]) -> None:
        self._graph = read_graph(graph_nodes(nodes))
        self._nodes = {node.name: node for node in self._graph.nodes}
        self._last_user: dict[int, str] = {
            storage: node.name
            for node in self._graph.nodes
            if node.kind is not NodeKind.INPUT
            for storage in node.uses
        }

    def get_fresh_allocations(self, node: FxNode) -> set[StorageKey]:
        """The storages that a node makes: no views."""
        return self._keys(self._nodes[node.name].makes)

    def get_storage_uses(self, node: FxNode) -> set[StorageKey]:
        """The storages that a node's inputs look into."""
        read = self._nodes[node.name]
        return set() if read.kind is NodeKind.INPUT else self._keys(read.uses)

    def get_storages_last_used(self, node: FxNode) -> set[StorageKey]:
        """The storages that no later node uses."""
        used = self.get_storage_uses(node)
        return {key for key in used if self._last_user[key.number] == node.name}

    def _keys(self, storages: Iterable[int]) -> set[StorageKey]:
        table = self._graph.storages
        return {StorageKey(s, table[s].device, table[s].size_bytes) for s in storages}


def _sized(graph: StaticGraph, size_of: SizeOf | None) -> StaticGraph:
    if size_of is None:
        return graph
    storages = tuple(replace(s, size_bytes=size_of(s.size_bytes)) for s in graph.storages)
    return replace(graph, storages=storages)


def _answers_bool(graph: Any, asked: Callable[..., object]) -> bool:
    """Return whether a function answers True or False for the first node of a graph."""
    try:
        first = next(iter(getattr(graph, "graph", graph).nodes))
        return isinstance(asked(first), bool)
    except (AttributeError, KeyError, StopIteration, TypeError):
        return False


def _takes_node(size_of: Callable[..., object]) -> bool:
    """Return whether a function of sizes takes a node, and not bytes."""
    try:
        name = next(iter(signature(size_of).parameters), "")
    except (TypeError, ValueError):
        name = ""
    if name in ("node", "nodes"):
        return True
    try:
        size_of(1)
    except (AttributeError, KeyError, TypeError):
        return True
    return False


def _sized_by_node(graph: StaticGraph, size_of: Callable[[StaticNode], int]) -> StaticGraph:
    storages = list(graph.storages)
    for node in graph.nodes:
        if not node.makes:
            continue
        own_bytes = [storages[made].size_bytes for made in node.makes]
        rest_bytes, rest_own = int(size_of(node)), sum(own_bytes)
        for made, size_bytes in zip(node.makes, own_bytes, strict=True):
            share = rest_bytes * size_bytes // rest_own if size_bytes < rest_own else rest_bytes
            storages[made] = replace(storages[made], size_bytes=share)
            rest_bytes, rest_own = rest_bytes - share, rest_own - size_bytes
    return replace(graph, storages=tuple(storages))


def _by_name(accepts: DeviceFilter | None) -> Callable[[str], bool]:
    if accepts is None:
        return lambda _: True
    return lambda name: accepts(named_device(name))
