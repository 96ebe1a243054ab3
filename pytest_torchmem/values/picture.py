"""A timeline small enough to send, to store and to draw: what `sampling` leaves of a profile.

Plain builtins, so that a controller or a report needs neither numpy nor the arrays behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_torchmem.values import json_values
from pytest_torchmem.values.contributors import (
    CATEGORIES_BY_NAME,
    Category,
    CategoryBytes,
    Contributor,
    Source,
)
from pytest_torchmem.values.json_values import OTHERWISE, SIGNED, Json, JsonFields, JsonRow

# What JSON has of the series of a timeline: of times the differences, of levels a flat list of
# (moment, bytes from there on) pairs, because most contributors change at few moments.


def _differences(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip((0, *values), values, strict=False)]


def _sums(differences: Json) -> tuple[int, ...]:
    return tuple(itertools.accumulate(json_values.checked_numbers(differences)))


def _changes(levels: Sequence[int]) -> list[int]:
    flat: list[int] = []
    before = 0
    for moment, level in enumerate(levels):
        if level != before:
            flat += (moment, level)
            before = level
    return flat


@dataclass(frozen=True, slots=True)
class Track(JsonFields):
    """One contributor over time.

    Attributes:
        contributor: Who it is; its bytes and count are those of its largest moment.
        levels: Its bytes at each of the picture's moments.
    """

    contributor: Contributor
    levels: tuple[int, ...] = field(metadata={"write": _changes})


@dataclass(frozen=True, slots=True)
class OperatorUse(JsonRow):
    """The allocations of one operator over a window, all its calls together.

    Attributes:
        operator: Its name, as in `Contributor.operator`.
        allocated_bytes: What it allocated in all.
        at_peak_bytes: How much of that was live at the peak.
        self_time_ns: How long its calls took, with the operators that they called and without other
            code that ran within them; 0 where it is not known.
    """

    operator: str
    calls: int
    allocated_bytes: int
    at_peak_bytes: int
    self_time_ns: int = 0


@dataclass(frozen=True, slots=True)
class Span(JsonRow):
    """A named stretch of time: a region, a step, a backward pass, an optimizer step."""

    kind: str
    name: str
    begin_ns: int = field(metadata=SIGNED)
    end_ns: int = field(metadata=SIGNED)


@dataclass(frozen=True, slots=True)
class StorageBlock:
    """One storage over time.

    Attributes:
        begin: The number of the first change at which it is live.
        end: The number of the change that ends it; the number of all changes where none does.
        size_bytes: Its size.
        who: Its place in `Blocks.who`.
        stack: Its place in `Blocks.stacks`; -1 where no Python call was recorded around it.
    """

    begin: int
    end: int
    size_bytes: int
    who: int
    stack: int = -1


@dataclass(frozen=True, slots=True)
class Blocks:
    """The storages that matter most one by one, and what the others hold together.

    Attributes:
        blocks: By when they begin.
        who: Where blocks come from: contributors without numbers.
        stacks: Python calls as a tree, so that what several stacks share is there once: for each
            call the place of the one around it (-1: none) and its frame's place in `frames`.
        frames: Functions, with the line on which each makes the next call.
        rest: At each moment of the picture the bytes of all storages that have no block.
        count: How many storages there are, those without a block included.
    """

    blocks: tuple[StorageBlock, ...] = ()
    who: tuple[Contributor, ...] = ()
    stacks: tuple[tuple[int, int], ...] = ()
    frames: tuple[Source, ...] = ()
    rest: tuple[int, ...] = ()
    count: int = 0

    def stack(self, block: StorageBlock) -> Iterator[Source]:
        """Yield the Python calls around a block, innermost first."""
        node = block.stack
        while node >= 0:
            node, frame = self.stacks[node]
            yield self.frames[frame]

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        names = dict.fromkeys(source.file for source in self.frames)
        files = {file: number for number, file in enumerate(names)}
        begins = _differences([block.begin for block in self.blocks])
        return {
            "who": [who.to_json() for who in self.who],
            "files": list(files),
            "frames": [[files[f.file], f.line, f.function] for f in self.frames],
            "stacks": [number for node in self.stacks for number in node],
            "blocks": [
                number
                for after, block in zip(begins, self.blocks, strict=True)
                for number in (
                    after,
                    block.end - block.begin,
                    block.size_bytes,
                    block.who,
                    block.stack,
                )
            ],
            "rest": _changes(self.rest),
            "count": self.count,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json], moments: int) -> Blocks:
        """Return the value that `to_json` was given, for a picture of so many moments.

        Raises one of `WRONG` for data of another shape, as for a place that is not there.
        """
        who = tuple(map(Contributor.from_json, json_values.checked_list(data["who"])))
        files = json_values.checked_texts(data["files"])
        frames = tuple(_frame(files, row) for row in json_values.checked_list(data["frames"]))
        flat = json_values.checked_numbers(data["stacks"])
        stacks = tuple(zip(flat[::2], flat[1::2], strict=True))
        for place, (around, frame) in enumerate(stacks):
            # The calls around a call come before it. So a walk along them ends.
            _check_place(around, place, least=-1)
            _check_place(frame, len(frames))
        blocks = tuple(_blocks(json_values.checked_numbers(data["blocks"])))
        for block in blocks:
            _check_place(block.who, len(who))
            _check_place(block.stack, len(stacks), least=-1)
            if not 0 <= block.begin <= block.end or block.size_bytes < 0:
                raise ValueError("a storage ends before it begins, or has less than no bytes")
        rest = _levels(data["rest"], moments)
        return cls(blocks, who, stacks, frames, rest, json_values.whole_number(data["count"]))


def _frame(files: Sequence[str], row: Json) -> Source:
    file, line, function = json_values.checked_list(row)
    _check_place(json_values.whole_number(file), len(files))
    return Source(files[file], json_values.whole_number(line), json_values.checked_text(function))


def _blocks(flat: Sequence[int]) -> Iterator[StorageBlock]:
    begins = itertools.accumulate(flat[::_BLOCK_FIELDS])
    rows = zip(begins, *(flat[n::_BLOCK_FIELDS] for n in range(1, _BLOCK_FIELDS)), strict=True)
    return (StorageBlock(begin, begin + lives, *rest) for begin, lives, *rest in rows)


def _check_place(place: int, count: int, least: int = 0) -> None:
    if not least <= place < count:
        raise ValueError(f"there is no place {place} in a list of {count}")


_BLOCK_FIELDS: Final = 5


_SERIES: Final = {"read": _sums, "write": _differences}
_LAST: Final[Mapping[str, Json]] = {"read": lambda _: {}}
"""The field is read when the number of moments is known."""


@dataclass(frozen=True, slots=True)
class Picture(JsonFields):
    """Bytes by category at chosen moments. Each is exact; what lies between two is left out.

    The moment of the peak, that of each category's own peak, the first and the last are always
    among them.

    Attributes:
        times_ns: When each moment is, since the start of the recording.
        rows: The number of each moment among all changes.
        change_count: How many changes there were in all.
        levels: For each category that ever held bytes, its bytes at each moment.
        tracks: The contributors that matter at some moment, the largest first.
        operators: The operators that allocated most, those of the peak first.
        spans: Named stretches of time.
        running: What ran at the peak, outermost first: labels and operators.
        estimated: True when the numbers were not measured; times then count graph nodes.
        blocks: Storages one by one.
    """

    times_ns: tuple[int, ...] = field(metadata=_SERIES)
    rows: tuple[int, ...] = field(metadata=_SERIES)
    change_count: int
    levels: Mapping[Category, tuple[int, ...]] = field(
        metadata={"write": lambda levels: {c.value: _changes(levels[c]) for c in levels}, **_LAST}
    )
    tracks: tuple[Track, ...] = ()
    operators: tuple[OperatorUse, ...] = ()
    spans: tuple[Span, ...] = ()
    running: tuple[Span, ...] = ()
    estimated: bool = False
    blocks: Blocks = field(
        default_factory=Blocks,
        metadata={
            "write": lambda blocks: blocks.to_json() if blocks.rest else {},
            **_LAST,
        },
    )
    _totals: tuple[int, ...] = field(init=False, repr=False, compare=False, metadata=OTHERWISE)

    def __post_init__(self) -> None:
        columns = list(self.levels.values())
        totals = tuple(map(sum, zip(*columns, strict=True))) or (0,) * len(self.times_ns)
        object.__setattr__(self, "_totals", totals)

    @property
    def totals(self) -> tuple[int, ...]:
        """The footprint at each moment."""
        return self._totals

    @property
    def peak(self) -> int:
        """The first moment at which the footprint is largest; the picture must not be empty."""
        return self._totals.index(max(self._totals))

    def at(self, moment: int) -> CategoryBytes:
        """The composition at a moment."""
        return CategoryBytes.of({c: column[moment] for c, column in self.levels.items()})

    def with_files(self, renamed: Callable[[str], str]) -> Picture:
        """Return the picture with other names for the files in it."""
        blocks = replace(
            self.blocks,
            who=tuple(who.with_file(renamed) for who in self.blocks.who),
            frames=tuple(frame.with_file(renamed) for frame in self.blocks.frames),
        )
        tracks = (replace(t, contributor=t.contributor.with_file(renamed)) for t in self.tracks)
        return replace(self, tracks=tuple(tracks), blocks=blocks)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Picture:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        read = json_values.read_fields(cls, data)
        count = len(read.times_ns)
        if count > MOST_MOMENTS or len(read.tracks) > MOST_TRACKS or len(read.rows) != count:
            raise ValueError(
                f"a timeline of {count} moments, {len(read.rows)} rows and {len(read.tracks)} "
                "origins is none"
            )
        for row in read.rows:
            _check_place(row, read.change_count)
        levels = json_values.checked_object(data["levels"]).items()
        return replace(
            read,
            levels={
                json_values.checked_member(CATEGORIES_BY_NAME, c): _levels(n, count)
                for c, n in levels
            },
            tracks=tuple(replace(t, levels=_levels(t.levels, count)) for t in read.tracks),
            blocks=Blocks.from_json(data["blocks"], count) if data.get("blocks") else Blocks(),
        )


MOST_MOMENTS: Final = 10_000
"""A picture has about 400 moments. A file with more than this was not written by us."""

MOST_TRACKS: Final = 200
"""A picture has up to 40 tracks, each with a number for each moment."""


def _levels(data: Json, count: int) -> tuple[int, ...]:
    """Return the bytes at each of ``count`` moments from the pairs that `_changes` gave."""
    flat = json_values.whole_numbers(data)
    moments = (*flat[::2], count)
    if any(later <= moment for moment, later in itertools.pairwise(moments)):
        raise ValueError(f"the moments of a timeline are not in order, or not all below {count}")
    levels: list[int] = []
    level = 0
    for moment, after in zip(flat[::2], flat[1::2], strict=True):
        levels += [level] * (moment - len(levels))
        level = after
    return tuple(levels + [level] * (count - len(levels)))
