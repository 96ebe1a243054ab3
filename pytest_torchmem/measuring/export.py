"""Finished torch profiles and stored traces: analysed, and for other people's viewers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import replace
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
from pytest_torchmem.values.units import Device

Labels = Literal["torchmem", "torch"]
#: What a stack weighs in a flame graph.
Weight = Literal["peak", "allocated", "time", "device_time"]

_IN_TORCH: Final = {
    "self_cpu_time_total": "time",
    "self_cuda_time_total": "device_time",
    "self_device_time_total": "device_time",
}
_ENDINGS: Final = (".html", ".json", ".json.gz", ".raw.json.gz")


def analyze(
    profile: object, device: Device | None = None, passes: Sequence[OwnPass] = ()
) -> MemoryProfile:
    """Analyse a `Trace` or a finished ``torch.profiler.profile`` (shapes, memory, stacks on).

    ``device`` is ``"cpu"``, ``"cuda:1"``, or ``"cuda"`` for the one GPU in it; by default the one
    that a trace was recorded for, or the first GPU that a profile allocates on. ``passes`` are
    category passes of your own, as the hook ``pytest_torchmem_category_passes`` returns them.
    Raises `TraceError` for a profile that has not finished, and `DeviceError` for a device that
    is not in it.
    """
    return analyze_trace(trace_in(profile), device, passes)


def export_memory_timeline(
    profile: object,
    path: str | os.PathLike[str],
    device: Device | None = None,
    labels: Labels = "torchmem",
) -> None:
    """Write the memory timeline of a finished profile, as the method that torch deprecates does.

    ``path`` decides the form: ``*.html`` a picture of bytes by category over time;
    ``*.raw.json.gz`` every change as (time in ns, action, bytes, index of the category);
    ``*.json`` and ``*.json.gz`` the times in µs and the sizes by category at each. Categories come
    in torch's order (PARAMETER, OPTIMIZER_STATE, INPUT, TEMPORARY, ACTIVATION, GRADIENT,
    AUTOGRAD_DETAIL, none of them), behind a column of zeros.

    With ``labels="torch"`` the data are torch's own; the default uses the labels of this package.
    Raises `TraceError` for a profile that has not finished, `DeviceError` for a device that is not
    in it, `ValueError` for other labels, `ReportError` for another ending.
    """
    if labels not in ("torchmem", "torch"):
        raise ValueError(f"labels must be 'torchmem' or 'torch', not {labels!r}")
    name = os.fspath(path)
    if not name.endswith(_ENDINGS):
        raise ReportError(
            f"{name}: a memory timeline is written as {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
        )
    trace = trace_in(profile)
    data = _timeline_as(name, trace, device, labels)
    if isinstance(data, Timeline):
        write_timeline_page(Path(name), data, trace.device_named(device))
    else:
        write_json(name, data)


def write_timeline_page(path: Path, timeline: Timeline, title: str) -> None:
    """Write a page with a picture of bytes by category over time."""
    path.write_text(picture_page(sketch_timeline(timeline), title=title), encoding="utf-8")


def _timeline_as(name: str, trace: Trace, device: Device | None, labels: Labels) -> object:
    """Return the timeline of a device; for a file of JSON its changes, or its sums at each time."""
    is_page, is_raw = name.endswith(".html"), name.endswith("raw.json.gz")
    if labels == "torch":
        theirs = TorchMemoryProfile(build_op_tree(trace))
        if is_page:
            return theirs.timeline(device)
        return theirs.raw(device) if is_raw else theirs.coalesced(device)
    own = analyze_trace(trace, device)
    if is_page:
        return own.timeline
    return (raw_changes if is_raw else coalesced)(own.timeline, start_ns(own.tree))


def export_chrome_trace(
    profile: object, path: str | os.PathLike[str], device: Device | None = None
) -> None:
    """Write operators beside counters of bytes by category, for Perfetto and chrome://tracing.

    ``profile`` is a `Trace`, its analysis, or a finished ``torch.profiler.profile``; ``*.gz`` is
    compressed. Raises `TraceError` for a profile that has not finished.
    """
    write_json(os.fspath(path), chrome_trace(_analysed(profile, device)))


def export_memory_snapshot(
    profile: object, path: str | os.PathLike[str], device: Device | None = None
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
    weight: Weight | str = "peak",
    device: Device | None = None,
) -> None:
    """Write the Python stacks of calls with a weight each, for flame graph tools.

    Each line is ``outer;inner;operator 17``. ``weight`` decides what is counted: bytes that were
    live at the ``peak``, bytes ``allocated`` in all, or the microseconds that calls took themselves
    on the CPU (``time``) or on a GPU (``device_time``). The names that torch has for these two are
    taken as well: ``self_cpu_time_total``.

    As ``export_stacks`` of a ``torch.profiler.profile``, which knows the two times, and writes an
    empty file unless the profiler was asked to be verbose. torch has a line for each call, drops
    what each took beyond whole microseconds, and leaves out calls without a stack. Here the calls
    of one stack are one line, and stacks that took less than a microsecond in all have none.

    ``profile`` is a `Trace`, its analysis, or a finished profile with stacks. Raises `TraceError`
    for a profile that has not finished, `ValueError` for another weight.
    """
    weight = _IN_TORCH.get(weight, weight)
    if weight not in get_args(Weight):
        raise ValueError(f"weight must be one of {', '.join(get_args(Weight))}, not {weight!r}")
    if weight in ("time", "device_time"):
        stacks = stacks_by_time(read_events(profile).calls, weight == "device_time")
    else:
        analysed = _analysed(profile, device)
        rows = analysed.allocated_at_peak() if weight == "peak" else analysed.allocated()
        stacks = stacks_by_bytes(list_calls(analysed.tree), *rows)
    Path(path).write_text(collapsed(stacks), encoding="utf-8")


def _analysed(profile: object, device: Device | None) -> MemoryProfile:
    """Return the analysis of a profile, or one that is there already, of a device."""
    if not isinstance(profile, MemoryProfile):
        return analyze(profile, device)
    name = profile.device if device is None else profile.tree.trace.device_named(device)
    return profile if name == profile.device else replace(profile, device=name)


def write_json(name: str, data: object) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    text = json.dumps(data).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
