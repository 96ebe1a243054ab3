"""A timeline small enough to send, to store and to draw: what `sampling` leaves of a profile.

Plain builtins, so that a controller or a report needs neither numpy nor the arrays behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Source,
    contributor_from_json,
    contributor_to_json,
)
from pytest_torchmem.values.json_values import Json


@dataclass(frozen=True, slots=True)
class Track:
    """One contributor over time.

    Attributes:
        contributor: Who it is; its bytes and count are those of its largest moment.
        levels: Its bytes at each of the picture's moments.
    """

    contributor: Contributor
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """The allocations of one operator over a window, all its calls together.

    Attributes:
        operator: Its name, as in `Contributor.operator`.
        calls: How often it ran.
        allocated_bytes: What it allocated in all.
        at_peak_bytes: How much of that was live at the peak.
        self_time_ns: How long its calls took, without what they called; 0 where it is not known.
    """

    operator: str
    calls: int
    allocated_bytes: int
    at_peak_bytes: int
    self_time_ns: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time: a region, a step, a backward pass, an optimizer step."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """The memory of one category that one module itself, without its parts, holds at the peak.

    Attributes:
        module: Its path, as in `Contributor.module`; ``""`` for what belongs to none.
        category: What the bytes are for.
        size_bytes: How many there are.
    """

    module: str
    category: Category
    size_bytes: int


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
            "who": [contributor_to_json(who) for who in self.who],
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
        """Return the value that `to_json` was given, for a picture of so many moments."""
        flat, stacks = data["blocks"], data["stacks"]
        begins = _sums(flat[::_BLOCK_FIELDS])
        rows = zip(begins, *(flat[n::_BLOCK_FIELDS] for n in range(1, _BLOCK_FIELDS)), strict=True)
        return cls(
            blocks=tuple(StorageBlock(begin, begin + lives, *rest) for begin, lives, *rest in rows),
            who=tuple(contributor_from_json(who) for who in data["who"]),
            stacks=tuple(zip(stacks[::2], stacks[1::2], strict=True)),
            frames=tuple(
                Source(data["files"][file], line, function)
                for file, line, function in data["frames"]
            ),
            rest=_levels(data["rest"], moments),
            count=data["count"],
        )


_BLOCK_FIELDS: Final = 5


@dataclass(frozen=True, slots=True)
class Picture:
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
        modules: What each module holds at the peak, the largest first.
        blocks: Storages one by one.
    """

    times_ns: tuple[int, ...]
    rows: tuple[int, ...]
    change_count: int
    levels: Mapping[Category, tuple[int, ...]]
    tracks: tuple[Track, ...] = ()
    operators: tuple[OperatorUse, ...] = ()
    spans: tuple[Span, ...] = ()
    estimated: bool = False
    modules: tuple[ModuleShare, ...] = ()
    blocks: Blocks = field(default_factory=Blocks)
    running: tuple[Span, ...] = ()
    _totals: tuple[int, ...] = field(init=False, repr=False, compare=False)

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

        def of_source(source: Source) -> Source:
            return replace(source, file=renamed(source.file))

        def of(who: Contributor) -> Contributor:
            return replace(who, source=of_source(who.source)) if who.source else who

        return replace(
            self,
            tracks=tuple(replace(t, contributor=of(t.contributor)) for t in self.tracks),
            blocks=replace(
                self.blocks,
                who=tuple(map(of, self.blocks.who)),
                frames=tuple(map(of_source, self.blocks.frames)),
            ),
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back.

        A series of levels is a flat list of (moment, bytes from there on) pairs: most contributors
        change at few moments.
        """
        return {
            "times_ns": _differences(self.times_ns),
            "rows": _differences(self.rows),
            "change_count": self.change_count,
            "levels": {c.value: _changes(column) for c, column in self.levels.items()},
            "tracks": [
                {"contributor": contributor_to_json(t.contributor), "levels": _changes(t.levels)}
                for t in self.tracks
            ],
            "operators": [
                [o.operator, o.calls, o.allocated_bytes, o.at_peak_bytes, o.self_time_ns]
                for o in self.operators
            ],
            "spans": [[s.kind, s.name, s.begin_ns, s.end_ns] for s in self.spans],
            "running": [[s.kind, s.name, s.begin_ns, s.end_ns] for s in self.running],
            "estimated": self.estimated,
            "modules": [[m.module, m.category.value, m.size_bytes] for m in self.modules],
            "blocks": self.blocks.to_json() if self.blocks.rest else {},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Picture:
        count = len(data["times_ns"])
        return cls(
            times_ns=_sums(data["times_ns"]),
            rows=_sums(data["rows"]),
            change_count=data["change_count"],
            levels={Category(c): _levels(column, count) for c, column in data["levels"].items()},
            tracks=tuple(
                Track(contributor_from_json(t["contributor"]), _levels(t["levels"], count))
                for t in data["tracks"]
            ),
            operators=tuple(OperatorUse(*row) for row in data["operators"]),
            spans=tuple(Span(*row) for row in data["spans"]),
            estimated=data["estimated"],
            # Earlier files have neither modules nor blocks, nor what ran at the peak.
            running=tuple(Span(*row) for row in data.get("running", ())),
            modules=tuple(
                ModuleShare(module, Category(category), size_bytes)
                for module, category, size_bytes in data.get("modules", ())
            ),
            blocks=Blocks.from_json(data["blocks"], count) if data.get("blocks") else Blocks(),
        )


def _differences(values: Sequence[int]) -> list[int]:
    return [b - a for a, b in zip((0, *values), values, strict=False)]


def _sums(differences: Iterable[int]) -> tuple[int, ...]:
    values, value = [], 0
    for difference in differences:
        value += difference
        values.append(value)
    return tuple(values)


def _changes(levels: Sequence[int]) -> list[int]:
    flat: list[int] = []
    before = 0
    for moment, level in enumerate(levels):
        if level != before:
            flat += (moment, level)
            before = level
    return flat


def _levels(flat: Sequence[int], count: int) -> tuple[int, ...]:
    levels: list[int] = []
    level = 0
    for moment, after in zip(flat[::2], flat[1::2], strict=True):
        levels += [level] * (moment - len(levels))
        level = after
    return tuple(levels + [level] * (count - len(levels)))
