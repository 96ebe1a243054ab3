"""Graphs: the memory that one would need, estimated from its nodes. Nothing runs.

from pytest_torchmem import GiB, estimate

result = estimate(torch.export.export(model, (batch,)))
assert result.peak.total <= 24 * GiB
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.analysis.estimated.static import (
    join_pair,
    lifetimes_by_last_use,
    made_by_operator,
)
from pytest_torchmem.values.errors import EstimateError, MarkerError, is_torchmem_error
from pytest_torchmem.values.static_graph import StaticGraph, StaticRun
from pytest_torchmem.values.units import Device, resolve_device

if TYPE_CHECKING:
    from pytest_torchmem.record.graphs.fx_graphs import Graph

__tracebackhide__ = is_torchmem_error


def reads_as_graph(program: object) -> bool:
    """Return whether its memory is read from nodes; without torch there is no graph."""
    if "torch" not in sys.modules:
        return False
    from pytest_torchmem.record.graphs.fx_graphs import is_graph

    return is_graph(program)


def estimate_graph(
    graph: Graph,
    backward: Graph | None = None,
    device: Device | None = None,
    is_releasable: Callable[[Any], bool] | None = None,
) -> Estimate:
    """Return what a graph needs, or a pair of them; see `estimate`."""
    from pytest_torchmem.record.graphs import fx_graphs

    if backward is not None:
        if is_releasable is not None:
            raise MarkerError("estimate, is_releasable: leave it out for a pair of graphs")
        pair = fx_graphs.read_pair(graph, backward)
        return Estimate.of(join_pair(*pair, _device_of(pair, device)))
    read = fx_graphs.read_graph(graph)
    releasable = (
        made_by_operator if is_releasable is None else fx_graphs.with_fx_nodes(graph, is_releasable)
    )
    lifetimes = lifetimes_by_last_use(read, releasable)
    return Estimate.of(StaticRun(read, lifetimes, _device_of([read], device)))


def _device_of(graphs: Sequence[StaticGraph], device: Device | None) -> str:
    """Return the device that is meant; a graph of nothing at all is an error, as no limit fails."""
    from pytest_torchmem.record.graphs import fx_graphs

    devices = fx_graphs.devices_of(graphs)
    if not devices:
        raise EstimateError("the graph makes and reads no tensor, so there is nothing to estimate")
    return devices[0] if device is None else resolve_device(device, devices, "the graph")
