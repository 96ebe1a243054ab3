"""The sites of allocations: operator, line and phase, read from the stacks in a history."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from pytest_torchmem.analysis.caching_allocator import PlacedSegment, StackFrame, TraceEntry
from pytest_torchmem.analysis.caching_allocator.layout import NO_KEY
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.json_values import checked_list

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
        operator: The outermost ATen operator on the stack, or ``""``.
        source: The innermost line of Python outside of libraries; None where there is none.
        phase: BACKWARD below autograd's engine, OPTIMIZER below ``torch.optim``, PREEXISTING for
            what was there before the history, FORWARD otherwise.
        stack: The calls around it, innermost first: those of Python, or of C++ where there are
            none, as in autograd's threads. Sites are equal without it.
    """

    operator: str = ""
    source: Source | None = None
    phase: Phase = Phase.FORWARD
    stack: tuple[Source, ...] = field(default=(), compare=False)

    def contributor(self, size_bytes: int, count: int) -> Contributor:
        """Return storages of the site as a contributor; nobody knows what they were for."""
        return Contributor(
            Category.UNKNOWN, size_bytes, count, self.operator, "", self.source, self.phase
        )


def sites_of(entries: Sequence[TraceEntry]) -> dict[int, Site]:
    """Return the site of each allocation of a history, by its key."""
    reader = _SiteReader()
    allocs = (entry for entry in entries if entry["action"] == "alloc")
    return {key: reader.read(entry.get("frames", ())) for key, entry in enumerate(allocs)}


def sites_of_start(
    start: Sequence[PlacedSegment], segments: Sequence[Mapping[str, object]]
) -> dict[int, Site]:
    """Return the site of what was there before: known where it is there at the end, too."""
    reader = _SiteReader()
    frames = dict(_frames_at_the_end(segments))
    return {
        block.key: replace(reader.read(frames.get(block.address, ())), phase=Phase.PREEXISTING)
        for segment in start
        for block in segment.blocks
        if block.key != NO_KEY
    }


def _frames_at_the_end(
    segments: Sequence[Mapping[str, object]],
) -> Iterator[tuple[int, Sequence[StackFrame]]]:
    for segment in segments:
        for block in checked_list(segment["blocks"]):
            if "address" in block:
                yield block["address"], block.get("frames", ())


class _SiteReader:
    """Reads stacks; equal stacks are one object in a snapshot more often than not.

    Where they are not, their sites have one stack all the same.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Sequence[StackFrame], Site]] = {}
        self._stacks: dict[tuple[Source, ...], tuple[Source, ...]] = {}

    def read(self, frames: Sequence[StackFrame]) -> Site:
        known = self._known.get(id(frames))
        if known is None:
            # The frames are kept with the answer: another list could get the id of a dropped one.
            site = _site(frames)
            site = replace(site, stack=self._stacks.setdefault(site.stack, site.stack))
            known = self._known[id(frames)] = (frames, site)
        return known[1]


def _site(frames: Sequence[StackFrame]) -> Site:
    operators = [
        match[1] for frame in frames if (match := _OPERATOR.match(frame["name"], 0, _LONGEST_NAME))
    ]
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    own = [frame for frame in python if not _LIBRARY.search(frame["filename"])] or python
    source = Source(own[0]["filename"], own[0]["line"], own[0]["name"]) if own else None
    phase = Phase.FORWARD
    if any(frame["name"].startswith(_ENGINE) for frame in frames):
        phase = Phase.BACKWARD
    elif any(_OPTIMIZER.search(frame["filename"]) for frame in python):
        phase = Phase.OPTIMIZER
    # A frame of C++ whose file torch does not know is said to be in ``??``.
    stack = tuple(
        Source(frame["filename"].replace("??", ""), frame["line"], frame["name"])
        for frame in python or frames
    )
    return Site(f"aten::{operators[-1]}" if operators else "", source, phase, stack)


def by_site(
    sites: Sequence[Site], size_bytes: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[Contributor, ...]:
    """Return the storages in ``rows`` by site, the largest first."""
    sums: dict[Site, list[int]] = defaultdict(lambda: [0, 0])
    for row in rows.tolist():
        amounts = sums[sites[row]]
        amounts[0] += int(size_bytes[row])
        amounts[1] += 1
    found = [site.contributor(*amounts) for site, amounts in sums.items()]
    return tuple(sorted(found, key=lambda c: (-c.size_bytes, c.operator, str(c.source))))
