"""The layout at the beginning of a history, found from the one at its end.

Most published snapshots begin with memory in place. What was there is in no entry, but it follows
from the last layout, which a snapshot holds, by taking back one entry after the other::

    at the end         |  a in use  |  free               |
    free b taken back  |  a in use  |  b in use  |  free  |
    alloc a taken back |  free      |  b in use  |  free  |   <- b was there before

An entry of a free says where the block began and what was asked for. Where it ended follows from
the allocator's rule for splitting: a large block keeps an end of up to 1 MiB, so no free block of a
large segment is as small as that, and a piece that is belongs to the block in front of it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pytest_torchmem.analysis.caching_allocator.allocator_history import (
    Pools,
    TraceEntry,
    number_of_pool,
)
from pytest_torchmem.analysis.caching_allocator.allocator_settings import (
    BLOCK_UNIT_BYTES,
    SMALL_LIMIT_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)
from pytest_torchmem.analysis.caching_allocator.layout import (
    NO_KEY,
    BlockState,
    PlacedBlock,
    PlacedSegment,
    in_rows,
)
from pytest_torchmem.values.errors import RequestError
from pytest_torchmem.values.json_values import checked_list, shown, whole_number

_FREE: Final = BlockState.FREE


class _Segment(NamedTuple):
    """The part of a segment that its blocks share."""

    # Where it begins; 0 for an expandable one, of which stretches of pages come and go.
    base: int
    stream: int
    pool: int
    is_small: bool

    @property
    def is_expandable(self) -> bool:
        return not self.base

    @property
    def largest_tail(self) -> int:
        """The most that a block of the segment may have behind what was asked for."""
        splits_all = self.is_small or self.is_expandable
        return BLOCK_UNIT_BYTES - 1 if splits_all else SMALL_LIMIT_BYTES


@dataclass(slots=True)
class _Piece:
    """A block while entries are taken back."""

    address: int
    size: int
    segment: _Segment
    state: BlockState = _FREE
    requested: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size

    def continues(self, before: _Piece) -> bool:
        """Return whether it comes right behind another one in its segment."""
        same = self.segment == before.segment
        expandable = self.segment.is_expandable and before.segment.is_expandable
        return before.end == self.address and (same or expandable)


class BackwardsLayout:
    """The layout at an entry of a history, taken back entry by entry from the end.

    ``segments`` are those of torch's snapshot for one device. Raises `RequestError` where an entry
    contradicts the layout, as in a history with entries missing within.
    """

    def __init__(
        self, segments: Iterable[Mapping[str, object]], settings: AllocatorSettings, pools: Pools
    ) -> None:
        self._settings = settings
        self._pools = pools
        # All blocks by address, and the addresses in order.
        self._pieces: dict[int, _Piece] = {}
        self._starts: list[int] = []
        for segment in segments:
            for piece in _pieces(segment, pools):
                self._add(piece)

    def take_back(self, entries: Sequence[TraceEntry]) -> tuple[PlacedSegment, ...]:
        """Take back all entries, the last one first, and return the layout before the first.

        Each block in use gets a key of its own, counted down from -2.
        """
        undo = {
            "alloc": self._unalloc,
            "free_completed": self._unfree,
            "free_requested": self._unrequest,
            "segment_alloc": self._unmap,
            "segment_map": self._unmap,
            "segment_free": self._give,
            "segment_unmap": self._give,
        }
        for entry in reversed(entries):
            if step := undo.get(entry["action"]):
                step(entry)
        return self._placed()

    def _add(self, piece: _Piece) -> None:
        if piece.size > 0:
            insort(self._starts, piece.address)
            self._pieces[piece.address] = piece

    def _drop(self, piece: _Piece) -> None:
        del self._starts[bisect_left(self._starts, piece.address)]
        del self._pieces[piece.address]

    def _around(self, address: int) -> _Piece | None:
        """Return the block that holds an address."""
        place = bisect_right(self._starts, address) - 1
        piece = self._pieces[self._starts[place]] if place >= 0 else None
        return piece if piece is not None and address < piece.end else None

    def _find(self, entry: TraceEntry) -> _Piece:
        piece = self._around(entry["addr"])
        if piece is None:
            raise _contradiction(entry, "lies in no segment")
        return piece

    def _find_in_use(self, entry: TraceEntry) -> _Piece:
        piece = self._find(entry)
        if piece.address != entry["addr"] or piece.state is _FREE:
            raise _contradiction(entry, "is not in use")
        return piece

    def _unalloc(self, entry: TraceEntry) -> None:
        piece = self._find_in_use(entry)
        piece.state, piece.requested = _FREE, 0
        after = self._pieces.get(piece.end)
        if after is not None and after.state is _FREE and after.continues(piece):
            # The block was split off the front of a free one, of which this is the rest.
            self._drop(after)
            piece.size += after.size

    def _unfree(self, entry: TraceEntry) -> None:
        free = self._find(entry)
        if free.state is not _FREE:
            raise _contradiction(entry, "is not free")
        begin, end, segment = entry["addr"], free.end, free.segment
        least = begin + self._settings.block_bytes(entry["size"])
        if least > end:
            raise _contradiction(entry, "has no room in its segment")
        unsplit = least - begin >= self._settings.max_split_bytes
        if end - least > segment.largest_tail and not unsplit:
            end = least
        self._drop(free)
        before, in_front = self._around(free.address - 1), begin - free.address
        if before and free.continues(before) and in_front <= segment.largest_tail:
            before.size += in_front
        else:
            self._add(_Piece(free.address, in_front, segment))
        self._add(_Piece(begin, end - begin, segment, BlockState.WAITING, entry["size"]))
        self._add(_Piece(end, free.end - end, segment))

    def _unrequest(self, entry: TraceEntry) -> None:
        self._find_in_use(entry).state = BlockState.IN_USE

    def _unmap(self, entry: TraceEntry) -> None:
        """Take a segment, or pages, away again: they must be free as a whole."""
        free, begin, end = self._find(entry), entry["addr"], entry["addr"] + entry["size"]
        if free.state is not _FREE or end > free.end:
            raise _contradiction(entry, "is in use before it was taken from the device")
        self._drop(free)
        self._add(_Piece(free.address, begin - free.address, free.segment))
        self._add(_Piece(end, free.end - end, free.segment))

    def _give(self, entry: TraceEntry) -> None:
        """Put back a segment, or pages, which join the free ones that they lie between."""
        begin, size = entry["addr"], entry["size"]
        pool = number_of_pool(entry.get("pool_id"), self._pools)
        if entry["action"] == "segment_unmap":
            is_small, begin_of = bool(size % self._settings.large_segment_bytes), 0
        else:
            is_small, begin_of = size <= SMALL_SEGMENT_BYTES, begin
        piece = _Piece(begin, size, _Segment(begin_of, entry["stream"], pool, is_small))
        before, after = self._around(begin - 1), self._pieces.get(piece.end)
        if before and before.state is _FREE and piece.continues(before):
            self._drop(before)
            piece = _Piece(before.address, before.size + size, before.segment)
        if after and after.state is _FREE and after.continues(piece):
            self._drop(after)
            piece.size += after.size
        self._add(piece)

    def _placed(self) -> tuple[PlacedSegment, ...]:
        stretches = in_rows(map(self._pieces.__getitem__, self._starts), _Piece.continues)
        keys = itertools.count(NO_KEY - 1, -1)
        return tuple(
            PlacedSegment(
                address=stretch[0].address,
                size_bytes=sum(piece.size for piece in stretch),
                stream=stretch[0].segment.stream,
                pool=stretch[0].segment.pool,
                blocks=tuple(
                    PlacedBlock(
                        piece.address,
                        piece.size,
                        piece.state,
                        NO_KEY if piece.state is _FREE else next(keys),
                        piece.requested,
                    )
                    for piece in stretch
                ),
                is_small=all(piece.segment.is_small for piece in stretch),
                is_expandable=stretch[0].segment.is_expandable,
            )
            for stretch in stretches
        )


def _pieces(segment: Mapping[str, object], pools: Pools) -> Iterator[_Piece]:
    """Yield the blocks of a segment of torch's snapshot."""
    address = _whole(segment["address"])
    shared = _Segment(
        0 if segment.get("is_expandable", False) else address,
        _whole(segment["stream"]),
        number_of_pool(segment.get("segment_pool_id"), pools),
        segment.get("segment_type") == "small",
    )
    for block in checked_list(segment["blocks"]):
        size, state = _whole(block["size"]), _STATES[block["state"]]
        requested = 0 if state is _FREE else _whole(block.get("requested_size", size))
        # Blocks have addresses of their own since torch 2.1; before, each follows the last one.
        yield _Piece(_whole(block.get("address", address)), size, shared, state, requested)
        address += size


_STATES: Final = {
    "active_allocated": BlockState.IN_USE,
    "active_pending_free": BlockState.WAITING,
    "active_awaiting_free": BlockState.WAITING,
    "inactive": BlockState.FREE,
}


def _whole(value: object) -> int:
    try:
        return whole_number(value)
    except ValueError:
        raise RequestError(
            f"a snapshot has {shown(value)} where a number of bytes is needed"
        ) from None


def _contradiction(entry: TraceEntry, what: str) -> RequestError:
    return RequestError(
        f"the history does not fit the segments: {entry['action']} of {entry['size']} bytes at "
        f"{entry['addr']:#x} {what}; entries are missing, or the segments are of another moment"
    )
