"""Calls of one name together: how often, how long, and how much memory.

The columns are those of ``key_averages()`` (``torch/autograd/profiler_util.py``), in nanoseconds
and bytes, and two that torch does not have: what was allocated, frees not subtracted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.calls import (
    MEMORY,
    CallList,
    PythonStacks,
    is_annotation,
    without_step_number,
)
from pytest_torchmem.analysis.events.op_tree import own_amounts
from pytest_torchmem.values.trace import DeviceEventKind, Scope


@dataclass(frozen=True, slots=True)
class Average:
    """Calls of one name together, or also of one overload, one set of input sizes, or one stack.

    Memory is what was allocated minus what was freed while a call ran, on whatever thread; a call's
    *own* is without that of the calls within it.

    Attributes:
        name: The operator, label, Python function or kernel.
        overload: Its overload, where calls were told apart by it.
        inputs: The sizes of its inputs, ``[[2, 3], []]``, where calls were told apart by them.
        stack: The Python calls around it, innermost first, as many as were asked for.
        on_device: Whether it ran on a GPU.
        calls: How often it was called.
        self_time_ns: Time on the CPU in its calls but in nothing that they called.
        total_time_ns: Time on the CPU in its calls.
        self_device_time_ns: Time on a GPU of the kernels that its calls launched themselves.
        device_time_ns: The same with the calls within them.
        self_cpu_bytes: CPU memory of its own.
        cpu_bytes: CPU memory.
        self_device_bytes: GPU memory of its own.
        device_bytes: GPU memory.
        self_allocated_bytes: What its calls allocated themselves on any device, without frees.
        allocated_bytes: The same with the calls within them.
    """

    name: str
    overload: str = ""
    inputs: str = ""
    stack: tuple[str, ...] = ()
    on_device: bool = False
    calls: int = 0
    self_time_ns: int = 0
    total_time_ns: int = 0
    self_device_time_ns: int = 0
    device_time_ns: int = 0
    self_cpu_bytes: int = 0
    cpu_bytes: int = 0
    self_device_bytes: int = 0
    device_bytes: int = 0
    self_allocated_bytes: int = 0
    allocated_bytes: int = 0

    @property
    def time_ns(self) -> float:
        """Time on the CPU of one call."""
        return self.total_time_ns / self.calls if self.calls else 0.0


#: The names of the columns that are numbers, by which averages can be sorted.
NUMBERS: Final = tuple(field.name for field in fields(Average))[5:]


def find_averages(
    calls: CallList,
    *,
    by_inputs: bool = False,
    by_overload: bool = False,
    by_stack: int = 0,
    top_level: bool = False,
) -> tuple[Average, ...]:
    """Return one row for each group of calls, in the order in which each was first met.

    ``top_level`` leaves out the calls that lie within others.
    """
    stacks = stacks_of(calls) if by_stack else [()] * len(calls.rows)
    nesting, nothing = calls.nesting, np.full(len(calls.rows), -1, np.int64)
    keys: dict[object, int] = {}
    described: list[tuple[str, str, str, tuple[str, ...], bool]] = []
    groups = np.full(len(calls.rows), -1, np.int64)
    names = [without_step_number(text) for text in calls.strings]
    texts, sizes = (*calls.strings, ""), (*calls.strings, "[]" if by_inputs else "")
    columns = zip(
        calls.names.tolist(),
        (calls.detail("overload") if by_overload else nothing).tolist(),
        (calls.detail("inputs") if by_inputs else nothing).tolist(),
        calls.on_device.tolist(),
        _labels(calls).tolist(),
        [parent >= 0 for parent in nesting.parents] if top_level else nesting.merged,
        strict=True,
    )
    for call, (name, overload, inputs, on_device, label, left_out) in enumerate(columns):
        if left_out:
            continue
        stack = stacks[call][:by_stack]
        key = (names[name], texts[overload], sizes[inputs], on_device, label, stack)
        group = keys.setdefault(key, len(described))
        if group == len(described):
            described.append((names[name], texts[overload], sizes[inputs], stack, on_device))
        groups[call] = group
    return _summed(described, groups, amounts_of(calls))


def find_total(averages: Iterable[Average]) -> Average:
    """Return the sum of all rows, as ``total_average()`` does."""
    rows = list(averages)
    return Average("Total", **{name: sum(getattr(row, name) for row in rows) for name in NUMBERS})


def _labels(calls: CallList) -> NDArray[np.bool_]:
    """Tell labels, and the stretches on a GPU that belong to them, from other calls: bool, (C,)."""
    kinds = np.append(calls.tree.trace.device_events["kind"], DeviceEventKind.RUNTIME)
    is_label: NDArray[np.bool_] = kinds[calls.device_rows] == DeviceEventKind.ANNOTATION
    return is_label | is_annotation(calls)


def stacks_of(calls: CallList) -> list[tuple[str, ...]]:
    """Return the Python calls around each call, innermost first.

    What runs in a backward pass has the stack of the forward call that it belongs to: autograd
    gives both the same sequence number.
    """
    python = PythonStacks(calls.tree)
    nodes = [python.around[row] if row >= 0 else 0 for row in calls.rows.tolist()]
    frames_of = {node: python.frames(node) for node in set(nodes)}
    sequences = calls.event_column("sequence").tolist()
    backward = _backward_sequences(calls, sequences)
    forward: dict[int, tuple[str, ...]] = {}
    for call, sequence in enumerate(backward):
        if sequence is None and sequences[call] >= 0:
            forward.setdefault(sequences[call], frames_of[nodes[call]])
    return [
        frames_of[node] if sequence is None else forward.get(sequence, ())
        for node, sequence in zip(nodes, backward, strict=True)
    ]


def _backward_sequences(calls: CallList, sequences: Sequence[int]) -> list[int | None]:
    """For each call within a node of the backward graph the node's sequence number."""
    is_node = (calls.event_column("scope") == Scope.BACKWARD_FUNCTION).tolist()
    stacks: list[int | None] = []
    for call, parent in enumerate(calls.nesting.parents):
        if is_node[call]:
            stacks.append(sequences[call])
        else:
            stacks.append(stacks[parent] if parent >= 0 else None)
    return stacks


def amounts_of(calls: CallList) -> dict[str, NDArray[np.int64]]:
    """The numbers of each call, by the names of their columns: int64, shape (C,) each."""
    counted = ~np.array(calls.nesting.merged, np.bool_)
    parents = np.where(counted, np.array(calls.nesting.parents, np.int64), -1)
    on_cpu = ~calls.on_device
    durations = np.where(on_cpu, calls.durations_ns, 0)
    cpu, device, allocated = _memory(calls)
    launched = np.where(on_cpu, _launched(calls), calls.durations_ns)
    return {
        "calls": counted.astype(np.int64),
        "self_time_ns": own_amounts(durations, parents),
        "total_time_ns": durations,
        "self_device_time_ns": launched,
        "device_time_ns": _with_inner(launched, calls.nesting.parents, counted),
        "self_cpu_bytes": own_amounts(cpu, parents),
        "cpu_bytes": cpu,
        "self_device_bytes": own_amounts(device, parents),
        "device_bytes": device,
        "self_allocated_bytes": own_amounts(allocated, parents),
        "allocated_bytes": allocated,
    }


def _with_inner(
    amounts: NDArray[np.int64], parents: Sequence[int], counted: NDArray[np.bool_]
) -> NDArray[np.int64]:
    totals = np.where(counted, amounts, 0).tolist()
    # A call comes after the one around it.
    for call in range(len(parents) - 1, -1, -1):
        if parents[call] >= 0:
            totals[parents[call]] += totals[call]
    return np.array(totals, np.int64)


def _launched(calls: CallList) -> NDArray[np.int64]:
    """The time of the kernels that each call launched; of a merged call the outer one has them."""
    trace = calls.tree.trace
    table = trace.device_events
    totals = np.zeros(len(calls.rows), np.int64)
    on_cpu = np.isin(table["kind"], (DeviceEventKind.RUNTIME, DeviceEventKind.LAUNCH))
    ran = table[~on_cpu]
    if not len(ran):
        return totals
    correlations = calls.detail("correlation").tolist()
    call_of = {number: call for call, number in enumerate(correlations) if number > 0}
    durations = (ran["end_ns"] - ran["start_ns"]).tolist()
    for correlation, duration in zip(ran["correlation"].tolist(), durations, strict=True):
        if (call := call_of.get(correlation)) is not None:
            totals[call] += duration
    return totals[np.array(calls.nesting.inner, np.int64)]


def _memory(calls: CallList) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return bytes on the CPU and on GPUs while each call ran, and bytes allocated without frees.

    Allocations of 8 and 4 bytes at times 1 and 3, a free of the 8 at time 5, a call from 2 to 6::

        times [1, 3, 5]    amounts [+8, +4, -8]    until [0, 8, 12, 4]
        begin 1, end 3     until[3] - until[1] = -4, and of what was allocated 12 - 8 = 4
    """
    trace = calls.tree.trace
    table = trace.allocations
    times = trace.events["start_ns"][table["event"]]
    order = np.argsort(times, kind="stable")
    times, table = times[order], table[order]
    begin = np.searchsorted(times, calls.starts_ns, side="left")
    end = np.searchsorted(times, calls.ends_ns, side="right")
    is_cpu = np.array([name == "cpu" for name in trace.devices] or [True], np.bool_)
    on_cpu = is_cpu[table["device"]]
    size = table["size_bytes"]
    sums = []
    for amounts in (size * on_cpu, size * ~on_cpu, np.maximum(size, 0)):
        until = np.concatenate([[0], np.cumsum(amounts)])
        sums.append(np.where(calls.on_device, 0, until[end] - until[begin]))
    return sums[0], sums[1], sums[2]


def _summed(
    described: Sequence[tuple[str, str, str, tuple[str, ...], bool]],
    groups: NDArray[np.int64],
    amounts: dict[str, NDArray[np.int64]],
) -> tuple[Average, ...]:
    columns: dict[str, list[int]] = {}
    for name, values in amounts.items():
        # Python's integers: the times of frames that never return have no room in 64 bits.
        sums = [0] * (len(described) + 1)
        for group, value in zip(groups.tolist(), values.tolist(), strict=True):
            sums[group] += value
        columns[name] = sums
    numbers = zip(*(columns[name] for name in NUMBERS), strict=True)
    return tuple(Average(*row, *amounts) for row, amounts in zip(described, numbers, strict=False))


# Python stacks with a weight each, for flame graphs: time, or bytes.
#
# As ``export_stacks`` of ``torch/autograd/profiler_util.py``, and with the call's own name as the
# innermost frame, so that a flame graph ends in operators.

#: A stack from the outside in, the call itself last, and what its calls weigh together.
Stacks: TypeAlias = Mapping[tuple[str, ...], int]
_SEPARATORS: Final = str.maketrans(" ;\t\n", "____")
_NS_PER_US: Final = 1000
#: The frame of what was allocated before the recording.
BEFORE_RECORDING: Final = "[before]"


def stacks_by_time(calls: CallList, on_device: bool = False) -> Stacks:
    """Return the stacks with the microseconds that their calls took themselves.

    ``on_device`` counts the time of the kernels that they launched.
    """
    column = "self_device_time_ns" if on_device else "self_time_ns"
    # What ran on a GPU has no Python stack; the call that launched it has its time.
    weights = amounts_of(calls)[column] * ~calls.on_device
    rows = [
        (call, weight)
        for call, (weight, merged) in enumerate(
            zip(weights.tolist(), calls.nesting.merged, strict=True)
        )
        if weight > 0 and not merged
    ]
    in_ns = _gathered(calls, rows)
    return {stack: ns // _NS_PER_US for stack, ns in in_ns.items() if ns >= _NS_PER_US}


def stacks_by_bytes(
    calls: CallList, events: NDArray[np.int64], size_bytes: NDArray[np.int64]
) -> Stacks:
    """Return the stacks of some allocations with their bytes.

    ``events`` are the rows of the allocation events, shape (N,), -1 for what was allocated before
    the recording. That has a stack of its own, ``[before]``, and so has what no call made,
    ``[memory]``.
    """
    call_of = {row: call for call, row in enumerate(calls.rows.tolist()) if row >= 0}
    parents = calls.tree.trace.events["parent"].tolist()
    counts: list[tuple[int, int]] = []
    others = {(MEMORY,): 0, (BEFORE_RECORDING,): 0}
    for event, size in zip(events.tolist(), size_bytes.tolist(), strict=True):
        row = event
        outside = (MEMORY,) if row >= 0 else (BEFORE_RECORDING,)
        while row >= 0 and row not in call_of:
            row = parents[row]
        if row >= 0:
            counts.append((call_of[row], size))
        else:
            others[outside] += size
    groups = _gathered(calls, counts)
    return {**groups, **{stack: size for stack, size in others.items() if size}}


def _gathered(calls: CallList, counts: Iterable[tuple[int, int]]) -> dict[tuple[str, ...], int]:
    stacks, names = stacks_of(calls), calls.names.tolist()
    sums: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    for call, weight in counts:
        sums[stacks[call], names[call]] += weight
    return {(*reversed(stack), calls.strings[name]): sums[stack, name] for stack, name in sums}


def collapsed(stacks: Stacks) -> str:
    """Return stacks in the form that flame graph tools read: ``outer;inner;call 17``."""
    return "".join(
        f"{';'.join(frame.translate(_SEPARATORS) for frame in stack)} {weight}\n"
        for stack, weight in stacks.items()
    )
