"""Segments and their blocks as plain values: the layout at a run's end, and the start of another.

The state of a device is put together from them again::

    segment      |  key 3, in use  |  free  |  key 7, waiting  |
    blocks          PlacedBlock, PlacedBlock, PlacedBlock

A later run goes on from there as if it had made the requests before itself. Two things are not in a
layout: how long ago a block became free, which garbage collection asks, and the holes before the
first page of an expandable segment.
"""

from __future__ import annotations

import enum
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Final, TypeVar

from pytest_torchmem.analysis.caching_allocator.allocator_settings import SMALL_SEGMENT_BYTES
from pytest_torchmem.analysis.caching_allocator.blocks import AddressRange, Block, FreeBlocks
from pytest_torchmem.analysis.caching_allocator.device import Device
from pytest_torchmem.analysis.caching_allocator.expandable import ENDLESS_RANGE_BYTES

NO_KEY: Final = -1
"""The key of a block that is free."""

# A layout does not say which stream a freed block waits for. One that no program has stands for it.
_SOME_OTHER_STREAM: Final = -1
_address = attrgetter("address")
_B = TypeVar("_B")


class BlockState(enum.Enum):
    """The three states of a block."""

    IN_USE = "in use"
    WAITING = "waiting"
    """Freed, but other streams that used it are not done."""
    FREE = "free"


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block of a layout.

    ``key`` names the allocation that it is in use for, and ``requested_bytes`` is what the program
    asked for: `NO_KEY` and 0 for a free one.
    """

    address: int
    size_bytes: int
    state: BlockState
    key: int = NO_KEY
    requested_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment of a layout, with its blocks in address order.

    ``is_small`` says that it serves requests of up to 1 MiB, ``is_expandable`` that it is a stretch
    of pages that were mapped one by one.
    """

    address: int
    size_bytes: int
    stream: int
    pool: int
    blocks: tuple[PlacedBlock, ...]
    is_small: bool
    is_expandable: bool


def layout_of(device: Device) -> tuple[PlacedSegment, ...]:
    """Return the segments of a device in address order."""
    live, waiting = device.live.items(), device.waiting_blocks()
    states = {block: (BlockState.IN_USE, key, block.requested) for key, block in live}
    states |= {block: (BlockState.WAITING, key, block.requested) for key, block in waiting}
    for home in device.homes.values():
        states |= dict.fromkeys(home, (BlockState.FREE, NO_KEY, 0))
    chains = in_rows(sorted(states, key=_address), lambda block, last: block.previous is last)
    return tuple(
        PlacedSegment(
            address=chain[0].address,
            size_bytes=sum(block.size for block in chain),
            stream=chain[0].home.stream,
            pool=chain[0].home.pool.number,
            blocks=tuple(PlacedBlock(block.address, block.size, *states[block]) for block in chain),
            is_small=chain[0].home.pool.is_small,
            is_expandable=chain[0].span is not None,
        )
        for chain in chains
    )


def in_rows(blocks: Iterable[_B], continues: Callable[[_B, _B], bool]) -> list[list[_B]]:
    """Cut a list of blocks before each that does not continue the one in front of it."""
    rows: list[list[_B]] = []
    for block in blocks:
        if rows and continues(block, rows[-1][-1]):
            rows[-1].append(block)
        else:
            rows.append([block])
    return rows


def restore(device: Device, segments: Iterable[PlacedSegment]) -> None:
    """Give a device without any segments those of a layout."""
    expandable: dict[FreeBlocks, list[PlacedSegment]] = {}
    for segment in sorted(segments, key=_address):
        home = device.home(segment.stream, segment.pool, is_small=segment.is_small)
        if segment.is_expandable:
            expandable.setdefault(home, []).append(segment)
        else:
            device.memory.segment_count += 1
            device.memory.restore_range(segment.address, segment.size_bytes)
            _chain(_blocks(device, home, segment))
    ranges = sorted(expandable.items(), key=lambda item: item[1][0].address)
    bases = [stretches[0].address for _, stretches in ranges]
    for (home, stretches), limit in zip(ranges, [*bases[1:], 0], strict=False):
        base = stretches[0].address
        # A range ends where the next one begins; how far it really goes is in no layout.
        _restore_range(device, home, stretches, limit - base if limit else ENDLESS_RANGE_BYTES)
    for home in device.homes.values():
        device.inactive_split += sum(b.size for b in home if b.span is None and b.is_split)


def _blocks(device: Device, home: FreeBlocks, segment: PlacedSegment) -> Iterator[Block]:
    """Make the blocks of a segment, counted and where a device looks for them."""
    device.memory.reserved += segment.size_bytes
    for placed in segment.blocks:
        block = Block(placed.address, placed.size_bytes, home)
        block.requested = placed.requested_bytes
        if placed.state is BlockState.FREE:
            home.add(block)
        else:
            device.active += block.size
            device.requested += block.requested
        if placed.state is BlockState.IN_USE:
            device.allocated += block.size
            device.live[placed.key] = block
        elif placed.state is BlockState.WAITING:
            device.waiting.append((placed.key, block, {_SOME_OTHER_STREAM}))
        yield block


def _chain(blocks: Iterable[Block]) -> None:
    for before, after in pairwise(blocks):
        before.next, after.previous = after, before


def _restore_range(
    device: Device, home: FreeBlocks, stretches: list[PlacedSegment], size_bytes: int
) -> None:
    """Make one address range of stretches of mapped pages, with what is not mapped between them."""
    page = SMALL_SEGMENT_BYTES if home.pool.is_small else device.settings.large_segment_bytes
    span = AddressRange(stretches[0].address, size_bytes, page)
    chain: list[Block] = []
    end = span.base
    for segment in stretches:
        if segment.address > end:
            chain.append(_hole(home, end, segment.address))
        chain += _blocks(device, home, segment)
        end = segment.address + segment.size_bytes
    chain.append(_hole(home, end, span.base + span.size))
    device.memory.restore_range(span.base, span.size)
    for block in chain:
        block.span = span
    _chain(chain)


def _hole(home: FreeBlocks, begin: int, end: int) -> Block:
    hole = Block(begin, end - begin, home)
    hole.mapped, hole.free = False, True
    insort(home.unmapped, hole, key=_address)
    return hole
