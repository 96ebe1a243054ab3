"""A trace from somebody else's finished ``torch.profiler.profile``."""

from __future__ import annotations

from typing import Any

import torch

from pytest_torchmem.errors import TraceError
from pytest_torchmem.record.kineto import TreeReader
from pytest_torchmem.record.python_calls import library_paths
from pytest_torchmem.trace import Trace


def trace_of(profile: Any, device: str | None = None) -> Trace:
    """Return the trace of a finished ``torch.profiler.profile``, to be analysed for ``device``.

    Without the facts that our own recorder notes, ownership is known from the event tree alone.
    Raises `TraceError` if the profile is still running or holds no results.
    """
    inner = getattr(profile, "profiler", profile)
    result = getattr(inner, "kineto_results", None)
    if result is None:
        raise TraceError(
            "the profile holds no results; pass a torch.profiler.profile after it has stopped"
        )
    reader = TreeReader()
    tables = reader.read(result)
    return Trace(
        events=tables.events,
        tensors=tables.tensors,
        allocations=tables.allocations,
        module_calls=tables.module_calls,
        strings=reader.strings.values(),
        devices=reader.device_names.values(),
        meta={
            "torch": torch.__version__,
            "device": device or default_device(),
            "library_paths": library_paths(),
        },
    )


def default_device() -> str:
    """The device torch's own export takes: the first GPU where there is one, else the CPU."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"
