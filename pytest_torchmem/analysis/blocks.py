"""The storages of a footprint one by one, and what each module holds at the peak; both bounded.

A recording of 100,000 storages becomes a picture of the same size as one of 1,000: the largest
have a block, half of the room being for those that are live at the peak; of equal ones those that
live longest have it. All others are one level beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.values.contributors import Category, Contributor, Source
from pytest_torchmem.values.picture import Blocks, ModuleShare, StorageBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCKS: Final = 1000
"""How many storages have a block of their own; a screen has no room to tell more apart."""

MODULES: Final = 300
_CATEGORIES: Final = tuple(Category)
FRAMES_DEEP: Final = 60
"""A stack keeps its innermost calls; a recursion may be thousands deep."""


@dataclass(frozen=True, slots=True, eq=False)
class StorageLives:
    """The storages of a footprint over the rows of its timeline.

    Attributes:
        begins: The first row that each storage is live at: int64, shape (S,).
        ends: The first row after its end; the number of rows where it does not end.
        sizes: Its bytes.
        groups: Storages of one origin: a contributor without its numbers, and their places.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    groups: Sequence[tuple[Contributor, NDArray[np.int64]]]


@dataclass(slots=True)
class _Stacks:
    """Stacks as a tree: each path from a call to the outermost one is there once."""

    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    frames: dict[Source, int] = field(default_factory=dict)

    def add(self, stack: Sequence[Source]) -> int:
        """Return the place of a stack, given innermost first; -1 for an empty one."""
        node = -1
        for source in reversed(stack[:FRAMES_DEEP]):
            frame = self.frames.setdefault(source, len(self.frames))
            node = self.nodes.setdefault((node, frame), len(self.nodes))
        return node


def find_blocks(
    lives: StorageLives,
    rows: NDArray[np.int64],
    totals: Sequence[int],
    stack_of: Callable[[int], Sequence[Source]],
    limit: int = BLOCKS,
) -> Blocks:
    """Return ``limit`` storages at most as blocks, and what the others hold at ``rows``.

    ``totals`` is the footprint at each of them, ``stack_of`` gives the Python calls around
    the storage at a place. Blocks and the rest together are the footprint, at each row.
    """
    makers = np.full(len(lives.sizes), -1, np.int64)
    for number, (_, members) in enumerate(lives.groups):
        makers[members] = number
    lived = np.flatnonzero((lives.ends > lives.begins) & (lives.sizes > 0) & (makers >= 0))
    lengths = lives.ends[lived] - lives.begins[lived]
    ranked = lived[np.lexsort((lived, -lengths, -lives.sizes[lived]))]
    peak_row = rows[int(np.argmax(totals))]
    live = (lives.begins[ranked] <= peak_row) & (lives.ends[ranked] > peak_row)
    at_peak = np.flatnonzero(live)[: limit // 2]
    others = np.setdiff1d(np.arange(len(ranked)), at_peak)[: limit - len(at_peak)]
    largest = ranked[np.concatenate([at_peak, others])]
    kept = largest[np.lexsort((largest, -lives.ends[largest], lives.begins[largest]))]
    numbers = {maker: n for n, maker in enumerate(dict.fromkeys(makers[kept].tolist()))}
    stacks = _Stacks()
    blocks = tuple(
        StorageBlock(
            int(lives.begins[place]),
            int(lives.ends[place]),
            int(lives.sizes[place]),
            numbers[int(makers[place])],
            stacks.add(stack_of(place)),
        )
        for place in kept.tolist()
    )
    changes = np.zeros(len(rows) + 1, np.int64)
    np.add.at(changes, np.searchsorted(rows, lives.begins[kept]), lives.sizes[kept])
    np.add.at(changes, np.searchsorted(rows, lives.ends[kept]), -lives.sizes[kept])
    rest = np.array(totals, np.int64) - np.cumsum(changes)[:-1]
    return Blocks(
        blocks=blocks,
        who=tuple(replace(lives.groups[maker][0], size_bytes=0, count=0) for maker in numbers),
        stacks=tuple(stacks.nodes),
        frames=tuple(stacks.frames),
        rest=tuple(rest.tolist()),
        count=len(lived),
    )


def find_modules(
    lives: StorageLives, peak_row: int, limit: int = MODULES
) -> tuple[ModuleShare, ...]:
    """Return what each module holds of each category at ``peak_row``, the largest first.

    The shares add up to the footprint. While there are more than ``limit``, the smallest one that
    belongs to a module counts for the module around it.
    """
    live = (lives.begins <= peak_row) & (lives.ends > peak_row)
    shares: dict[tuple[str, int], int] = defaultdict(int)
    for who, members in lives.groups:
        shares[who.module, who.category.column] += int(lives.sizes[members][live[members]].sum())
    waiting = [(size_bytes, *key) for key, size_bytes in shares.items() if key[0]]
    heapify(waiting)
    while len(shares) > limit and waiting:
        size_bytes, module, column = heappop(waiting)
        if shares.get((module, column)) != size_bytes:
            continue  # it has grown since, and waits with what it holds now
        around = module.rpartition(".")[0]
        shares[around, column] += shares.pop((module, column))
        if around:
            heappush(waiting, (shares[around, column], around, column))
    found = [
        ModuleShare(module, _CATEGORIES[column], size_bytes)
        for (module, column), size_bytes in shares.items()
        if size_bytes
    ]
    found.sort(key=lambda share: (-share.size_bytes, share.module, share.category.column))
    return tuple(found)
