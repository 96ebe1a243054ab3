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
from pytest_torchmem.record.devices import named_device
from pytest_torchmem.record.graphs import fx_graphs
from pytest_torchmem.values.errors import (
    DeviceNameError,
    EstimateError,
    MarkerError,
    is_torchmem_error,
)
from pytest_torchmem.values.static_graph import StaticGraph, StaticRun

__tracebackhide__ = is_torchmem_error


def estimate_graph(
    graph: object, device: str | None = None, is_releasable: Callable[[object], bool] | None = None
) -> Estimate:
    """Return what a traced graph needs if it is run node by node, each storage released after its
    last use and the graph's inputs kept by the caller.

    ``is_releasable`` is asked of each node of the graph whether what it makes is released after its
    last use; without it, everything is but inputs and attributes.

    ``graph`` is a ``torch.fx.Graph``, a ``GraphModule`` or a ``torch.export.ExportedProgram`` whose
    nodes carry fake tensors. ``device`` defaults to the one that holds most. Raises
    `EstimateError`.
    """
    read, name = fx_graphs.read_graph(graph), _device_name(device)
    releasable = (
        made_by_operator if is_releasable is None else fx_graphs.with_fx_nodes(graph, is_releasable)
    )
    lifetimes = lifetimes_by_last_use(read, releasable)
    return _result(StaticRun(read, lifetimes, _device_of([read], name)))


def estimate_pair(forward: object, backward: object, device: str | None = None) -> Estimate:
    """Return what a partitioned forward and its backward graph need, one after the other.

    What the forward saved lives until its last use in the backward; see `estimate_graph` for the
    rest.
    """
    graphs = fx_graphs.read_pair(forward, backward)
    return _result(join_pair(*graphs, _device_of(graphs, _device_name(device))))


def _device_name(device: object) -> str | None:
    """Return a device as text. Raises `DeviceNameError` and `MarkerError`."""
    if device is None:
        return None
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise MarkerError(f"device: {device!r} is not a device; give text such as 'cuda'")
    try:
        return str(named_device(str(device)))
    except DeviceNameError as error:
        raise error.with_traceback(None) from None


def _device_of(graphs: Sequence[StaticGraph], device: str | None) -> str:
    if device is None:
        return next(iter(fx_graphs.devices_of(graphs)), "cpu")
    return device if ":" in device or device == "cpu" else f"{device}:0"


def _result(run: StaticRun) -> Estimate:
    """The run's result; a reading of nothing at all is an error, as no limit could fail on it."""
    devices = fx_graphs.devices_of([run.graph])
    if not devices:
        raise EstimateError("the graph makes and reads no tensor, so there is nothing to estimate")
    if run.device not in devices:
        raise EstimateError(
            f"nothing in the graph is on {run.device}; its tensors are on {', '.join(devices)}"
        )
    return Estimate.of(run)
