"""Finished torch profiles and stored traces: analysed, and for other people's viewers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, get_args

from pytest_torchmem.analysis.events.averages import collapsed, stacks_by_bytes, stacks_by_time
from pytest_torchmem.analysis.events.calls import list_calls
from pytest_torchmem.analysis.events.op_tree import build_op_tree, start_ns
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.sampling import sketch_timeline
from pytest_torchmem.analysis.storages.explanation import OwnPass
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.analysis.torch_view.torch_timeline import (
    TorchMemoryProfile,
    coalesced,
    raw_changes,
)
from pytest_torchmem.measuring.events import read_events, trace_in
from pytest_torchmem.report.page.html import picture_page
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.trace import Trace

Labels = Literal["torchmem", "torch"]
#: What a stack weighs in a flame graph.
Weight = Literal["peak", "allocated", "time", "device_time"]

_ENDINGS: Final = (".html", ".json", ".json.gz", ".raw.json.gz")


def analyze(
    profile: object, device: str | None = None, passes: Sequence[OwnPass] = ()
) -> MemoryProfile:
    """Analyse a `Trace` or a finished ``torch.profiler.profile`` (shapes, memory, stacks on).

    ``device`` is ``"cpu"`` or ``"cuda:1"``; by default the trace's own, or for a profile the first
    GPU where there is one. ``passes`` are category passes of your own, as the hook
    ``pytest_torchmem_category_passes`` returns them. Raises `TraceError` for a profile that has
    not finished.
    """
    of_trace = device if isinstance(profile, Trace) else None
    return analyze_trace(trace_in(profile, device), of_trace, passes)


def export_memory_timeline(
    profile: object,
    path: str | os.PathLike[str],
    device: str | None = None,
    labels: Labels = "torchmem",
) -> None:
    """Write the memory timeline of a finished profile, as the method that torch deprecates does.

    ``path`` decides the form: ``*.html`` a picture of bytes by category over time;
    ``*.raw.json.gz`` every change as (time in ns, action, bytes, index of the category);
    ``*.json`` and ``*.json.gz`` the times in µs and the sizes by category at each. Categories come
    in torch's order (PARAMETER, OPTIMIZER_STATE, INPUT, TEMPORARY, ACTIVATION, GRADIENT,
    AUTOGRAD_DETAIL, none of them), behind a column of zeros.

    With ``labels="torch"`` the data are torch's own; the default uses the labels of this package.
    Raises `TraceError` for a profile that has not finished, `ValueError` for other labels,
    `ReportError` for another ending.
    """
    if labels not in ("torchmem", "torch"):
        raise ValueError(f"labels must be 'torchmem' or 'torch', not {labels!r}")
    name = os.fspath(path)
    if not name.endswith(_ENDINGS):
        raise ReportError(
            f"{name}: a memory timeline is written as {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
        )
    from pytest_torchmem.record.profiled.from_profiler import default_device

    device = device or default_device()
    data = _timeline_as(name, trace_in(profile, device), device, labels)
    if isinstance(data, Timeline):
        page = picture_page(sketch_timeline(data), title=device)
        Path(name).write_text(page, encoding="utf-8")
    else:
        write_json(name, data)


def _timeline_as(name: str, trace: Trace, device: str, labels: Labels) -> object:
    """Return the timeline of a device; for a file of JSON its changes, or its sums at each time."""
    is_page, is_raw = name.endswith(".html"), name.endswith("raw.json.gz")
    if labels == "torch":
        theirs = TorchMemoryProfile(build_op_tree(trace))
        if is_page:
            return theirs.timeline(device)
        return theirs.raw(device) if is_raw else theirs.coalesced(device)
    own = analyze_trace(trace, device if device in trace.devices else None)
    if is_page:
        return own.timeline
    return (raw_changes if is_raw else coalesced)(own.timeline, start_ns(own.tree))


def export_chrome_trace(
    profile: object, path: str | os.PathLike[str], device: str | None = None
) -> None:
    """Write operators beside counters of bytes by category, for Perfetto and chrome://tracing.

    ``profile`` is a `Trace`, its analysis, or a finished ``torch.profiler.profile``; ``*.gz`` is
    compressed. Raises `TraceError` for a profile that has not finished.
    """
    write_json(os.fspath(path), chrome_trace(_analysed(profile, device)))


def export_memory_snapshot(
    profile: object, path: str | os.PathLike[str], device: str | None = None
) -> None:
    """Write a snapshot for https://pytorch.org/memory_viz: each storage with where it comes from.

    ``profile`` is a `Trace`, its analysis, or a finished ``torch.profiler.profile``. It works on
    any device, the CPU too, and holds the footprint; reserved memory is in torch's own snapshot
    only. Raises `TraceError` for a profile that has not finished.
    """
    Path(path).write_bytes(pickled(_analysed(profile, device)))


def export_stacks(
    profile: object,
    path: str | os.PathLike[str],
    weight: Weight = "peak",
    device: str | None = None,
) -> None:
    """Write the Python stacks of calls with a weight each, for flame graph tools.

    Each line is ``outer;inner;operator 17``. ``weight`` decides what is counted: bytes that were
    live at the ``peak``, bytes ``allocated`` in all, or the microseconds that calls took themselves
    on the CPU (``time``) or on a GPU (``device_time``).

    As ``export_stacks`` of a ``torch.profiler.profile``, which knows the two times, and writes an
    empty file unless the profiler was asked to be verbose. ``profile`` is a `Trace`, its analysis,
    or a finished profile with stacks. Raises `TraceError` for a profile that has not finished,
    `ValueError` for another weight.
    """
    if weight not in get_args(Weight):
        raise ValueError(f"weight must be one of {', '.join(get_args(Weight))}, not {weight!r}")
    if weight in ("time", "device_time"):
        stacks = stacks_by_time(read_events(profile).calls, weight == "device_time")
    else:
        analysed = _analysed(profile, device)
        rows = analysed.allocated_at_peak() if weight == "peak" else analysed.allocated()
        stacks = stacks_by_bytes(list_calls(analysed.tree), *rows)
    Path(path).write_text(collapsed(stacks), encoding="utf-8")


def _analysed(profile: object, device: str | None) -> MemoryProfile:
    return profile if isinstance(profile, MemoryProfile) else analyze(profile, device)


def write_json(name: str, data: object) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    text = json.dumps(data).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
