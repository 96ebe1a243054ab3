"""What changed between two measurements of one test, both ways: what grew and what shrank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_torchmem.analysis.judge.growth import attribute_growth
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change, overall
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.results import Result


@dataclass(frozen=True, slots=True)
class Difference:
    """One contributor that holds more than before, or less, at its category's own peak.

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
        """What changed, the largest change first; nothing where there is one side only."""
        if self.before is None or self.after is None:
            return ()
        return differences(self.after, self.before)


def differences(after: BaselineEntry, before: BaselineEntry) -> tuple[Difference, ...]:
    """Return what changed from ``before`` to ``after``, the largest change first.

    Each category is compared at its own peak, as its entry holds it. Contributors are paired as
    `growth.attribute_growth` does, so a line that moved or a function that was renamed is no
    change.
    """
    found: list[Difference] = []
    for category in Category:
        now, now_omitted_bytes = _live(after, category)
        then, then_omitted_bytes = _live(before, category)
        found += [
            Difference(g.contributor, g.size_bytes, g.new, g.at_least)
            for g in attribute_growth(now, then, then_omitted_bytes)
        ]
        found += [
            Difference(g.contributor, -g.size_bytes, g.new, g.at_least)
            for g in attribute_growth(then, now, now_omitted_bytes)
        ]
    return tuple(sorted(found, key=lambda d: (-abs(d.size_bytes), d.contributor.identity)))


def _live(entry: BaselineEntry, category: Category) -> tuple[list[Contributor], int]:
    """Return a category's contributors, and what it held in those too small to be named."""
    live = [c for c in entry.live if c.category is category]
    return live, max(0, entry.peaks[category] - sum(c.size_bytes for c in live))


def whole_entry(result: Result) -> BaselineEntry:
    """Return a result as the entry it would be stored as, with every contributor it names."""
    live = result.peak.live_by_category or result.peak.live
    entry = BaselineEntry.of(result)
    return replace(entry, live=live, retained_live=result.retained.live)


def compare(
    before: BaselineEntry | None, after: BaselineEntry | None, allowance: Allowance
) -> Comparison:
    """Compare two entries of one test as a baseline is compared: total, categories, retained."""
    if before is None or after is None:
        return Comparison(Change.NEW if before is None else Change.UNUSED, before, after)
    allowance = allowance.at(before.total)
    pairs = zip(_numbers(after), _numbers(before), strict=True)
    change = overall({allowance.compare(now, then) for now, then in pairs})
    return Comparison(change, before, after)


def _numbers(entry: BaselineEntry) -> Sequence[int]:
    own = [entry.peaks[category] for category in Category]
    return (entry.total, *own, entry.retained.total)
