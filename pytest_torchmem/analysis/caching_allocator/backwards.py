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

from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

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
)
from pytest_torchmem.values.errors import RequestError
from pytest_torchmem.values.json_values import checked_list, shown, whole_number

_FREE: Final = BlockState.FREE


@dataclass(slots=True)
class _Piece:
    """A block while entries are taken back."""

    address: int
    size: int
    state: BlockState = _FREE
    requested: int = 0

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(slots=True)
class _Stretch:
    """A segment, or a stretch of mapped pages, with its blocks by address."""

    address: int
    size: int
    stream: int
    pool: int
    is_small: bool
    is_expandable: bool
    starts: list[int] = field(default_factory=list)
    pieces: dict[int, _Piece] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.address + self.size

    @property
    def largest_tail(self) -> int:
        """The most that a block of the segment may have behind what was asked for."""
        splits_all = self.is_small or self.is_expandable
        return BLOCK_UNIT_BYTES - 1 if splits_all else SMALL_LIMIT_BYTES

    def add(self, piece: _Piece) -> None:
        if piece.size > 0:
            insort(self.starts, piece.address)
            self.pieces[piece.address] = piece

    def drop(self, piece: _Piece) -> None:
        self.starts.remove(piece.address)
        del self.pieces[piece.address]

    def around(self, address: int) -> _Piece | None:
        """Return the block that holds an address."""
        place = bisect_right(self.starts, address) - 1
        piece = self.pieces[self.starts[place]] if place >= 0 else None
        return piece if piece is not None and address < piece.end else None

    def neighbours(self, piece: _Piece) -> tuple[_Piece | None, _Piece | None]:
        before = self.around(piece.address - 1)
        return before, self.pieces.get(piece.end)


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
        self._stretches: dict[int, _Stretch] = {}
        self._starts: list[int] = []
        for segment in segments:
            self._insert(_stretch(segment, pools))

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

    def _insert(self, stretch: _Stretch) -> None:
        insort(self._starts, stretch.address)
        self._stretches[stretch.address] = stretch

    def _remove(self, stretch: _Stretch) -> None:
        self._starts.remove(stretch.address)
        del self._stretches[stretch.address]

    def _find(self, entry: TraceEntry) -> _Stretch:
        place = bisect_right(self._starts, entry["addr"]) - 1
        stretch = self._stretches[self._starts[place]] if place >= 0 else None
        if stretch is None or entry["addr"] >= stretch.end:
            raise _contradiction(entry, "lies in no segment")
        return stretch

    def _unalloc(self, entry: TraceEntry) -> None:
        stretch = self._find(entry)
        piece = stretch.pieces.get(entry["addr"])
        if piece is None or piece.state is _FREE:
            raise _contradiction(entry, "is not in use")
        piece.state, piece.requested = _FREE, 0
        _, after = stretch.neighbours(piece)
        if after is not None and after.state is _FREE:
            # The block was split off the front of a free one, of which this is the rest.
            stretch.drop(after)
            piece.size += after.size

    def _unfree(self, entry: TraceEntry) -> None:
        stretch = self._find(entry)
        free = stretch.around(entry["addr"])
        if free is None or free.state is not _FREE:
            raise _contradiction(entry, "is not free")
        begin, end = entry["addr"], free.end
        least = begin + self._settings.block_bytes(entry["size"])
        if least > end:
            raise _contradiction(entry, "has no room in its segment")
        unsplit = least - begin >= self._settings.max_split_bytes
        if end - least > stretch.largest_tail and not unsplit:
            end = least
        stretch.drop(free)
        self._leave_in_front(stretch, free.address, begin)
        stretch.add(_Piece(begin, end - begin, BlockState.WAITING, entry["size"]))
        stretch.add(_Piece(end, free.end - end))

    @staticmethod
    def _leave_in_front(stretch: _Stretch, address: int, end: int) -> None:
        before = stretch.around(address - 1)
        if before is not None and end - address <= stretch.largest_tail:
            before.size += end - address
        else:
            stretch.add(_Piece(address, end - address))

    def _unrequest(self, entry: TraceEntry) -> None:
        piece = self._find(entry).pieces.get(entry["addr"])
        if piece is None or piece.state is _FREE:
            raise _contradiction(entry, "is not in use")
        piece.state = BlockState.IN_USE

    def _unmap(self, entry: TraceEntry) -> None:
        """Take a segment, or pages, away again: they must be free as a whole."""
        stretch = self._find(entry)
        begin, end = entry["addr"], entry["addr"] + entry["size"]
        free = stretch.around(begin)
        if free is None or free.state is not _FREE or end > free.end:
            raise _contradiction(entry, "is in use before it was taken from the device")
        self._remove(stretch)
        stretch.drop(free)
        stretch.add(_Piece(free.address, begin - free.address))
        stretch.add(_Piece(end, free.end - end))
        for first, last in ((stretch.address, begin), (end, stretch.end)):
            if first < last:
                self._insert(_part(stretch, first, last))

    def _give(self, entry: TraceEntry) -> None:
        """Put back a segment, or pages, that went to the device."""
        begin, size = entry["addr"], entry["size"]
        expandable = entry["action"] == "segment_unmap"
        pool = number_of_pool(entry.get("pool_id"), self._pools)
        page = self._settings.large_segment_bytes if expandable else SMALL_SEGMENT_BYTES + 1
        is_small = bool(size % page) if expandable else size < page
        stretch = _Stretch(begin, size, entry["stream"], pool, is_small, expandable)
        stretch.add(_Piece(begin, size))
        if expandable:
            stretch = self._joined(stretch)
        self._insert(stretch)

    def _joined(self, stretch: _Stretch) -> _Stretch:
        """Join pages with the stretches that they lie between."""
        place = bisect_right(self._starts, stretch.address)
        for at in (place, place - 1):
            if not 0 <= at < len(self._starts):
                continue
            other = self._stretches[self._starts[at]]
            if other.is_expandable and stretch.address in (other.end, other.address - stretch.size):
                self._remove(other)
                stretch = _union(*sorted((stretch, other), key=lambda part: part.address))
        return stretch

    def _placed(self) -> tuple[PlacedSegment, ...]:
        key = NO_KEY
        placed = []
        for start in self._starts:
            stretch = self._stretches[start]
            blocks = []
            for piece in (stretch.pieces[at] for at in stretch.starts):
                key -= piece.state is not _FREE
                own = NO_KEY if piece.state is _FREE else key
                blocks.append(
                    PlacedBlock(piece.address, piece.size, piece.state, own, piece.requested)
                )
            placed.append(
                PlacedSegment(
                    stretch.address,
                    stretch.size,
                    stretch.stream,
                    stretch.pool,
                    tuple(blocks),
                    stretch.is_small,
                    stretch.is_expandable,
                )
            )
        return tuple(placed)


def _stretch(segment: Mapping[str, object], pools: Pools) -> _Stretch:
    stretch = _Stretch(
        _whole(segment["address"]),
        _whole(segment["total_size"]),
        _whole(segment["stream"]),
        number_of_pool(segment.get("segment_pool_id"), pools),
        segment.get("segment_type") == "small",
        bool(segment.get("is_expandable", False)),
    )
    address = stretch.address
    for block in checked_list(segment["blocks"]):
        size, state = _whole(block["size"]), _STATES[block["state"]]
        requested = 0 if state is _FREE else _whole(block.get("requested_size", size))
        # Blocks have addresses of their own since torch 2.1; before, each follows the last one.
        stretch.add(_Piece(_whole(block.get("address", address)), size, state, requested))
        address += size
    return stretch


_STATES: Final = {
    "active_allocated": BlockState.IN_USE,
    "active_pending_free": BlockState.WAITING,
    "active_awaiting_free": BlockState.WAITING,
    "inactive": BlockState.FREE,
}


def _part(stretch: _Stretch, begin: int, end: int) -> _Stretch:
    part = _Stretch(
        begin, end - begin, stretch.stream, stretch.pool, stretch.is_small, stretch.is_expandable
    )
    for start in stretch.starts:
        if begin <= start < end:
            part.add(stretch.pieces[start])
    return part


def _union(first: _Stretch, second: _Stretch) -> _Stretch:
    joined = _part(first, first.address, second.end)
    joined.is_small = first.is_small and second.is_small
    for start in second.starts:
        joined.add(second.pieces[start])
    piece, before = joined.pieces.get(second.address), joined.around(second.address - 1)
    if piece and before and piece.state is before.state is _FREE:
        joined.drop(piece)
        before.size += piece.size
    return joined


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
