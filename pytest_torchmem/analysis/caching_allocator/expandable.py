"""Expandable segments: pages mapped into address ranges that grow, instead of cudaMalloc.

An expandable segment is one chain of blocks over its whole address range, of which some parts
are mapped::

    | in use | free | not mapped                                              |

Source: Note [Expandable Segments], ``find_expandable_block``, ``map_block`` and ``unmap_block`` in
``c10/cuda/CUDACachingAllocator.cpp``.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter
from typing import Final

from pytest_torchmem.analysis.caching_allocator.allocator_settings import (
    SMALL_SEGMENT_BYTES,
    UNLIMITED_BYTES,
)
from pytest_torchmem.analysis.caching_allocator.blocks import (
    AddressRange,
    Block,
    DeviceMemory,
    FreeBlocks,
)

# Stands for "as much as the program could ever ask" when no capacity is given.
ENDLESS_RANGE_BYTES: Final = 1 << 44
_address = attrgetter("address")


def largest_growth(block: Block) -> int:
    """Return how large a free block becomes when the memory behind it is mapped."""
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def grow(home: FreeBlocks, size: int, memory: DeviceMemory, large_page_bytes: int) -> Block | None:
    """Map what is missing for ``size`` bytes at the lowest address that has room.

    Returns the block, taken out of the free set and at least ``size`` bytes large; None when the
    device has too few pages left, in which case pages mapped on the way stay mapped.
    """
    block = _lowest_room(home, size) or _new_span(home, size, memory, large_page_bytes)
    if block is None:
        return None
    if not block.mapped and not _map(block, min(block.size, size), memory):
        return None
    while block.size < size:
        unmapped = block.next
        assert unmapped is not None
        if not _map(unmapped, min(size - block.size, unmapped.size), memory):
            return None
        # It absorbed the free block in front, which is no more.
        block = unmapped
    home.remove(block)
    return block


def unmap_whole_pages(block: Block, memory: DeviceMemory) -> None:
    """Give the pages that lie wholly inside a free block back to the device."""
    span = block.span
    assert span is not None
    page, home = span.page_bytes, block.home
    begin = -(-(block.address - span.base) // page) * page + span.base
    end = (block.address + block.size - span.base) // page * page + span.base
    if begin >= end:
        return
    home.remove(block)
    if block.address < begin:
        front, block = block, block.cut(begin - block.address)
        home.add(front)
    if end < block.address + block.size:
        home.add(block.cut(end - block.address))
    block.mapped, block.free = False, True
    block.join_neighbours()
    memory.give_back(end - begin)
    if block.is_split:
        insort(home.unmapped, block, key=_address)


def _lowest_room(home: FreeBlocks, size: int) -> Block | None:
    for unmapped in home.unmapped:
        before, room = unmapped.previous, 0
        start = before if before is not None and before.free else unmapped
        block: Block | None = start
        while room < size and block is not None and block.free:
            room, block = room + block.size, block.next
        if room >= size:
            return start
    return None


def _new_span(
    home: FreeBlocks, size: int, memory: DeviceMemory, large_page_bytes: int
) -> Block | None:
    page = SMALL_SEGMENT_BYTES if home.pool.is_small else large_page_bytes
    # An eighth more addresses than memory, so that holes in front can stay holes for a while.
    room = memory.capacity_bytes + memory.capacity_bytes // 8
    if memory.capacity_bytes == UNLIMITED_BYTES:
        room = ENDLESS_RANGE_BYTES
    span_bytes = -(-room // page) * page
    if span_bytes < size:
        return None
    block = Block(memory.new_range(span_bytes), span_bytes, home)
    block.span = AddressRange(base=block.address, size=span_bytes, page_bytes=page)
    block.mapped, block.free = False, True
    insort(home.unmapped, block, key=_address)
    return block


def _map(block: Block, size: int, memory: DeviceMemory) -> bool:
    """Map the pages that hold the first ``size`` bytes and join them with free neighbours."""
    span, home = block.span, block.home
    assert span is not None
    mapped_bytes = -(-size // span.page_bytes) * span.page_bytes
    if not memory.take(mapped_bytes):
        return False
    home.unmapped.remove(block)
    if mapped_bytes < block.size:
        rest = block.cut(mapped_bytes)
        rest.free = True
        insort(home.unmapped, rest, key=_address)
    block.mapped = True
    block.join_neighbours()
    home.add(block)
    return True
