"""The stored side of a comparison: what an entry remembers, and when a number has changed."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytest_torchmem.values.contributors import (
    CategoryBytes,
    Contributor,
    contributor_from_json,
    contributor_to_json,
)
from pytest_torchmem.values.json_values import Json, whole_number
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size

KEPT_CONTRIBUTORS: Final = 64
"""How many of the largest contributors are stored: as many as a result has."""


class Change(enum.Enum):
    """The difference between an entry and the measurement.

    The words are the same in options, report headings and documentation.
    """

    NOT_COMPARED = "not compared"
    SAME = "same"
    WITHIN = "within tolerance"
    NEW = "new"
    GROWN = "grown"
    SHRUNK = "shrunk"
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class Allowance:
    """The distance that a number may keep from its baseline: a share, or a few bytes if small.

    Attributes:
        tolerance: A share of the number.
        floor_bytes: What a number may differ by at least, however small it is.
        floor_share: The share of the test's peak that the floor cannot exceed.
    """

    tolerance: float
    floor_bytes: int
    floor_share: float = math.inf

    def at(self, peak_bytes: int) -> Allowance:
        """Return the allowance for a test with this peak: in a small test the floor is small."""
        # A floor that was given holds for all tests, also for one that used nothing.
        if self.floor_share == math.inf or self.floor_share * peak_bytes >= self.floor_bytes:
            return self
        return replace(self, floor_bytes=int(self.floor_share * peak_bytes))

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
        return Change.SAME if measured_bytes == baseline_bytes else Change.WITHIN


def overall(changes: Collection[Change]) -> Change:
    """Return how a test differs from its baseline, from how each of its numbers does."""
    order = (Change.GROWN, Change.SHRUNK, Change.WITHIN)
    return next((change for change in order if change in changes), Change.SAME)


@dataclass(frozen=True, slots=True)
class BaselineEntry:
    """One stored measurement.

    Attributes:
        total: The peak footprint in bytes.
        at_peak: Its composition at that moment.
        peaks: Each category's own peak.
        live: The largest contributors, each at its category's own peak, largest first.
        retained: What was still alive at the end, by category.
        retained_live: The largest contributors to it, largest first.
        at_peak_live: The largest contributors at the moment of the total's peak, largest first;
            empty for an entry that was stored before there were any.
    """

    total: int
    at_peak: CategoryBytes
    peaks: CategoryBytes
    live: Sequence[Contributor] = ()
    retained: CategoryBytes = field(default_factory=CategoryBytes)
    retained_live: Sequence[Contributor] = ()
    at_peak_live: Sequence[Contributor] = ()

    @classmethod
    def of(cls, result: Result) -> BaselineEntry:
        return cls(
            total=result.peak.total,
            at_peak=result.peak.at_peak,
            peaks=result.peak.by_category,
            live=_largest(result.peak.live_by_category or result.peak.live),
            retained=result.retained.by_category,
            retained_live=_largest(result.retained.live),
            at_peak_live=_largest(result.peak.live),
        )

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins whose numbers are all integers."""
        return {
            "total": self.total,
            "at_peak": self.at_peak.to_json(),
            "peaks": self.peaks.to_json(),
            "live": [contributor_to_json(c) for c in self.live],
            "retained": self.retained.to_json(),
            "retained_live": [contributor_to_json(c) for c in self.retained_live],
            "at_peak_live": [contributor_to_json(c) for c in self.at_peak_live],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> BaselineEntry:
        """Return the entry. Raises KeyError, TypeError or ValueError for data of another shape."""
        live, retained_live, at_peak_live = (
            tuple(contributor_from_json(c) for c in data.get(part, ()))
            for part in ("live", "retained_live", "at_peak_live")
        )
        return cls(
            total=whole_number(data["total"]),
            at_peak=CategoryBytes.from_json(data["at_peak"]),
            peaks=CategoryBytes.from_json(data["peaks"]),
            live=live,
            retained=CategoryBytes.from_json(data["retained"]),
            retained_live=retained_live,
            at_peak_live=at_peak_live,
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
