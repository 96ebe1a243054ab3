"""Blocks, the sets of free ones, and the device's memory they are cut from.

A segment is a chain of blocks::

    segment   |  A in use  |  B free  |  C in use  |  D free       |
    chain        A <-------> B <-------> C <-------> D
    free set     B, D: ordered by size, then by address

Two neighbours are never both free: a block that becomes free absorbs them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

ADDRESS_BITS: Final = 64
_FIRST_ADDRESS: Final = 1 << 40


class Block:
    """A stretch of one segment: in use, waiting for other streams, free, or not mapped."""

    __slots__ = (
        "address",
        "born",
        "free",
        "home",
        "mapped",
        "next",
        "previous",
        "requested",
        "size",
        "span",
        "streams",
    )

    def __init__(self, address: int, size: int, home: FreeBlocks) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.requested = 0
        self.previous: Block | None = None
        self.next: Block | None = None
        self.free = False
        self.mapped = True
        self.streams: set[int] | None = None
        # The expandable segment it lies in; None for memory from cudaMalloc.
        self.span: AddressRange | None = None
        # The pool's search count when it became free: how garbage collection knows its age.
        self.born = 0

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return the rest, chained in behind."""
        rest = Block(self.address + size, self.size - size, self.home)
        rest.mapped = self.mapped
        rest.span = self.span
        rest.previous = self
        after = self.next
        rest.next = after
        if after is not None:
            after.previous = rest
        self.next = rest
        self.size = size
        return rest

    def absorb_previous(self) -> None:
        """Take over the block in front; the caller took it out of its set."""
        before = self.previous
        assert before is not None
        self.address = before.address
        self.size += before.size
        self.previous = before.previous
        if before.previous is not None:
            before.previous.next = self

    def absorb_next(self) -> None:
        """Take over the block behind; the caller took it out of its set."""
        after = self.next
        assert after is not None
        self.size += after.size
        self.next = after.next
        if after.next is not None:
            after.next.previous = self


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The addresses of one expandable segment; pages are mapped into it as needed."""

    base: int
    size: int
    page_bytes: int


class Pool:
    """The small or the large half of the default pool or of a private one."""

    __slots__ = ("is_small", "number", "searches")

    def __init__(self, number: int, *, is_small: bool) -> None:
        self.number = number
        self.is_small = is_small
        self.searches = 0


class FreeBlocks:
    """The free blocks of one pool that one stream may use, and its unmapped address ranges.

    torch keeps all streams of a pool in one set that is ordered by stream first; since no search
    looks past its own stream, a set for each is the same.
    """

    __slots__ = ("at", "keys", "pool", "stream", "unmapped")

    def __init__(self, pool: Pool, stream: int) -> None:
        self.pool = pool
        self.stream = stream
        # One integer a block, size in the high bits: it sorts like (size, address), only faster.
        self.keys: list[int] = []
        self.at: dict[int, Block] = {}
        self.unmapped: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        """The free blocks as of now, smallest first; the set may change meanwhile."""
        mask = (1 << ADDRESS_BITS) - 1
        return iter([self.at[key & mask] for key in self.keys])

    def first_of(self, size: int) -> int:
        """The position of the smallest block of at least ``size`` bytes."""
        return bisect_left(self.keys, size << ADDRESS_BITS)

    def block_at(self, position: int) -> Block:
        return self.at[self.keys[position] & ((1 << ADDRESS_BITS) - 1)]

    def add(self, block: Block) -> None:
        insort(self.keys, block.size << ADDRESS_BITS | block.address)
        self.at[block.address] = block
        block.free = True
        block.born = self.pool.searches

    def remove(self, block: Block) -> None:
        keys = self.keys
        del keys[bisect_left(keys, block.size << ADDRESS_BITS | block.address)]
        del self.at[block.address]
        block.free = False


class DeviceMemory:
    """The driver: it hands out bytes up to a capacity, at addresses that only ever grow.

    Growing addresses make equal blocks come out oldest segment first. Real addresses decide that
    in older releases, so a recording's can be given, in the order of the calls.
    """

    __slots__ = (
        "_known_addresses",
        "_next_address",
        "alloc_count",
        "allowed_bytes",
        "capacity_bytes",
        "reserved",
        "segment_addresses",
        "segment_count",
    )

    def __init__(
        self, capacity_bytes: int, allowed_bytes: int, known_addresses: tuple[int, ...] = ()
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.allowed_bytes = allowed_bytes
        self.reserved = 0
        self.segment_count = 0
        self.segment_addresses: list[int] = []
        self.alloc_count = 0
        self._next_address = _FIRST_ADDRESS
        self._known_addresses = iter(known_addresses)

    @property
    def limit_bytes(self) -> int:
        """The most that can be reserved."""
        return min(self.capacity_bytes, self.allowed_bytes)

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes; False, and nothing reserved, if they are not there."""
        if self.reserved + size > self.capacity_bytes:
            return False
        self.reserved += size
        self.alloc_count += 1
        return True

    def restore_segment(self, address: int, size: int) -> None:
        """Count a segment that was there before; later ones get higher addresses."""
        self.restore_pages(size)
        self.segment_count += 1
        self.restore_range(address, size)

    def restore_pages(self, size: int) -> None:
        """Count ``size`` bytes that were reserved before."""
        self.reserved += size

    def restore_range(self, address: int, size: int = 0) -> None:
        """Take note of addresses that are taken."""
        self.segment_addresses.append(address)
        self._next_address = max(self._next_address, address + size)

    def give_back(self, size: int) -> None:
        self.reserved -= size

    def new_range(self, size: int) -> int:
        """Begin a segment of ``size`` bytes at an address that was never handed out before."""
        return self._begin_segment(size, 0)

    def new_segment(self, size: int) -> int:
        """Begin a segment where the recording's next one began, if that is known."""
        return self._begin_segment(size, next(self._known_addresses, 0))

    def _begin_segment(self, size: int, known_address: int) -> int:
        address = known_address or self._next_address
        if not known_address:
            self._next_address += size
        self.segment_addresses.append(address)
        return address
