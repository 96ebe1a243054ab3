"""Finished torch profiles and stored traces: analysed, and for other people's viewers."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Literal

from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.analysis.pipeline import analyze as analyze_trace
from pytest_torchmem.analysis.sampling import sketch_timeline
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.analysis.torch_view.torch_timeline import (
    TorchMemoryProfile,
    coalesced,
    raw_changes,
)
from pytest_torchmem.report.page.html import picture_page
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.trace import Trace

Labels = Literal["torchmem", "torch"]


def analyze(profile: object, device: str | None = None) -> MemoryProfile:
    """Analyse a `Trace` or a finished ``torch.profiler.profile`` (shapes, memory, stacks on).

    ``device`` is ``"cpu"`` or ``"cuda:1"``; by default the trace's own, or for a profile the first
    GPU where there is one. Raises `TraceError` for a profile that has not finished.
    """
    if isinstance(profile, Trace):
        return analyze_trace(profile, device)
    from pytest_torchmem.record.tree.from_profiler import trace_of

    return analyze_trace(trace_of(profile, device))


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
    Raises `TraceError` for a profile that has not finished, `ValueError` for other labels.
    """
    if labels not in ("torchmem", "torch"):
        raise ValueError(f"labels must be 'torchmem' or 'torch', not {labels!r}")
    from pytest_torchmem.record.tree.from_profiler import default_device, trace_of

    device = device or default_device()
    trace = profile if isinstance(profile, Trace) else trace_of(profile, device)
    source = _TorchSource(trace, device) if labels == "torch" else _OwnSource(trace, device)
    name = os.fspath(path)
    if name.endswith(".html"):
        page = picture_page(sketch_timeline(source.timeline()), title=device)
        Path(name).write_text(page, encoding="utf-8")
    elif name.endswith("raw.json.gz"):
        write_json(name, source.raw())
    else:
        write_json(name, source.coalesced())


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


def _analysed(profile: object, device: str | None) -> MemoryProfile:
    return profile if isinstance(profile, MemoryProfile) else analyze(profile, device)


class _TorchSource:
    """The data under torch's labels."""

    def __init__(self, trace: Trace, device: str) -> None:
        self._profile = TorchMemoryProfile(build_op_tree(trace))
        self._device = device

    def timeline(self) -> Timeline:
        return self._profile.timeline(self._device)

    def coalesced(self) -> object:
        return self._profile.coalesced(self._device)

    def raw(self) -> object:
        return self._profile.raw(self._device)


class _OwnSource:
    """The data under our labels."""

    def __init__(self, trace: Trace, device: str) -> None:
        self._profile = analyze_trace(trace, device if device in trace.devices else None)
        self._start_ns = int(trace.events["start_ns"].min()) if len(trace.events) else 0

    def timeline(self) -> Timeline:
        return self._profile.timeline

    def coalesced(self) -> object:
        return coalesced(self._profile.timeline, self._start_ns)

    def raw(self) -> object:
        return raw_changes(self._profile.timeline, self._start_ns)


def write_json(name: str, data: object) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    text = json.dumps(data).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
