"""Graphs: the memory that one would need, estimated from its nodes. Nothing runs.

from pytest_torchmem import GiB, estimate_graph

result = estimate_graph(torch.export.export(model, (batch,)))
assert result.peak.total <= 24 * GiB
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.analysis.estimated.static import (
    join_pair,
    lifetimes_by_last_use,
    made_by_operator,
)
from pytest_torchmem.record.graphs import fx_graphs
from pytest_torchmem.values.errors import EstimateError, is_torchmem_error
from pytest_torchmem.values.static_graph import StaticGraph, StaticRun
from pytest_torchmem.values.units import Device, resolve_device

__tracebackhide__ = is_torchmem_error


def estimate_graph(
    graph: object,
    device: Device | None = None,
    is_releasable: Callable[[object], bool] | None = None,
) -> Estimate:
    """Return what a traced graph needs if it is run node by node, each storage released after its
    last use and the graph's inputs kept by the caller.

    ``is_releasable`` is asked of each node of the graph whether what it makes is released after its
    last use; without it, everything is but inputs and attributes.

    ``graph`` is a ``torch.fx.Graph``, a ``GraphModule`` or a ``torch.export.ExportedProgram`` whose
    nodes carry fake tensors. ``device`` defaults to the one that holds most. Raises
    `EstimateError`, and `DeviceError` for a device that nothing in the graph is on.
    """
    read = fx_graphs.read_graph(graph)
    releasable = (
        made_by_operator if is_releasable is None else fx_graphs.with_fx_nodes(graph, is_releasable)
    )
    lifetimes = lifetimes_by_last_use(read, releasable)
    return Estimate.of(StaticRun(read, lifetimes, _device_of([read], device)))


def estimate_pair(forward: object, backward: object, device: Device | None = None) -> Estimate:
    """Return what a partitioned forward and its backward graph need, one after the other.

    What the forward saved lives until its last use in the backward; see `estimate_graph` for the
    rest.
    """
    graphs = fx_graphs.read_pair(forward, backward)
    return Estimate.of(join_pair(*graphs, _device_of(graphs, device)))


def _device_of(graphs: Sequence[StaticGraph], device: Device | None) -> str:
    """Return the device that is meant; a graph of nothing at all is an error, as no limit fails."""
    there = fx_graphs.devices_of(graphs)
    if not there:
        raise EstimateError("the graph makes and reads no tensor, so there is nothing to estimate")
    return there[0] if device is None else resolve_device(device, there, "the graph")
