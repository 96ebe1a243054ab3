"""The sites of allocations: operator, line and phase, read from the stacks in a history."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pytest_torchmem.analysis.caching_allocator import PlacedSegment, StackFrame, TraceEntry
from pytest_torchmem.analysis.caching_allocator.layout import NO_KEY
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.json_values import checked_list

# torch joins an operator and its overload with an underscore: ``add_Tensor``, ``sum_dim_IntList``.
_OVERLOAD: Final = r"(?:out|dim|int|self|start|dtype|device|memory_format|names)"
_OPERATOR: Final = re.compile(rf"at::_ops::(\w+?)(?:_(?:{_OVERLOAD}+|{_OVERLOAD}*[A-Z]\w*))?::")
_LONGEST_NAME: Final = 300
"""Operators have names of up to 60 letters; a frame with far more is none of an operator's."""
_LIBRARY: Final = re.compile(r"[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]")
_ENGINE: Final = "torch::autograd::Engine"
_OPTIMIZER: Final = re.compile(r"[/\\]torch[/\\]optim[/\\]")


@dataclass(frozen=True, slots=True)
class Site:
    """The place that an allocation was made from.

    Attributes:
        origin: The outermost ATen operator on the stack, the innermost line of Python outside of
            libraries, and the phase: BACKWARD below autograd's engine, OPTIMIZER below
            ``torch.optim``, PREEXISTING for what was there before the history, FORWARD otherwise.
            Nobody knows what the memory was for.
        stack: The calls around it, innermost first: those of Python, or of C++ where there are
            none, as in autograd's threads.
    """

    origin: Contributor
    stack: tuple[Source, ...]


def sites_of(entries: Sequence[TraceEntry]) -> dict[int, Site]:
    """Return the site of each allocation of a history, by its key."""
    read = _reader()
    allocs = (entry for entry in entries if entry["action"] == "alloc")
    return {key: read(entry.get("frames", ())) for key, entry in enumerate(allocs)}


def sites_of_start(
    start: Sequence[PlacedSegment], segments: Sequence[Mapping[str, object]]
) -> dict[int, Site]:
    """Return the site of what was there before: known where it is there at the end, too."""
    read, frames = _reader(Phase.PREEXISTING), dict[int, Sequence[StackFrame]]()
    for block in (block for segment in segments for block in checked_list(segment["blocks"])):
        if "address" in block:
            frames[block["address"]] = block.get("frames", ())
    return {
        block.key: read(frames.get(block.address, ()))
        for segment in start
        for block in segment.blocks
        if block.key != NO_KEY
    }


def _reader(phase: Phase | None = None) -> Callable[[Sequence[StackFrame]], Site]:
    """Return a function that reads stacks, of which many are one object in a snapshot.

    Where they are not, their sites have one stack all the same.
    """
    known: dict[int, Site] = {}
    stacks: dict[tuple[Source, ...], tuple[Source, ...]] = {}

    def read(frames: Sequence[StackFrame]) -> Site:
        if id(frames) not in known:
            site = _site(frames, phase)
            known[id(frames)] = Site(site.origin, stacks.setdefault(site.stack, site.stack))
        return known[id(frames)]

    return read


def _site(frames: Sequence[StackFrame], phase: Phase | None) -> Site:
    operators = [
        match[1] for frame in frames if (match := _OPERATOR.match(frame["name"], 0, _LONGEST_NAME))
    ]
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in python if not _LIBRARY.search(frame["filename"])] or python
    source = Source(own[0]["filename"], own[0]["line"], own[0]["name"]) if own else None
    if phase is None and any(frame["name"].startswith(_ENGINE) for frame in frames):
        phase = Phase.BACKWARD
    elif phase is None:
        steps = any(_OPTIMIZER.search(frame["filename"]) for frame in python)
        phase = Phase.OPTIMIZER if steps else Phase.FORWARD
    # A frame of C++ whose file torch does not know is said to be in ``??``.
    stack = tuple(
        Source(frame["filename"].replace("??", ""), frame["line"], frame["name"])
        for frame in python or frames
    )
    operator = f"aten::{operators[-1]}" if operators else ""
    return Site(Contributor(Category.UNKNOWN, 0, 0, operator, "", source, phase), stack)
