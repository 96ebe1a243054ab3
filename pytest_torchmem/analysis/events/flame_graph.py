"""Python stacks with a weight each, for flame graphs: time, or bytes.

As ``export_stacks`` of ``torch/autograd/profiler_util.py``, and with the call's own name as the
innermost frame, so that a flame graph ends in operators.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_torchmem.analysis.events.averages import amounts_of, stacks_of
from pytest_torchmem.analysis.events.calls import MEMORY, CallList

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
    counted = [
        (call, weight)
        for call, (weight, merged) in enumerate(
            zip(weights.tolist(), calls.nesting.merged, strict=True)
        )
        if weight > 0 and not merged
    ]
    in_ns = _gathered(calls, counted)
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
    counted: list[tuple[int, int]] = []
    others = {(MEMORY,): 0, (BEFORE_RECORDING,): 0}
    for event, size in zip(events.tolist(), size_bytes.tolist(), strict=True):
        row = event
        outside = (MEMORY,) if row >= 0 else (BEFORE_RECORDING,)
        while row >= 0 and row not in call_of:
            row = parents[row]
        if row >= 0:
            counted.append((call_of[row], size))
        else:
            others[outside] += size
    found = _gathered(calls, counted)
    return {**found, **{stack: size for stack, size in others.items() if size}}


def _gathered(calls: CallList, counted: Iterable[tuple[int, int]]) -> dict[tuple[str, ...], int]:
    stacks, names = stacks_of(calls), calls.names.tolist()
    sums: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    for call, weight in counted:
        sums[stacks[call], names[call]] += weight
    return {(*reversed(stack), calls.strings[name]): sums[stack, name] for stack, name in sums}


def collapsed(stacks: Stacks) -> str:
    """Return stacks in the form that flame graph tools read: ``outer;inner;call 17``."""
    lines = []
    for stack, weight in stacks.items():
        frames = ";".join(frame.translate(_SEPARATORS) for frame in stack)
        lines.append(f"{frames} {weight}\n")
    return "".join(lines)
