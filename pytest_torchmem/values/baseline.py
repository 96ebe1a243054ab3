"""The stored side of a comparison: what an entry remembers, and when a number has changed."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size

Member = TypeVar("Member", bound=enum.Enum)

KEPT_CONTRIBUTORS: Final = 20
"""How many of the largest contributors are stored: enough to name what is new, few to review."""


class Change(enum.Enum):
    """How an entry differs from what was measured.

    The words are the same in options, report headings and documentation.
    """

    NOT_COMPARED = "not compared"
    SAME = "same"
    NEW = "new"
    GROWN = "grown"
    SHRUNK = "shrunk"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far a number may be from its baseline: a share of it, or a few bytes for small ones."""

    tolerance: float
    floor_bytes: int

    def bytes_for(self, baseline_bytes: int) -> int:
        return max(int(baseline_bytes * self.tolerance), self.floor_bytes)

    def text_for(self, baseline_bytes: int) -> str:
        """Return the part that decides at this size: ``tolerance 2 %`` or ``floor 1.0 MiB``."""
        if int(baseline_bytes * self.tolerance) >= self.floor_bytes:
            return f"tolerance {self.tolerance * 100:g} %"
        return f"floor {format_size(self.floor_bytes)}"

    def compare(self, measured_bytes: int, baseline_bytes: int) -> Change:
        allowed = self.bytes_for(baseline_bytes)
        if measured_bytes > baseline_bytes + allowed:
            return Change.GROWN
        if measured_bytes < baseline_bytes - allowed:
            return Change.SHRUNK
        return Change.SAME


@dataclass(frozen=True, slots=True)
class BaselineEntry:
    """One stored measurement, small enough to review.

    Attributes:
        total: The peak footprint in bytes.
        at_peak: Its composition at that moment.
        peaks: Each category's own peak.
        live: The largest contributors, each at its category's own peak, largest first.
        retained: What was still alive at the end, by category.
        retained_live: The largest contributors to it, largest first.
    """

    total: int
    at_peak: CategoryBytes
    peaks: CategoryBytes
    live: Sequence[Contributor] = ()
    retained: CategoryBytes = field(default_factory=CategoryBytes)
    retained_live: Sequence[Contributor] = ()

    @classmethod
    def of(cls, result: Result) -> BaselineEntry:
        return cls(
            total=result.peak.total,
            at_peak=result.peak.at_peak,
            peaks=result.peak.by_category,
            live=_largest(result.peak.live_by_category or result.peak.live),
            retained=result.retained.by_category,
            retained_live=_largest(result.retained.live),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain builtins whose numbers are all integers."""
        return {
            "total": self.total,
            "at_peak": _amounts(self.at_peak),
            "peaks": _amounts(self.peaks),
            "live": [_contributor_to_json(c) for c in self.live],
            "retained": _amounts(self.retained),
            "retained_live": [_contributor_to_json(c) for c in self.retained_live],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BaselineEntry:
        """Return the entry. Raises KeyError, TypeError or ValueError for data of another shape."""
        live, retained_live = (
            tuple(contributor_from_json(c) for c in data[part])
            for part in ("live", "retained_live")
        )
        return cls.from_numbers(data, live, retained_live)

    @classmethod
    def from_numbers(
        cls,
        data: Mapping[str, Any],
        live: Sequence[Contributor],
        retained_live: Sequence[Contributor],
    ) -> BaselineEntry:
        """Return the entry, its contributors given. Raises what `from_json` does."""
        return cls(
            total=_integer(data["total"]),
            at_peak=_category_bytes(data["at_peak"]),
            peaks=_category_bytes(data["peaks"]),
            live=live,
            retained=_category_bytes(data["retained"]),
            retained_live=retained_live,
        )


def _largest(live: Iterable[Contributor]) -> tuple[Contributor, ...]:
    # Ties are broken by identity so that two equal runs write equal files. There are few.
    ranked = sorted(live, key=lambda contributor: -contributor.size_bytes)
    if len({contributor.size_bytes for contributor in ranked}) < len(ranked):
        ranked.sort(key=_order)
    return tuple(ranked[:KEPT_CONTRIBUTORS])


def _order(contributor: Contributor) -> tuple[int, tuple[str, ...], int]:
    line = contributor.source.line if contributor.source else 0
    return (-contributor.size_bytes, contributor.identity, line)


# Looking names up here is several times faster than asking the enum, and a project has a hundred
# thousand contributors.
_CATEGORIES: Final = {category.value: category for category in Category}
_NOTHING: Final = CategoryBytes()
_PHASES: Final = {phase.value: phase for phase in Phase}


def _amounts(amounts: CategoryBytes) -> dict[str, int]:
    return {name: amount for name in _CATEGORIES if (amount := getattr(amounts, name))}


def _category_bytes(data: Mapping[str, Any]) -> CategoryBytes:
    for name, amount in data.items():
        if name not in _CATEGORIES or type(amount) is not int or amount < 0:
            _member(_CATEGORIES, name)
            _integer(amount)
    return CategoryBytes(**data) if data else _NOTHING


def _member(members: Mapping[str, Member], name: object) -> Member:
    if not isinstance(name, str) or name not in members:
        raise ValueError(f"{name!r} is not one of {', '.join(members)}")
    return members[name]


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise TypeError(f"expected a whole number of bytes, found {value!r}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"expected text, found {value!r}")
    return value


def _contributor_to_json(contributor: Contributor) -> dict[str, Any]:
    # In the order of the keys, so that they need no sorting.
    data: dict[str, Any] = {
        "bytes": contributor.size_bytes,
        "category": contributor.category._value_,
        "count": contributor.count,
    }
    if source := contributor.source:
        data.update(file=source.file, function=source.function, line=source.line)
    data["module"] = contributor.module
    data["operator"] = contributor.operator
    data["phase"] = contributor.phase._value_
    return data


@functools.lru_cache(maxsize=4096)
def _source(file: str, line: int, function: str) -> Source:
    """One value stands for all contributors of a line: there are many."""
    return Source(file, line, function)


def contributor_from_json(data: Mapping[str, Any]) -> Contributor:
    source = None
    if "file" in data:
        source = _source(_text(data["file"]), _integer(data["line"]), _text(data["function"]))
    return Contributor(
        category=_member(_CATEGORIES, data["category"]),
        size_bytes=_integer(data["bytes"]),
        count=_integer(data["count"]),
        operator=_text(data["operator"]),
        module=_text(data["module"]),
        source=source,
        phase=_member(_PHASES, data["phase"]),
    )
