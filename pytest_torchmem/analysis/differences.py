"""What changed between two measurements of one test, both ways: what grew and what shrank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_torchmem.analysis.baseline import Allowance, BaselineEntry, Change
from pytest_torchmem.analysis.growth import attribute_growth
from pytest_torchmem.analysis.results import Category, CategoryBytes, Contributor, Result


@dataclass(frozen=True, slots=True)
class Difference:
    """One contributor that holds more at the peak than before, or less.

    Attributes:
        contributor: The one that grew, as it is now; or the one that shrank, as it was.
        size_bytes: By how much: above zero for growth, below for shrinking.
        one_sided: True when the other side has no contributor like it.
        at_least: True when the other side names its largest contributors only, so that the change
            may be larger.
    """

    contributor: Contributor
    size_bytes: int
    one_sided: bool
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two measurements of one thing, side by side.

    Attributes:
        change: How the second differs from the first, over all that a baseline compares.
        before: The first; None when there is none.
        after: The second; None when there is none.
    """

    change: Change
    before: BaselineEntry | None
    after: BaselineEntry | None

    @property
    def size_bytes(self) -> int:
        """By how much the peak changed; its whole size where there is one side only."""
        before = self.before.total if self.before else 0
        return (self.after.total if self.after else 0) - before

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What changed at the peak, the largest change first."""
        if self.before is None or self.after is None:
            return ()
        return differences(self.after, self.before)


def differences(after: BaselineEntry, before: BaselineEntry) -> tuple[Difference, ...]:
    """Return what changed at the peak from ``before`` to ``after``, the largest change first.

    Contributors are paired as `growth.attribute_growth` does, so a line that moved or a function
    that was renamed is no change.
    """
    found = [
        Difference(g.contributor, g.size_bytes, g.new, g.at_least)
        for g in attribute_growth(after.live, before.live, _omitted(before))
    ]
    found += [
        Difference(g.contributor, -g.size_bytes, g.new, g.at_least)
        for g in attribute_growth(before.live, after.live, _omitted(after))
    ]
    return tuple(sorted(found, key=lambda d: (-abs(d.size_bytes), d.contributor.identity)))


def whole_entry(result: Result) -> BaselineEntry:
    """Return a result as the entry it would be stored as, with every contributor it names."""
    entry = BaselineEntry.of(result)
    return replace(entry, live=result.peak.live, retained_live=result.retained.live)


def compare(
    before: BaselineEntry | None, after: BaselineEntry | None, allowance: Allowance
) -> Comparison:
    """Compare two entries of one test as a baseline is compared: total, categories, retained."""
    if before is None or after is None:
        return Comparison(Change.NEW if before is None else Change.UNUSED, before, after)
    found = {
        allowance.compare(now, then)
        for now, then in zip(_numbers(after), _numbers(before), strict=True)
    }
    change = next((c for c in (Change.GROWN, Change.SHRUNK) if c in found), Change.SAME)
    return Comparison(change, before, after)


def _numbers(entry: BaselineEntry) -> Sequence[int]:
    return (entry.total, *_amounts(entry.peaks), entry.retained.total)


def _amounts(amounts: CategoryBytes) -> list[int]:
    return [amounts[category] for category in Category]


def _omitted(entry: BaselineEntry) -> int:
    return max(0, entry.total - sum(c.size_bytes for c in entry.live))
