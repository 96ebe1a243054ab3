"""The names of ``torch._inductor.fx_passes.memory_estimator``, for graphs of any device.

    from pytest_torchmem.torch_names.memory_estimator import MemoryTracker, build_memory_profile

    rows = build_memory_profile(graph, is_releasable=lambda node: node.op == "call_function")

Differences from torch: every function takes a ``device_filter``, and without one counts every
device, the CPU too; ``size_of`` sees symbolic sizes as their hints; ``get_peak_memory`` gives a
number, where torch 2.13 raises. Graphs are what `estimate` takes. Sizes are bytes. Raises
`EstimateError` for a graph whose nodes carry no fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from inspect import signature
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch

from pytest_torchmem.analysis.estimated import static
from pytest_torchmem.analysis.estimated.estimated_result import ScheduledMemory
from pytest_torchmem.record.devices import named_device
from pytest_torchmem.record.graphs.fx_graphs import graph_nodes, read_graph, read_pair
from pytest_torchmem.record.graphs.fx_graphs import with_fx_nodes as asked
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode

IsReleasable: TypeAlias = Callable[[torch.fx.Node], bool]
SizeOf: TypeAlias = Callable[[int], int]
SizeOfNode: TypeAlias = Callable[[torch.fx.Node], int]
DeviceFilter: TypeAlias = Callable[[torch.device], bool]


def device_filter(device: torch.device) -> bool:
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
    read = read_graph(graph)
    releasable: Any = is_releasable
    sizes: Any = size_of
    first = next(iter(graph_nodes([graph]).nodes), None)
    if isinstance(_answer(sizes, first), bool):
        releasable, sizes = sizes, releasable
    read = _sized_by_node(read, asked(graph, sizes)) if _takes_node(sizes) else _sized(read, sizes)
    return static.memory_profile(read, asked(graph, releasable), _by_name(device_filter))


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
    return static.interactions(forward, backward, _by_name(device_filter))


def get_peak_memory(
    fwd_graph: object, bwd_graph: object, device_filter: DeviceFilter | None = None
) -> int:
    """Return the larger peak of a forward graph and its backward, with what stays between them.

    As torch defines it: primals that the backward does not take are left out of its peak.
    `pytest_torchmem.estimate(forward, backward=backward)` counts them.
    """
    return static.pair_peak_bytes(*read_pair(fwd_graph, bwd_graph), _by_name(device_filter))


class MemoryTracker(ScheduledMemory):
    """The bytes in use while the nodes of a graph are scheduled in an order of one's own."""

    def __init__(
        self,
        graph: object,
        is_releasable: IsReleasable | None = None,
        device_filter: DeviceFilter | None = None,
    ) -> None:
        releasable = asked(graph, is_releasable) if is_releasable else static.not_primal
        super().__init__(read_graph(graph), releasable, _by_name(device_filter))


class StorageKey(NamedTuple):
    """A storage of a graph: its number there, its device, and its bytes."""

    number: int
    device: str
    size_bytes: int


class GraphAliasTracker:
    """Tells which nodes of a graph, given in order, make a storage, use it, and use it last."""

    def __init__(self, nodes: Iterable[torch.fx.Node]) -> None:
        graph = read_graph(graph_nodes(nodes))
        keys = [StorageKey(n, s.device, s.size_bytes) for n, s in enumerate(graph.storages)]
        self._keys_made = {node.name: {keys[s] for s in node.makes} for node in graph.nodes}
        self._keys_used = {
            node.name: {keys[s] for s in node.uses if node.kind is not NodeKind.INPUT}
            for node in graph.nodes
        }
        self._last_user = {key: name for name, used in self._keys_used.items() for key in used}

    def get_fresh_allocations(self, node: torch.fx.Node) -> set[StorageKey]:
        """The storages that a node makes: no views."""
        return self._keys_made[node.name]

    def get_storage_uses(self, node: torch.fx.Node) -> set[StorageKey]:
        """The storages that a node's inputs look into."""
        return self._keys_used[node.name]

    def get_storages_last_used(self, node: torch.fx.Node) -> set[StorageKey]:
        """The storages that no later node uses."""
        return {key for key in self._keys_used[node.name] if self._last_user[key] == node.name}


def _sized(graph: StaticGraph, size_of: SizeOf | None) -> StaticGraph:
    sized = (replace(s, size_bytes=size_of(s.size_bytes)) if size_of else s for s in graph.storages)
    return replace(graph, storages=tuple(sized))


def _answer(function: Any, value: object) -> object:
    """Return what a function answers for a value; None where it takes no such value."""
    try:
        return function(value)
    except (AttributeError, KeyError, TypeError):
        return None


def _takes_node(size_of: Any) -> bool:
    """Return whether a function of sizes takes a node, and not bytes."""
    try:
        takes = next(iter(signature(size_of).parameters), "")
    except (TypeError, ValueError):  # no function, or one of Python's own
        takes = ""
    return takes == "node" or (size_of is not None and _answer(size_of, 1) is None)


def _sized_by_node(graph: StaticGraph, size_of: Callable[[StaticNode], int]) -> StaticGraph:
    storages = list(graph.storages)
    for node in graph.nodes:
        until = [0, *accumulate(storages[made].size_bytes for made in node.makes)]
        whole = int(size_of(node)) if node.makes else 0
        shares = [whole * size // max(1, until[-1]) for size in until[:-1]]
        for made, (begin, end) in zip(node.makes, pairwise([*shares, whole]), strict=True):
            storages[made] = replace(storages[made], size_bytes=end - begin)
    return replace(graph, storages=tuple(storages))


def _by_name(accepts: DeviceFilter | None) -> Callable[[str], bool]:
    return lambda name: accepts is None or accepts(named_device(name))
