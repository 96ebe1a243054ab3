"""Memory without running: what a module, a function or a graph would need. Every number estimated.

from pytest_torchmem import estimate

result = estimate(model, inputs, optimizer=torch.optim.AdamW)
assert result.peak.total <= 24 * GiB
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_torchmem.analysis.gpu_questions import Estimate
from pytest_torchmem.analysis.static import join_pair, lifetimes_by_last_use
from pytest_torchmem.record.fx import devices_of, is_program, read_graph, read_pair
from pytest_torchmem.record.fx_run import record_fake_run
from pytest_torchmem.static_graph import EstimateError, StaticGraph, StaticRun

__all__ = ["estimate", "estimate_graph", "estimate_pair"]


def estimate(
    module_or_fn: Callable[..., Any],
    *args: Any,
    backward: bool = True,
    optimizer: Any = None,
    device: str | None = None,
    **kwargs: Any,
) -> Estimate:
    """Return what ``module_or_fn(*args, **kwargs)`` would need, with neither data nor device.

    The program itself runs, on tensors that have shapes but no memory; modules, optimizers and
    tensors are left as they were. Inputs and parameters may be real, on ``meta``, or fake.

    Args:
        backward: Differentiate the output: its ``loss`` if it has one, else the sum of the first
            tensor with a graph. The output itself is not kept. With False, the output is held to
            the end of the window, and the caller's grad mode applies.
        optimizer: An optimizer, its class, or a function of the parameters that makes one. The
            estimate is then that of a second training step, with the state in place.
        device: The device to estimate for (``"cuda"`` works on a machine without one); by default
            the one that the parameters are on.

    The result's sizes are bytes on that device, `Peak.time_ns` counts operators and ``notes`` say
    what the estimate rests on. Raises `EstimateError` if the program needs the value of a tensor or
    calls an operator that has no rule for fake ones.
    """
    if is_program(module_or_fn) and not args and not kwargs:
        return estimate_graph(module_or_fn, device=device)
    run = record_fake_run(
        module_or_fn, args, kwargs, backward=backward, optimizer=optimizer, device=device
    )
    return _result(run)


def estimate_graph(graph: Any, device: str | None = None) -> Estimate:
    """Return what a traced graph needs if it is run node by node, each storage released after its
    last use and the graph's inputs kept by the caller.

    ``graph`` is a ``torch.fx.Graph``, a ``GraphModule`` or a ``torch.export.ExportedProgram`` whose
    nodes carry fake tensors. ``device`` defaults to the one that holds most. Raises
    `EstimateError`.
    """
    read = read_graph(graph)
    return _result(StaticRun(read, lifetimes_by_last_use(read), _device_of([read], device)))


def estimate_pair(forward: Any, backward: Any, device: str | None = None) -> Estimate:
    """Return what a partitioned forward and its backward graph need, one after the other.

    What the forward saved lives until its last use in the backward; see `estimate_graph` for the
    rest.
    """
    graphs = read_pair(forward, backward)
    return _result(join_pair(*graphs, _device_of(graphs, device)))


def _device_of(graphs: Sequence[StaticGraph], device: str | None) -> str:
    if device is None:
        return next(iter(devices_of(graphs)), "cpu")
    return device if ":" in device or device == "cpu" else f"{device}:0"


def _result(run: StaticRun) -> Estimate:
    """The run's result; a reading of nothing at all is an error, as no limit could fail on it."""
    devices = devices_of([run.graph])
    if devices and run.device not in devices:
        raise EstimateError(
            f"nothing in the program is on {run.device}; its tensors are on {', '.join(devices)}"
        )
    return Estimate.of(run)
