"""Finished torch profiles and stored traces: analysed, and for other people's viewers."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, get_args

from pytest_torchmem.analysis.events.averages import (
    Stacks,
    collapsed,
    stacks_by_bytes,
    stacks_by_time,
)
from pytest_torchmem.analysis.events.calls import list_calls
from pytest_torchmem.analysis.events.op_tree import start_ns
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.sampling import sketch_timeline
from pytest_torchmem.analysis.storages.explanation import OwnPass
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.analysis.torch_view.torch_timeline import (
    TorchMemoryProfile,
    coalesced,
    raw_changes,
)
from pytest_torchmem.measuring.events import Events, trace_in
from pytest_torchmem.report.page.html import picture_page
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.errors import MarkerError, ReportError
from pytest_torchmem.values.units import Device

#: What `Profile.export` writes.
Exported = Literal["timeline", "trace", "snapshot", "stacks"]
Labels = Literal["torchmem", "torch"]
#: What a stack weighs in a flame graph.
Weight = Literal["peak", "allocated", "time", "device_time"]

TORCHS_WEIGHTS: Final = {
    "self_cpu_time_total": "time",
    "self_cuda_time_total": "device_time",
    "self_device_time_total": "device_time",
}
_ENDINGS: Final = (".html", ".json", ".json.gz", ".raw.json.gz")


@dataclass(frozen=True, eq=False)
class Profile(MemoryProfile):
    """A recording of one device, analysed: `analyze` and `load` give it.

    Attributes:
        device: ``cpu`` or ``cuda:0``.
        source: The finished ``torch.profiler.profile`` that it is of, or a trace.
    """

    source: object = None

    @cached_property
    def events(self) -> Events:
        """The recording's operators, labels, Python calls and memory events, with their times.

        Of a ``torch.profiler.profile`` every event is read, as torch's own functions do. A
        recording of ours has no Python calls that lead to nothing, no sizes of inputs and no
        kernels.
        """
        is_ours = self.source is self.tree.trace
        return Events(self.tree) if is_ours else Events.of(self.source)

    def export(
        self,
        path: str | os.PathLike[str],
        as_: Exported = "timeline",
        *,
        labels: Labels = "torchmem",
        weight: Weight | str = "peak",
    ) -> None:
        """Write the recording for people or for a viewer.

        ``as_="timeline"``: bytes by category over time, as torch's ``export_memory_timeline``,
        which it deprecates. ``path`` decides the form: ``*.html`` a picture; ``*.raw.json.gz``
        every change as (time in ns, action, bytes, index of the category); ``*.json`` and
        ``*.json.gz`` the times in µs and the sizes by category at each. Categories come in torch's
        order (PARAMETER, OPTIMIZER_STATE, INPUT, TEMPORARY, ACTIVATION, GRADIENT, AUTOGRAD_DETAIL,
        none of them), behind a column of zeros. With ``labels="torch"`` the data are torch's own.

        ``as_="trace"``: operators beside counters of bytes by category, for Perfetto and
        chrome://tracing; ``*.gz`` is compressed.

        ``as_="snapshot"``: each storage with where it comes from, for
        https://pytorch.org/memory_viz, of any device. It holds the footprint; reserved memory is in
        torch's own snapshot only.

        ``as_="stacks"``: the Python stacks of calls, for flame graph tools: lines such as
        ``outer;inner;operator 17``. ``weight`` decides what is counted: bytes that were live at the
        ``peak``, bytes ``allocated`` in all, or the microseconds that calls took themselves on the
        CPU (``time``) or on a GPU (``device_time``); torch's names for these two are taken, too:
        ``self_cpu_time_total``. torch has a line for each call, drops what each took beyond whole
        microseconds, and leaves out calls without a stack. Here the calls of one stack are one
        line, and stacks that took less than a microsecond in all have none.

        Raises `MarkerError` for another form, labels or weight, and `ReportError` for a timeline
        with another ending.
        """
        name = os.fspath(path)
        _require("as_", as_, get_args(Exported))
        _require("labels", labels, get_args(Labels))
        weight = TORCHS_WEIGHTS.get(weight, weight)
        _require("weight", weight, get_args(Weight))
        if as_ == "trace":
            write_json(name, chrome_trace(self))
        elif as_ == "snapshot":
            Path(path).write_bytes(pickled(self))
        elif as_ == "stacks":
            write_stacks(path, self._stacks(weight))
        else:
            self._export_timeline(name, labels)

    def _export_timeline(self, name: str, labels: Labels) -> None:
        if not name.endswith(_ENDINGS):
            expected = f"{', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]}"
            raise ReportError(f"{name}: a memory timeline is written as {expected}")
        if labels == "torch":
            # Nothing at all was recorded of the device that a profile without memory is of.
            device = self.device if self.device in self.tree.trace.devices else None
            write_torchs_timeline(name, TorchMemoryProfile(self.tree), device)
        elif name.endswith(".html"):
            write_timeline_page(Path(name), self.timeline, self.device)
        else:
            form = raw_changes if name.endswith("raw.json.gz") else coalesced
            write_json(name, form(self.timeline, start_ns(self.tree)))

    def _stacks(self, weight: str) -> Stacks:
        if weight in ("time", "device_time"):
            return stacks_by_time(self.events.calls, weight == "device_time")
        rows = self.allocated_at_peak() if weight == "peak" else self.allocated()
        return stacks_by_bytes(list_calls(self.tree), *rows)


def _require(name: str, value: object, names: Sequence[str]) -> None:
    if value not in names:
        raise MarkerError(f"export, {name}: {value!r} is none of {', '.join(map(repr, names))}")


def analyze(
    profile: object, device: Device | None = None, passes: Sequence[OwnPass] = ()
) -> Profile:
    """Analyse a finished ``torch.profiler.profile`` (shapes, memory, stacks on).

    ``device`` is ``"cpu"``, ``"cuda:1"``, or ``"cuda"`` for the one GPU in it; by default the first
    GPU that the profile allocates on. A `Profile` is analysed for another device. ``passes`` are
    category passes of your own, as the hook ``pytest_torchmem_category_passes`` returns them.
    Raises `TraceError` for anything else and for a profile that has not finished, and `DeviceError`
    for a device that is not in it.
    """
    source = profile.source if isinstance(profile, Profile) else profile
    analysed = analyze_trace(trace_in(source), device, passes)
    return Profile(**{f.name: getattr(analysed, f.name) for f in fields(analysed)}, source=source)


def write_stacks(path: str | os.PathLike[str], stacks: Stacks) -> None:
    """Write stacks in the form that flame graph tools read."""
    Path(path).write_text(collapsed(stacks), encoding="utf-8")


def write_torchs_timeline(name: str, profile: TorchMemoryProfile, device: Device | None) -> None:
    """Write a timeline under torch's labels; the ending says whether as a page, raw or JSON."""
    if name.endswith(".html"):
        title = profile.tree.trace.device_named(device)
        write_timeline_page(Path(name), profile.timeline(device), title)
    elif name.endswith("raw.json.gz"):
        write_json(name, profile.raw(device))
    else:
        write_json(name, profile.coalesced(device))


def write_timeline_page(path: Path, timeline: Timeline, title: str) -> None:
    """Write a page with a picture of bytes by category over time."""
    path.write_text(picture_page(sketch_timeline(timeline), title=title), encoding="utf-8")


def write_json(name: str, data: object) -> None:
    """Write JSON, compressed where the name ends in ``.gz``."""
    text = json.dumps(data).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
