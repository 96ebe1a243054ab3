"""Memory without running: what a module, a function or a graph would need. Every number estimated.

from pytest_torchmem import estimate

result = estimate(model, inputs, optimizer=torch.optim.AdamW)
assert result.peak.total <= 24 * GiB
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.analysis.estimated.static import (
    join_pair,
    lifetimes_by_last_use,
    made_by_operator,
)
from pytest_torchmem.record.devices import named_device
from pytest_torchmem.record.fake import fx_graphs
from pytest_torchmem.record.fake.fake_run import Program, record_fake_run
from pytest_torchmem.values.errors import (
    DeviceNameError,
    EstimateError,
    MarkerError,
    is_torchmem_error,
)
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.static_graph import StaticGraph, StaticRun

__all__ = ["estimate", "estimate_graph", "estimate_pair"]

__tracebackhide__ = is_torchmem_error


def estimate(
    module_or_fn: Callable[..., object],
    *args: object,
    backward: bool = True,
    optimizer: object = None,
    device: str | None = None,
    **kwargs: object,
) -> Estimate:
    """Return what ``module_or_fn(*args, **kwargs)`` would need, with neither data nor device.

    The program itself runs, on tensors that have shapes but no memory; modules, optimizers and
    tensors are left as they were. Inputs and parameters may be real, on ``meta``, or fake.

    Args:
        backward: Differentiate the output: its ``loss`` if it has one, else the sum of the first
            tensor with a graph, also where the caller's grad mode is off, which a note then says.
            The output itself is not kept. With False, the output is held to the end of the window,
            and the caller's grad mode applies.
        optimizer: An optimizer, its class, or a function of the parameters that makes one. The
            estimate is then that of a second training step, with the state in place.
        device: The device to estimate for (``"cuda"`` works on a machine without one); by default
            the one that the parameters are on.

    The result's sizes are bytes on that device, `Peak.time_ns` counts operators and ``notes`` say
    what the estimate rests on. Raises `EstimateError` if the program needs the value of a tensor or
    calls an operator that has no rule for fake ones, `MarkerError` for an argument without meaning
    and `DeviceNameError` for such a device. What the program itself raises comes out as it is.
    """
    if fx_graphs.is_program(module_or_fn) and not args and not kwargs:
        return estimate_graph(module_or_fn, device=device)
    _require_program(module_or_fn, backward, optimizer)
    name = _device_name(device)
    try:
        run = record_fake_run(Program(module_or_fn, args, kwargs, backward, optimizer), name)
    except TypeError:
        _require_arguments(module_or_fn, args, kwargs)
        raise
    except EstimateError as error:
        raise error.with_traceback(None) from None  # through torch; it names the user's own line
    return _result(run)


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


def _require_program(program: object, backward: object, optimizer: object) -> None:
    """Raise `MarkerError` or `EstimateError` for what cannot be called, or trained, for memory."""
    if not callable(program):
        raise MarkerError(f"estimate needs a module or a function, got {_shown(program)}")
    if isinstance(program, type) and hasattr(program, "forward"):
        raise MarkerError(f"estimate needs a module, got its class {program.__name__}")
    if fx_graphs.is_program(program) and not hasattr(program, "forward"):
        raise MarkerError("estimate takes no arguments for a graph: its inputs are part of it")
    called = getattr(program, "forward", program)
    if (
        inspect.iscoroutinefunction(called)
        or inspect.isgeneratorfunction(called)
        or inspect.isasyncgenfunction(called)
    ):
        raise MarkerError(
            f"estimate needs a function that does its work when it is called; {_shown(program)} "
            "does it later, as generators and async functions do"
        )
    if type(program).__module__.startswith("torch.jit"):
        raise EstimateError("a scripted module cannot be followed; give the one it was made from")
    if not isinstance(backward, bool):
        raise MarkerError(f"estimate, backward: {backward!r} is not True or False")
    if optimizer is not None and not callable(optimizer) and not hasattr(optimizer, "step"):
        raise MarkerError(
            f"estimate, optimizer: {_shown(optimizer)} is not an optimizer; give one, its class, "
            "or a function of the parameters"
        )


def _require_arguments(
    program: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, Json]
) -> None:
    """Raise `MarkerError` where a program could not be called with arguments at all."""
    name = getattr(program, "__name__", type(program).__name__)
    if len(args) == 1 and isinstance(args[0], tuple | list):
        raise MarkerError(
            f"estimate was given one {type(args[0]).__name__} for {name}, which cannot work with "
            "it; give the arguments one by one: estimate(model, x, y)"
        )
    try:
        inspect.signature(getattr(program, "forward", program)).bind(*args, **kwargs)
    except TypeError as error:
        raise MarkerError(
            f"estimate cannot call {name} with these arguments: {error}; it calls "
            f"{name}(*args, **kwargs) with all that follows the program"
        ) from None
    except ValueError:
        return  # it has no signature


def _device_name(device: object) -> str | None:
    """Return a device as text. Raises `DeviceNameError` and `MarkerError`."""
    if device is None:
        return None
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise MarkerError(f"estimate, device: {device!r} is not a device; give text such as 'cuda'")
    try:
        return str(named_device(str(device)))
    except DeviceNameError as error:
        raise error.with_traceback(None) from None


def _shown(value: object) -> str:
    if value is None or isinstance(value, str | int | float):
        return repr(value)
    return str(getattr(value, "__name__", f"a {type(value).__name__}"))


def _device_of(graphs: Sequence[StaticGraph], device: str | None) -> str:
    if device is None:
        return next(iter(fx_graphs.devices_of(graphs)), "cpu")
    return device if ":" in device or device == "cpu" else f"{device}:0"


def _result(run: StaticRun) -> Estimate:
    """The run's result; a reading of nothing at all is an error, as no limit could fail on it."""
    devices = fx_graphs.devices_of([run.graph])
    if not devices:
        raise EstimateError(
            "the program makes and reads no tensor, so there is nothing to estimate; what it works "
            "on has to be among its arguments, or in its modules"
        )
    if run.device not in devices:
        raise EstimateError(
            f"nothing in the program is on {run.device}; its tensors are on {', '.join(devices)}"
        )
    return Estimate.of(run)
