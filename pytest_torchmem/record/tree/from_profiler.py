"""A trace from somebody else's finished ``torch.profiler.profile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from pytest_torchmem.record.compiled.source import CompiledSources
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.record.tree.kineto import TreeReader
from pytest_torchmem.record.tree.python_calls import library_paths
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.trace import DEVICE_EVENT, DeviceEventKind, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LAUNCHES = (
    "cudaLaunchKernel",
    "__cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
)


def trace_of(profile: object, device: str | None = None) -> Trace:
    """Return the trace of a finished ``torch.profiler.profile``, to be analysed for ``device``.

    ``profile`` may also be the ``kineto_results`` of one.
    Without the facts that our own recorder notes, ownership is known from the event tree alone.
    Raises `TraceError` if the profile is still running or holds no results.
    """
    inner = getattr(profile, "profiler", profile)
    is_result = hasattr(inner, "experimental_event_tree")
    found = inner if is_result else getattr(inner, "kineto_results", None)
    result = cast("profiler.ProfilerResult | None", found)
    if result is None:
        raise TraceError(
            "the profile holds no results; pass a torch.profiler.profile after it has stopped"
        )
    reader = TreeReader()
    tables = reader.read(result)
    compiled_lines = CompiledSources(reader.strings).read(tables.events)
    return Trace(
        events=tables.events,
        tensors=tables.tensors,
        allocations=tables.allocations,
        module_calls=tables.module_calls,
        overloads=tables.overloads,
        device_events=_device_events(inner, result),
        compiled_lines=compiled_lines,
        strings=reader.strings.values(),
        devices=reader.device_names.values(),
        meta={
            "torch": torch.__version__,
            "device": device or default_device(),
            "library_paths": library_paths(),
        },
    )


def _device_events(inner: object, result: profiler.ProfilerResult) -> NDArray[np.void]:
    """Launches and kernels, if the profile was asked for any."""
    rows: list[tuple[int, int, int, int]] = []
    if getattr(inner, "use_device", None) not in (None, "cpu"):
        for event in result.events():
            kind = _kind_of(event)
            if kind is not None:
                start = event.start_ns()
                rows.append(
                    (kind, event.linked_correlation_id(), start, start + event.duration_ns())
                )
    return np.array(rows, DEVICE_EVENT)


def _kind_of(event: profiler.KinetoEvent) -> DeviceEventKind | None:
    name = event.name()
    if name.startswith(_LAUNCHES):
        return DeviceEventKind.LAUNCH
    if event.device_type() != torch.profiler.DeviceType.CUDA:
        return None
    moves_memory = any(word in name.lower() for word in ("mem", "cpy", "alloc", "free"))
    return None if moves_memory else DeviceEventKind.KERNEL


def default_device() -> str:
    """The device torch's own export takes: the first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"
