"""One device's caching allocator as a state machine: what each request does to the blocks.

Source: ``DeviceCachingAllocator`` in ``c10/cuda/CUDACachingAllocator.cpp``; a method here names the
function there that it follows. docs/caching-allocator.md tells the rules and where torch's
releases differ.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from pytest_torchmem.analysis.caching_allocator.allocator_settings import (
    BLOCK_UNIT_BYTES,
    SMALL_LIMIT_BYTES,
    UNLIMITED_BYTES,
    AllocatorSettings,
)
from pytest_torchmem.analysis.caching_allocator.blocks import (
    ADDRESS_BITS,
    Block,
    DeviceMemory,
    FreeBlocks,
    Pool,
)
from pytest_torchmem.analysis.caching_allocator.expandable import (
    grow,
    largest_growth,
    unmap_whole_pages,
)
from pytest_torchmem.analysis.caching_allocator.requests import DEFAULT_POOL
from pytest_torchmem.values.errors import RequestError


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed, and the state in which it did: after all that could be given back.

    Attributes:
        row: Which request failed.
        requested_bytes: What was asked for.
        segment_bytes: What was asked of the device for it; torch's message names this number.
        free_bytes: What the device still had to give.
        reserved_bytes: What the allocator held of the device.
        allocated_bytes: How much of that was in use.
    """

    row: int
    requested_bytes: int
    segment_bytes: int
    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int


class Device:
    """The allocator of one device. Its counters are those of ``torch.cuda.memory_stats()``."""

    def __init__(
        self, settings: AllocatorSettings, memory: DeviceMemory, completions_given: bool = False
    ) -> None:
        self.settings = settings
        self.memory = memory
        self.requested = 0
        self.allocated = 0
        self.active = 0
        self.inactive_split = 0
        self.retry_count = 0
        self.out_of_memory: list[OutOfMemory] = []
        self.live: dict[int, Block] = {}
        self.homes: dict[tuple[int, int, bool], FreeBlocks] = {}
        # Freed blocks with their key and the streams they wait for; none: for the next look.
        self.waiting: list[tuple[int, Block, set[int]]] = []
        self._completions_given = completions_given
        self.capture_depth = 0
        # Blocks freed in a capture, with the streams that used them before it.
        self._deferred: list[tuple[int, Block]] = []
        self._capture_streams: dict[Block, set[int]] = {}
        self.released_pools: set[int] = set()
        self._pools: dict[tuple[int, bool], Pool] = {}
        # Keys without a block: of zero bytes, or of an allocation that failed.
        self._blockless: set[int] = set()
        self._rounds_up = any(divisions > 1 for divisions in settings.power2_divisions)
        # With nothing but defaults the first block that is large enough is the right one.
        self._takes_first_fit = (
            settings.max_split_bytes == UNLIMITED_BYTES
            and not settings.expandable_segments
            and not settings.collects_garbage
        )

    def alloc(self, row: int, key: int, requested: int, stream: int, pool: int) -> int:
        """Allocate and return the block's address, or 0 where no block was given (``malloc``)."""
        if key in self.live or key in self._blockless:
            raise RequestError(f"row {row} allocates key {key}, which is live already")
        if requested <= 0:
            if requested < 0:
                raise RequestError(f"row {row} asks for {requested} bytes")
            self._blockless.add(key)
            return 0
        if (self.waiting or self._deferred) and not self.capture_depth:
            self._take_back(completed=True)
        if self._rounds_up:
            size = self.settings.block_bytes(requested)
        else:
            size = (requested + (BLOCK_UNIT_BYTES - 1)) & -BLOCK_UNIT_BYTES
        home = self.homes.get((stream, pool, size <= SMALL_LIMIT_BYTES))
        if home is None:
            home = self.home(stream, pool, is_small=size <= SMALL_LIMIT_BYTES)
        block = self._best_fit(home, size) or self._new_block(home, size)
        if block is None:
            self._blockless.add(key)
            self._note_out_of_memory(row, requested, size)
            return 0
        self._hand_out(block, size)
        block.requested = requested
        self.requested += requested
        self.live[key] = block
        return block.address

    def free(self, row: int, key: int) -> None:
        """Free at once, or when the other streams that used the block are done (``free``)."""
        block = self.live.pop(key, None)
        if block is None:
            if key not in self._blockless:
                raise RequestError(f"row {row} frees key {key}, which is not live")
            self._blockless.discard(key)
            return
        self.allocated -= block.size
        if block.streams is None:
            self._release(block)
        else:
            in_capture = self._capture_streams.pop(block, set())
            if self.capture_depth:
                block.streams -= in_capture
                self._deferred.append((key, block))
            else:
                self._wait_for_streams(key, block)

    def record_stream(self, row: int, key: int, stream: int) -> None:
        """Have the block's free wait for ``stream`` too (``recordStream``)."""
        block = self.live.get(key)
        if block is None:
            if key not in self._blockless:
                raise RequestError(f"row {row} records a stream on key {key}, which is not live")
            return
        if stream == block.home.stream:
            return
        block.streams = (block.streams or set()) | {stream}
        if self.capture_depth:
            self._capture_streams.setdefault(block, set()).add(stream)

    def stream_done(self, stream: int) -> None:
        for _, _, streams in self.waiting:
            streams.discard(stream)

    def block_done(self, key: int) -> None:
        for waiting_key, _, streams in self.waiting:
            if waiting_key == key:
                streams.clear()

    def empty_cache(self) -> None:
        """Give back what can be given back (``release_cached_blocks``)."""
        pools = set(self.released_pools)
        if not self.capture_depth:
            self._take_back()
            pools.add(DEFAULT_POOL)
        homes = (home for home in self.homes.values() if home.pool.number in pools)
        for block in (block for home in homes for block in home):
            if block.span is not None:
                unmap_whole_pages(block, self.memory)
            elif not block.is_split:
                self._give_back_segment(block)

    def waiting_blocks(self) -> list[tuple[int, Block]]:
        """Return freed blocks that wait for streams or for a capture's end, with their keys."""
        return [(key, block) for key, block, _ in self.waiting] + self._deferred

    def home(self, stream: int, pool: int, *, is_small: bool) -> FreeBlocks:
        """Return the free blocks that a stream may use of a pool, a new set the first time."""
        if free_blocks := self.homes.get((stream, pool, is_small)):
            return free_blocks
        half = self._pools.setdefault((pool, is_small), Pool(pool, is_small=is_small))
        home = FreeBlocks(half, stream)
        self.homes[stream, pool, is_small] = home
        return home

    def _best_fit(self, home: FreeBlocks, size: int) -> Block | None:
        """Take the smallest free block that serves (``get_free_block``)."""
        keys = home.keys
        position = bisect_left(keys, size << ADDRESS_BITS)
        if not self._takes_first_fit:
            home.pool.searches += self.settings.collects_garbage
            position = self._acceptable(home, size, position)
        if position >= len(keys):
            return None
        block = home.at.pop(keys.pop(position) & ((1 << ADDRESS_BITS) - 1))
        block.free = False
        if block.span is None and (block.next is not None or block.previous is not None):
            self.inactive_split -= block.size
        return block

    def _acceptable(self, home: FreeBlocks, size: int, position: int) -> int:
        """The position of the block to take, seen with all settings; past the end if none is."""
        end = len(home.keys)
        if position == end:
            return end
        block = home.block_at(position)
        if self.settings.expandable_segments:
            while position + 1 < end:
                candidate = home.block_at(position + 1)
                if largest_growth(candidate) >= largest_growth(block):
                    break
                position, block = position + 1, candidate
        limit = self.settings.max_split_bytes
        if size < limit:
            return end if block.size >= limit else position
        excess = block.size - size
        return end if excess >= self.settings.max_non_split_rounding_bytes else position

    def _hand_out(self, block: Block, size: int) -> None:
        """Split off what is not needed and count the rest (``alloc_found_block``)."""
        rest_size = block.size - size
        if rest_size >= BLOCK_UNIT_BYTES and (
            block.home.pool.is_small
            or block.span is not None
            or (rest_size > SMALL_LIMIT_BYTES and size < self.settings.max_split_bytes)
        ):
            block.home.add(block.cut(size))
            if block.span is None:
                self.inactive_split += rest_size
        self.allocated += block.size
        self.active += block.size

    def _release(self, block: Block) -> None:
        """Put a block among the free ones, joined with free neighbours (``free_block``)."""
        self.active -= block.size
        self.requested -= block.requested
        idle_before = block.join_neighbours()
        block.home.add(block)
        if block.span is None:
            self.inactive_split -= idle_before
            if block.previous is not None or block.next is not None:
                self.inactive_split += block.size

    def _new_block(self, home: FreeBlocks, size: int) -> Block | None:
        """Get a block from the device, giving back cached memory if it must (``malloc``)."""
        if self.settings.collects_garbage:
            self._collect_garbage()
        block = self._ask_device(home, size)
        if block is not None or self._refused_early(size):
            return block
        if self._give_back_oversize(home, size):
            block = self._ask_device(home, size)
        if block is None and not self.capture_depth:
            self.empty_cache()
            self.retry_count += 1
            block = self._ask_device(home, size)
        return block

    def _ask_device(self, home: FreeBlocks, size: int) -> Block | None:
        memory = self.memory
        segment_bytes = self.settings.segment_bytes(size)
        if memory.reserved + segment_bytes > memory.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return grow(home, size, memory, self.settings.large_segment_bytes)
        if not memory.take(segment_bytes):
            return None
        return Block(memory.new_segment(segment_bytes), segment_bytes, home)

    def _refused_early(self, size: int) -> bool:
        memory = self.memory
        settings = self.settings
        if not settings.throw_on_cudamalloc_oom or settings.limits_process:
            # A lower limit of the process fails first, and that failure is retried.
            return False
        return memory.reserved + settings.segment_bytes(size) > memory.capacity_bytes

    def _give_back_segment(self, block: Block) -> None:
        block.home.remove(block)
        self.memory.give_back(block.size)
        self.memory.segment_count -= 1

    def _give_back_oversize(self, home: FreeBlocks, size: int) -> bool:
        """Give back just enough unsplittable blocks (``release_available_cached_blocks``)."""
        limit = self.settings.max_split_bytes
        if limit == UNLIMITED_BYTES:
            return False
        target = max(size, limit)
        position = bisect_left(home.keys, target << ADDRESS_BITS)
        if position < len(home.keys) and home.block_at(position).span is None:
            self._give_back_segment(home.block_at(position))
            return True
        released = 0
        for block in reversed(list(home)[:position]):
            if released >= target or block.size < limit:
                break
            if block.span is None:
                released += block.size
                self._give_back_segment(block)
        return released >= target

    def _collect_garbage(self) -> None:
        """Give back segments that were not reused for long (``garbage_collect_cached_blocks``)."""
        memory, settings = self.memory, self.settings
        threshold_bytes = int(settings.garbage_collection_threshold * memory.allowed_bytes)
        target = memory.reserved - threshold_bytes
        ages = {
            block: block.home.pool.searches - block.born
            for home in self.homes.values()
            if home.pool.number == DEFAULT_POOL and not home.pool.is_small
            for block in home
            if not block.is_split
        }
        while target > 0 and ages:
            average = sum(ages.values()) / len(ages)
            old = [block for block, age in ages.items() if age >= average and block.span is None]
            if not old:
                return
            for block in old:
                target -= block.size
                del ages[block]
                self._give_back_segment(block)

    def _wait_for_streams(self, key: int, block: Block) -> None:
        streams = set(block.streams or ()) if self._completions_given else set()
        self.waiting.append((key, block, streams))
        block.streams = None

    def _take_back(self, *, completed: bool = False) -> None:
        """Free what waits for other streams: all of it (``synchronize_and_free_events``).

        Or what is ``completed``: it waits for nothing any more (``process_events``).
        """
        # Blocks freed in a capture wait for earlier uses only: the others were joined.
        for key, block in self._deferred:
            if block.streams:
                self._wait_for_streams(key, block)
            else:
                block.streams = None
                self._release(block)
        self._deferred = []
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            if completed and entry[2]:
                self.waiting.append(entry)
            else:
                self._release(entry[1])

    def _note_out_of_memory(self, row: int, requested: int, size: int) -> None:
        memory = self.memory
        self.out_of_memory.append(
            OutOfMemory(
                row=row,
                requested_bytes=requested,
                segment_bytes=self.settings.segment_bytes(size),
                free_bytes=memory.limit_bytes - memory.reserved,
                reserved_bytes=memory.reserved,
                allocated_bytes=self.allocated,
            )
        )
