"""Events and the time they took, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchmem.analysis.events.averages import NUMBERS, Average, find_total
from pytest_torchmem.analysis.events.metrics import Event
from pytest_torchmem.report.text.tables import aligned
from pytest_torchmem.values.units import format_size, format_time

_RULE: Final = "-" * 80
_NAME_WIDTH: Final = 55
_FRAMES_APART: Final = " < "
#: The columns of an `Average` by torch's names for them.
TORCHS_COLUMNS: Final = {
    "key": "name",
    "overload_name": "overload",
    "input_shapes": "inputs",
    "stack": "stack",
    "cpu_time": "time_ns",
    "self_cpu_time_total": "self_time_ns",
    "cpu_time_total": "total_time_ns",
    "self_cuda_time_total": "self_device_time_ns",
    "cuda_time_total": "device_time_ns",
    "self_device_time_total": "self_device_time_ns",
    "device_time_total": "device_time_ns",
    "self_cpu_memory_usage": "self_cpu_bytes",
    "cpu_memory_usage": "cpu_bytes",
    "self_cuda_memory_usage": "self_device_bytes",
    "cuda_memory_usage": "device_bytes",
    "self_device_memory_usage": "self_device_bytes",
    "device_memory_usage": "device_bytes",
    "count": "calls",
}


def averages_table(
    averages: Sequence[Average], sort_by: str = "self_time_ns", limit: int = 100
) -> str:
    """Return averages as a table, the largest ``sort_by`` first; at most ``limit`` rows.

    A column goes by its name in torch's table, too. Raises `ValueError` for another one.
    """
    sort_by = TORCHS_COLUMNS.get(sort_by, sort_by)
    if sort_by not in NUMBERS:
        raise ValueError(f"sort_by must be one of {', '.join(NUMBERS)}, not {sort_by!r}")
    rows = sorted(averages, key=lambda row: -getattr(row, sort_by))
    total = find_total(averages)
    columns = [column for column in _columns(total) if column.is_shown(rows)]
    cells = [[column.cell(row) for column in columns] for row in rows[:limit]]
    align = "".join(column.align for column in columns)
    lines = aligned(cells, [column.header for column in columns], align)
    if left_out := len(rows[limit:]):
        lines.append(f"... and {left_out} more")
    lines.append(f"self CPU time in all: {format_time(total.self_time_ns)}")
    if total.self_device_time_ns:
        # A kernel's time counts once: in its own row, and not in that of what launched it.
        on_device_ns = sum(row.self_device_time_ns for row in rows if row.on_device)
        lines.append(f"self GPU time in all: {format_time(on_device_ns)}")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Column:
    """A column; an ``optional`` one is shown where an attribute of that name says anything."""

    header: str
    cell: Callable[[Average], str]
    align: str = "r"
    optional: str = ""

    def is_shown(self, rows: Iterable[Average]) -> bool:
        return not self.optional or any(getattr(row, self.optional) for row in rows)


def _columns(total: Average) -> Iterator[_Column]:
    yield _Column("name", lambda row: _shortened(row.name), "l")
    yield _Column("overload", lambda row: row.overload, "l", optional="overload")
    yield _Column("calls", lambda row: str(row.calls))
    yield _Column("self CPU", lambda row: format_time(row.self_time_ns))
    yield _Column("self CPU %", lambda row: _share(row.self_time_ns, total.self_time_ns))
    yield _Column("CPU", lambda row: format_time(row.total_time_ns))
    yield _Column("CPU a call", lambda row: format_time(row.time_ns))
    for header, name, shown in (
        ("self GPU", "self_device_time_ns", format_time),
        ("GPU", "device_time_ns", format_time),
        ("self CPU memory", "self_cpu_bytes", format_size),
        ("CPU memory", "cpu_bytes", format_size),
        ("self GPU memory", "self_device_bytes", format_size),
        ("GPU memory", "device_bytes", format_size),
        ("self allocated", "self_allocated_bytes", format_size),
        ("allocated", "allocated_bytes", format_size),
    ):
        yield _Column(header, _number(name, shown), optional=name)
    yield _Column("inputs", lambda row: row.inputs, "l", optional="inputs")
    yield _Column("stack", lambda row: _FRAMES_APART.join(row.stack), "l", optional="stack")


def _number(name: str, render: Callable[[int], str]) -> Callable[[Average], str]:
    return lambda row: render(getattr(row, name))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shortened(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else f"{name[: _NAME_WIDTH - 3]}..."


def optimizable_text(events: Sequence[Event]) -> str:
    """Return the events that hold a GPU up, as ``get_optimizable_events`` printed them."""
    if not events:
        return "no events to optimize: no full queue of kernels ran dry"
    lines = ["events to optimize:"]
    for event in events:
        lines += [
            _RULE,
            f"event:      {event.name}",
            f"source:     {event.place or 'not known'}",
            f"idle time:  {event.idle_fraction:.2%} of {format_time(event.duration_ns)}",
        ]
    return "\n".join([*lines, _RULE])
