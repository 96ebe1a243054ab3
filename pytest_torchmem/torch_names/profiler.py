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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import profiler as _autograd
from torch.autograd.profiler import KinetoStepTracker as KinetoStepTracker
from torch.profiler import *  # noqa: F403
from torch.profiler import DeviceType

from pytest_torchmem.analysis.events.averages import NUMBERS, Average, stacks_by_time
from pytest_torchmem.analysis.events.calls import without_step_number
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.measuring.profile import TORCHS_WEIGHTS, write_stacks, write_torchs_timeline
from pytest_torchmem.report.text.event_tables import TORCHS_COLUMNS, averages_table
from pytest_torchmem.torch_names import memory_profiler as _memory_profiler
from pytest_torchmem.torch_names import utils as _utils  # noqa: F401
from pytest_torchmem.values.units import Device


@dataclass(frozen=True)
class AverageRow:
    """One row of averages under torch's names of columns: times in µs, memory in bytes."""

    average: Average
    is_user_annotation: bool = False

    def __getattr__(self, name: str) -> Any:
        if name not in TORCHS_COLUMNS:
            raise AttributeError(f"a row of averages has no {name!r}")
        value = getattr(self.average, TORCHS_COLUMNS[name])
        return value / 1000 if TORCHS_COLUMNS[name].endswith("_ns") else value

    @property
    def device_type(self) -> DeviceType:
        return DeviceType.CUDA if self.average.on_device else DeviceType.CPU

    @property
    def device_time(self) -> float:
        return self.average.device_time_ns / 1000 / max(1, self.average.calls)


class AverageRows(list[AverageRow]):
    """The rows of averages, and their table."""

    def table(self, sort_by: str | None = None, row_limit: int = 100, **_: object) -> str:
        """Return the rows as a table; torch's widths of columns and its header have no effect."""
        limit = row_limit if row_limit >= 0 else len(self)
        return averages_table([row.average for row in self], sort_by or "self_time_ns", limit)

    def __str__(self) -> str:
        return self.table()


class _Answers:
    """The answers of this package to questions that torch's profilers take."""

    _cycles: tuple[Events, ...] = ()

    def key_averages(
        self,
        group_by_input_shape: bool = False,
        group_by_stack_n: int = 0,
        group_by_overload_name: bool = False,
    ) -> AverageRows:
        """Return the calls of one name together; of all cycles where ``acc_events`` is on."""
        groups: dict[tuple[object, ...], list[Average]] = {}
        labels: set[str] = set()
        for events in self._cycles or (Events.of(self),):
            labels |= {without_step_number(label.name) for label in events.labels}
            for row in events.averages(
                by_inputs=group_by_input_shape,
                by_stack=group_by_stack_n,
                by_overload=group_by_overload_name,
            ):
                key = (row.name, row.overload, row.inputs, row.stack, row.on_device)
                groups.setdefault(key, []).append(row)
        return AverageRows(
            AverageRow(
                replace(rows[0], **{n: sum(getattr(row, n) for row in rows) for n in NUMBERS}),
                rows[0].name in labels,
            )
            for rows in groups.values()
        )

    def export_stacks(self, path: str, metric: str = "self_cpu_time_total") -> None:
        """Write Python stacks with the time of each, for flame graph tools."""
        if metric not in TORCHS_WEIGHTS:
            raise ValueError(f"metric must be one of {', '.join(TORCHS_WEIGHTS)}, not {metric!r}")
        on_device = TORCHS_WEIGHTS[metric] == "device_time"
        write_stacks(path, stacks_by_time(Events.of(self).calls, on_device))


class profile(_Answers, torch.profiler.profile):  # type: ignore[no-redef]  # noqa: N801
    """``torch.profiler.profile``, whose averages, stacks and timelines come from here."""

    def stop_trace(self) -> None:
        """End a cycle. With ``acc_events`` its events are kept, beside those of the others."""
        super().stop_trace()
        if self.acc_events:
            self._cycles += (Events.of(self),)

    def _memory_profile(self) -> Any:
        return _memory_profiler.MemoryProfile(self)

    def export_memory_timeline(self, path: str, device: Device | None = None) -> None:
        """Write the memory timeline: the ending of ``path`` says whether as a page, raw or JSON."""
        write_torchs_timeline(os.fspath(path), self._memory_profile().columns, device)


class autograd_profile(_Answers, _autograd.profile):  # noqa: N801
    """``torch.autograd.profiler.profile``, whose averages and stacks come from here."""
