"""A timeline small enough to send, to store and to draw: what `sampling` leaves of a profile.

Plain builtins, so that a controller or a report needs neither numpy nor the arrays behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
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
    """What one operator allocated over a window, all its calls together.

    Attributes:
        operator: Its name, as in `Contributor.operator`.
        calls: How often it ran.
        allocated_bytes: What it allocated in all.
        at_peak_bytes: How much of that was live at the peak.
    """

    operator: str
    calls: int
    allocated_bytes: int
    at_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of time: a region, a step, a backward pass, an optimizer step."""

    kind: str
    name: str
    begin_ns: int
    end_ns: int


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
        estimated: True when the numbers were not measured; times then count graph nodes.
    """

    times_ns: tuple[int, ...]
    rows: tuple[int, ...]
    change_count: int
    levels: Mapping[Category, tuple[int, ...]]
    tracks: tuple[Track, ...] = ()
    operators: tuple[OperatorUse, ...] = ()
    spans: tuple[Span, ...] = ()
    estimated: bool = False
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
                [o.operator, o.calls, o.allocated_bytes, o.at_peak_bytes] for o in self.operators
            ],
            "spans": [[s.kind, s.name, s.begin_ns, s.end_ns] for s in self.spans],
            "estimated": self.estimated,
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
