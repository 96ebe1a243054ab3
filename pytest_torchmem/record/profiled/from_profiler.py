"""A trace from somebody else's finished ``torch.profiler.profile``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.compiled.compiled_graphs import CompiledSources
from pytest_torchmem.record.environment import library_paths
from pytest_torchmem.record.profiled.kineto import TreeReader
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import DEVICE_EVENT, MODULE_EDGE, DeviceEventKind, Trace

_LAUNCHES = (
    "cudaLaunchKernel",
    "__cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
)
# Calls of a GPU's libraries, such as cudaMalloc, cuLaunchKernel and hipFree.
_RUNTIME = re.compile(r"_*(cuda|cu|hip)[A-Z]")
_OUT_OF_MEMORY = "[OutOfMemory]"


def trace_of(profile: object, whole: bool = False) -> Trace:
    """Return the trace of a finished ``torch.profiler.profile``.

    It is recorded for the first GPU on which the profile allocates, or else for the CPU.
    ``profile`` may also be the ``kineto_results`` of one.
    Without the facts that our own recorder notes, ownership is known from the event tree alone.
    ``whole`` keeps the Python calls that lead to nothing, and details of operators, for those who
    look at times. Raises `TraceError` if the profile is still running or holds no results.
    """
    inner = getattr(profile, "profiler", profile)
    is_result = hasattr(inner, "experimental_event_tree")
    results = inner if is_result else getattr(inner, "kineto_results", None)
    result = cast("profiler.ProfilerResult | None", results)
    if result is None and not hasattr(inner, "kineto_results"):
        raise TraceError(
            f"a {type(profile).__name__} is no profile; give a torch.profiler.profile after it has "
            "stopped, and read files with pytest_torchmem.load"
        )
    if result is None:
        raise TraceError(
            "the profile holds no results; pass a torch.profiler.profile after it has stopped"
        )
    reader = TreeReader()
    tables = reader.read(result, whole=whole)
    device_events = _device_events(inner, result, reader.strings)
    compiled_lines = CompiledSources(reader.strings).read(tables.events, np.empty(0, MODULE_EDGE))
    return Trace(
        events=tables.events,
        tensors=tables.tensors,
        allocations=tables.allocations,
        module_calls=tables.module_calls,
        device_events=device_events,
        details=tables.details,
        compiled_lines=compiled_lines,
        strings=reader.strings.values(),
        devices=reader.device_names.values(),
        meta={
            "torch": torch.__version__,
            "device": _first_gpu(tables.allocations, reader.device_names.values()),
            "library_paths": library_paths(),
            "own_cost_ns": profiler.own_cost_ns(inner),
        },
    )


def _device_events(
    inner: object, result: profiler.ProfilerResult, strings: StringTable
) -> NDArray[np.void]:
    """Return what a device did, and the calls that launched it, if the profile has any."""
    if getattr(inner, "use_device", None) in (None, "cpu"):
        return np.empty(0, DEVICE_EVENT)
    rows: list[tuple[int, ...]] = []
    for event in result.events():
        kind = _kind_of(event)
        if kind is not None:
            start = event.start_ns()
            on_device = kind not in (DeviceEventKind.LAUNCH, DeviceEventKind.RUNTIME)
            rows.append(
                (
                    kind,
                    event.linked_correlation_id(),
                    start,
                    start + event.duration_ns(),
                    strings.number(event.name()),
                    event.device_index() if on_device else -1,
                    event.device_resource_id() if on_device else -1,
                )
            )
    return np.array(rows, DEVICE_EVENT)


def _kind_of(event: profiler.KinetoEvent) -> DeviceEventKind | None:
    on_gpu = event.device_type() == torch.profiler.DeviceType.CUDA
    if on_gpu and event.is_user_annotation():
        return DeviceEventKind.ANNOTATION
    return kind_by_name(event.name(), on_gpu)


def kind_by_name(name: str, on_gpu: bool) -> DeviceEventKind | None:
    """Return what an event of a GPU or of its libraries is; None for anything else.

    An allocation that failed is in the event tree, too, and counts there.
    """
    if name == _OUT_OF_MEMORY:
        return None
    if name.startswith(_LAUNCHES):
        return DeviceEventKind.LAUNCH
    if not on_gpu:
        return DeviceEventKind.RUNTIME if _RUNTIME.match(name) else None
    moves_memory = any(word in name.lower() for word in ("mem", "cpy", "alloc", "free"))
    return DeviceEventKind.COPY if moves_memory else DeviceEventKind.KERNEL


def _first_gpu(allocations: Table, names: Sequence[str]) -> str:
    """Return the first GPU that something was allocated on; without any, the CPU."""
    devices = (names[number] for number in np.unique(allocations["device"]).tolist())
    gpus = (name for name in devices if name != "cpu")
    return min(gpus, key=lambda name: (len(name), name), default="cpu")
