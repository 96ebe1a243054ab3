"""The names of ``torch.profiler`` and of ``torch.autograd.profiler.profile``.

    from pytest_torchmem.torch_names.profiler import profile

    with profile(record_shapes=True, profile_memory=True, with_stack=True) as finished: ...
    print(finished.key_averages().table(sort_by="self_cpu_time_total"))
    finished.export_memory_timeline("timeline.html")

torch records; averages, tables, stacks and timelines of memory come from here. All other names are
torch's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch.autograd import profiler as _autograd
from torch.autograd.profiler import KinetoStepTracker
from torch.profiler import (
    DeviceType,
    ProfilerAction,
    ProfilerActivity,
    kineto_available,
    record_function,
    schedule,
    supported_activities,
    tensorboard_trace_handler,
)

from pytest_torchmem.analysis.events.averages import NUMBERS, Average, stacks_by_time
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.measuring.profile import TORCHS_WEIGHTS, write_stacks
from pytest_torchmem.report.text.event_tables import averages_table
from pytest_torchmem.torch_names import memory_profiler as _memory_profiler
from pytest_torchmem.torch_names import utils as _utils
from pytest_torchmem.values.units import Device

__all__ = [
    "DeviceType",
    "KinetoStepTracker",
    "ProfilerAction",
    "ProfilerActivity",
    "_memory_profiler",
    "_utils",
    "autograd_profile",
    "kineto_available",
    "profile",
    "record_function",
    "schedule",
    "supported_activities",
    "tensorboard_trace_handler",
]

_Key = tuple[object, ...]


@dataclass(frozen=True)
class AverageRow:
    """One row of averages under torch's names: times in microseconds, memory in bytes."""

    average: Average
    is_user_annotation: bool = False

    @property
    def key(self) -> str:
        return self.average.name

    @property
    def overload_name(self) -> str:
        return self.average.overload

    @property
    def input_shapes(self) -> str:
        return self.average.inputs

    @property
    def stack(self) -> tuple[str, ...]:
        return self.average.stack

    @property
    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.average.on_device else DeviceType.CPU

    @property
    def count(self) -> int:
        return self.average.calls

    @property
    def self_cpu_time_total(self) -> float:
        return self.average.self_time_ns / 1000

    @property
    def cpu_time_total(self) -> float:
        return self.average.total_time_ns / 1000

    @property
    def cpu_time(self) -> float:
        return self.average.time_ns / 1000

    @property
    def device_time(self) -> float:
        return self.device_time_total / max(1, self.count)

    @property
    def self_device_time_total(self) -> float:
        return self.average.self_device_time_ns / 1000

    @property
    def device_time_total(self) -> float:
        return self.average.device_time_ns / 1000

    @property
    def self_cpu_memory_usage(self) -> int:
        return self.average.self_cpu_bytes

    @property
    def cpu_memory_usage(self) -> int:
        return self.average.cpu_bytes

    @property
    def self_device_memory_usage(self) -> int:
        return self.average.self_device_bytes

    @property
    def device_memory_usage(self) -> int:
        return self.average.device_bytes


class AverageRows(Sequence[AverageRow]):
    """The rows of averages, and their table."""

    def __init__(self, rows: Sequence[AverageRow]) -> None:
        self._rows = tuple(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[AverageRow]:
        return iter(self._rows)

    def table(self, sort_by: str | None = None, row_limit: int = 100, **_: object) -> str:
        """Return the rows as a table, the largest ``sort_by`` first; all for a limit of -1.

        The widths of columns and the header that torch's table takes have no effect.
        """
        limit = row_limit if row_limit >= 0 else len(self)
        averages = tuple(row.average for row in self)
        return averages_table(averages, sort_by or "self_time_ns", limit)

    def __str__(self) -> str:
        return self.table()


class _Answers:
    """The answers of this package to questions that torch's profilers take."""

    _cycles: list[Events]

    def key_averages(
        self,
        group_by_input_shape: bool = False,
        group_by_stack_n: int = 0,
        group_by_overload_name: bool = False,
    ) -> AverageRows:
        """Return the calls of one name together; of all cycles where ``acc_events`` is on."""
        found: dict[_Key, list[AverageRow]] = {}
        for events in self._cycles or [Events.of(self)]:
            labels = {label.name.partition("#")[0] for label in events.labels}
            for row in events.averages(
                by_inputs=group_by_input_shape,
                by_stack=group_by_stack_n,
                by_overload=group_by_overload_name,
            ):
                key = (row.name, row.overload, row.inputs, row.stack, row.on_device)
                annotates = row.name.partition("*")[0] in labels
                found.setdefault(key, []).append(AverageRow(row, annotates))
        return AverageRows([reduce(_sum, rows) for rows in found.values()])

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total") -> None:
        """Write Python stacks with the time of each, for flame graph tools."""
        if metric not in TORCHS_WEIGHTS:
            raise ValueError(f"metric must be one of {', '.join(TORCHS_WEIGHTS)}, not {metric!r}")
        on_device = TORCHS_WEIGHTS[metric] == "device_time"
        write_stacks(path, stacks_by_time(Events.of(self).calls, on_device))


def _sum(one: AverageRow, other: AverageRow) -> AverageRow:
    numbers = {n: getattr(one.average, n) + getattr(other.average, n) for n in NUMBERS}
    return replace(one, average=replace(one.average, **numbers))


class AnsweredProfile(_Answers, torch.profiler.profile):
    """``torch.profiler.profile``, whose averages, stacks and timelines come from here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles = []

    def stop_trace(self) -> None:
        """End a cycle. With ``acc_events`` its events are kept, beside those of the others."""
        super().stop_trace()
        if self.acc_events:
            self._cycles.append(Events.of(self))

    def _memory_profile(self) -> Any:
        return _memory_profiler.MemoryProfile(self)

    def export_memory_timeline(self, path: str, device: Device | None = None) -> None:
        """Write the memory timeline: the ending of ``path`` says whether as a page, raw or JSON."""
        timeline = _memory_profiler.MemoryProfileTimeline(self._memory_profile())
        name = os.fspath(path)
        if name.endswith(".html"):
            timeline.export_memory_timeline_html(name, device)
        elif name.endswith("raw.json.gz"):
            timeline.export_memory_timeline_raw(name, device)
        else:
            timeline.export_memory_timeline(name, device)


class AnsweredAutogradProfile(_Answers, _autograd.profile):
    """``torch.autograd.profiler.profile``, whose averages and stacks come from here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles = []


profile = AnsweredProfile
autograd_profile = AnsweredAutogradProfile
