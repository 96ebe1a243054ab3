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
from dataclasses import dataclass, field
from typing import Final

ADDRESS_BITS: Final = 64
_FIRST_ADDRESS: Final = 1 << 40


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one segment: in use, waiting for other streams, free, or not mapped."""

    address: int
    size: int
    home: FreeBlocks
    requested: int = 0
    previous: Block | None = None
    next: Block | None = None
    free: bool = False
    mapped: bool = True
    streams: set[int] | None = None
    # The expandable segment it lies in; None for memory from cudaMalloc.
    span: AddressRange | None = None
    # The pool's search count when it became free: how garbage collection knows its age.
    born: int = 0

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Keep the first ``size`` bytes and return the rest, chained in behind."""
        rest = Block(self.address + size, self.size - size, self.home)
        rest.mapped, rest.span = self.mapped, self.span
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.size = size
        return rest

    def join_neighbours(self) -> int:
        """Take over free neighbours that are mapped, or not, as it is; return their bytes."""
        own_bytes = self.size
        before, after = self.previous, self.next
        if before is not None and before.free and before.mapped is self.mapped:
            before.leave_set()
            self.address = before.address
            self.size += before.size
            self.previous = before.previous
            if before.previous is not None:
                before.previous.next = self
        if after is not None and after.free and after.mapped is self.mapped:
            after.leave_set()
            self.size += after.size
            self.next = after.next
            if after.next is not None:
                after.next.previous = self
        return self.size - own_bytes

    def leave_set(self) -> None:
        if self.mapped:
            self.home.remove(self)
        else:
            self.home.unmapped.remove(self)


@dataclass(frozen=True, slots=True)
class AddressRange:
    """The addresses of one expandable segment; pages are mapped into it as needed."""

    base: int
    size: int
    page_bytes: int


@dataclass(slots=True)
class Pool:
    """The small or the large half of the default pool or of a private one."""

    number: int
    is_small: bool
    searches: int = 0


@dataclass(slots=True, eq=False)
class FreeBlocks:
    """The free blocks of one pool that one stream may use, and its unmapped address ranges.

    torch keeps all streams of a pool in one set that is ordered by stream first; since no search
    looks past its own stream, a set for each is the same.
    """

    pool: Pool
    stream: int
    # One integer a block, size in the high bits: it sorts like (size, address), only faster.
    keys: list[int] = field(default_factory=list)
    at: dict[int, Block] = field(default_factory=dict)
    unmapped: list[Block] = field(default_factory=list)

    def __iter__(self) -> Iterator[Block]:
        """The free blocks as of now, smallest first; the set may change meanwhile."""
        mask = (1 << ADDRESS_BITS) - 1
        return iter([self.at[key & mask] for key in self.keys])

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


@dataclass(eq=False)
class DeviceMemory:
    """The driver: it hands out bytes up to a capacity, at addresses that only ever grow.

    Growing addresses make equal blocks come out oldest segment first. Real addresses decide that
    in older releases, so a recording's can be given, in the order of the calls.
    """

    capacity_bytes: int
    allowed_bytes: int
    known_addresses: Iterator[int] = field(default_factory=lambda: iter(()))
    reserved: int = 0
    segment_count: int = 0
    segment_addresses: list[int] = field(default_factory=list)
    alloc_count: int = 0
    next_address: int = _FIRST_ADDRESS

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

    def restore_range(self, address: int, size: int) -> None:
        """Take note of addresses that are taken: later ones are higher."""
        self.segment_addresses.append(address)
        self.next_address = max(self.next_address, address + size)

    def give_back(self, size: int) -> None:
        self.reserved -= size

    def new_segment(self, size: int) -> int:
        """Begin a segment where the recording's next one began, if that is known."""
        self.segment_count += 1
        return self.new_range(size, next(self.known_addresses, 0))

    def new_range(self, size: int, known_address: int = 0) -> int:
        """Return where ``size`` bytes begin: addresses that were never handed out before."""
        address = known_address or self.next_address
        if not known_address:
            self.next_address += size
        self.segment_addresses.append(address)
        return address
