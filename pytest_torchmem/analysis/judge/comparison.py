"""Two measurements of one test, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change, overall
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.findings import Difference
from pytest_torchmem.values.results import Result


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
        """The changes, the largest first; none where there is one side only."""
        if self.before is None or self.after is None:
            return ()
        return entry_differences(self.after, self.before)


def entry_differences(after: BaselineEntry, before: BaselineEntry) -> tuple[Difference, ...]:
    """Return what changed from ``before`` to ``after``, the largest change first.

    The peaks of the total are compared. Where these are equal, each category's own peak is.
    """
    if after.total != before.total:
        return peak_differences(after, before)
    found = [d for category in Category for d in category_differences(after, before, category)]
    return tuple(sorted(found, key=lambda d: (-abs(d.size_bytes), d.contributor.identity)))


def peak_differences(after: BaselineEntry, before: BaselineEntry) -> tuple[Difference, ...]:
    """Return what made the total's peak larger, and what made it smaller.

    An entry of an older format has only the categories' own peaks; they stand for the total's.
    """
    then, known = before.at_peak_live, before.live
    if not then:
        then, known = before.live, ()
    unlisted_bytes = before.total - sum(c.size_bytes for c in then)
    return differences(after.at_peak_live, then, max(0, unlisted_bytes), known)


def category_differences(
    after: BaselineEntry, before: BaselineEntry, category: Category
) -> tuple[Difference, ...]:
    """Return what made a category's own peak larger, and what made it smaller."""
    now, then = ([c for c in entry.live if c.category is category] for entry in (after, before))
    unlisted_bytes = before.peaks[category] - sum(c.size_bytes for c in then)
    return differences(now, then, max(0, unlisted_bytes))


def retained_differences(after: BaselineEntry, before: BaselineEntry) -> tuple[Difference, ...]:
    """Return what is retained and was not, and what no longer is."""
    unlisted_bytes = before.retained.total - sum(c.size_bytes for c in before.retained_live)
    return differences(after.retained_live, before.retained_live, max(0, unlisted_bytes))


def whole_entry(result: Result) -> BaselineEntry:
    """Return a result as the entry it would be stored as, with every contributor it names."""
    live = result.peak.live_by_category or result.peak.live
    entry = BaselineEntry.of(result)
    return replace(
        entry, live=live, at_peak_live=result.peak.live, retained_live=result.retained.live
    )


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
