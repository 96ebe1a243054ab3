"""Compare two sides: contributors that were live together, now and before.

Two sides are paired contributor by contributor. What the pairs differ by adds up to what the sides
differ by::

    before                             now
    activation  addmm  net.py:10  8    activation  addmm  net.py:11   8    the line moved: 0
    activation  relu   net.py:11  4    temporary   relu   net.py:12   4    another label: 0
                                       temporary   clone  net.py:12   6    new: +6
    temporary   mul    net.py:30  2                                        gone: -2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final, TypeAlias

from pytest_torchmem.analysis.judge.lines import by_line, cause_first
from pytest_torchmem.values.baseline import (
    TOTAL,
    Allowance,
    BaselineEntry,
    Change,
    ChangedNumber,
    Numbers,
    told_change,
)
from pytest_torchmem.values.contributors import Contributor, Phase, common_module
from pytest_torchmem.values.findings import Difference, DifferenceKind, LineDifference
from pytest_torchmem.values.measured import Window

Key: TypeAlias = Callable[[Contributor], tuple[Hashable, ...]]
_Pair: TypeAlias = tuple[Contributor | None, Contributor | None]
_Sides: TypeAlias = tuple[list[Contributor], list[Contributor]]


# From strict to lenient: code that moved to another function, module or file must not look like
# one contributor gone and another one new, or the move would be blamed for bytes that were there
# before.
_KEYS: Final[tuple[Key, ...]] = (
    attrgetter("identity"),
    attrgetter("category", "operator", "module"),
    lambda contributor: (contributor.category, contributor.operator, *_function(contributor)),
    attrgetter("category", "operator", "size_bytes", "count"),
)


def origin_of(contributor: Contributor) -> tuple[Hashable, ...]:
    """Return what stays the same when storages get another label.

    What was there before the body has no origin: which category reads it is all that is known.
    """
    if contributor.phase is Phase.PREEXISTING:
        return (Phase.PREEXISTING,)
    return (contributor.operator, *_function(contributor))


def differences(
    now: Sequence[Contributor],
    then: Sequence[Contributor],
    unlisted_bytes: int = 0,
    known: Sequence[Contributor] = (),
) -> tuple[Difference, ...]:
    """Return what differs between two sides, the largest change first.

    ``unlisted_bytes`` is what the earlier side held in contributors too small to be listed: one
    that it does not list is new only if it is larger than any of those can have been. ``known`` is
    what the earlier side held at other moments, to tell what is new from what lives longer.
    """
    smallest = min((c.size_bytes for c in then), default=unlisted_bytes)
    bound = min(unlisted_bytes, smallest)
    pairs = [
        (after, before)
        for after, before in _paired(now, then)
        if before or (after and after.size_bytes > bound)
    ]
    found = _without_labels([d for pair in pairs if (d := _difference(*pair)).size_bytes])
    found = _merged(_with_known(found, _elsewhere(known, pairs)) if known else found)
    return tuple(sorted(found, key=lambda d: (-abs(d.size_bytes), d.contributor.identity)))


def _difference(after: Contributor | None, before: Contributor | None) -> Difference:
    """Return what one pair differs by; one side of it may be missing."""
    change = (after.size_bytes if after else 0) - (before.size_bytes if before else 0)
    one = after if after and change > 0 else before or after
    assert one is not None
    if change < 0:
        return Difference(one, change, DifferenceKind.SHRUNK if after else DifferenceKind.GONE)
    if one.phase is Phase.PREEXISTING:
        return Difference(one, change, DifferenceKind.READ)
    return Difference(one, change, DifferenceKind.GROWN if before else DifferenceKind.NEW)


def _paired(now: Iterable[Contributor], then: Iterable[Contributor]) -> list[_Pair]:
    """Pair each contributor with the one that it was, as far as there is one."""
    left, right = list(now), list(then)
    pairs: list[_Pair] = []
    for key in _KEYS:
        if not left or not right:
            break
        groups: dict[tuple[Hashable, ...], _Sides] = defaultdict(lambda: ([], []))
        for side, contributors in enumerate((left, right)):
            for contributor in contributors:
                groups[key(contributor)][side].append(contributor)
        left, right = [], []
        for group in groups.values():
            pairs += _paired_lines(*group)
            left += group[0]
            right += group[1]
    return [*pairs, *((one, None) for one in left), *((None, one) for one in right)]


def _paired_lines(now: list[Contributor], then: list[Contributor]) -> list[_Pair]:
    """Take pairs out of the contributors of one function, which differ in their lines.

    Where the lines are the same ones, or moved as a block, they decide. Else equal sizes do, those
    on one line first: of two equal calls the one on the old line is the old one. What remains is
    paired by the nearest size.
    """
    if len(now) == len(then) == 1:
        return [(now.pop(), then.pop())]
    pairs: list[_Pair] = []

    def take(one: Contributor, twin: Contributor) -> None:
        now.remove(one)
        then.remove(twin)
        pairs.append((one, twin))

    if _shape(now) == _shape(then):
        for one, twin in zip(sorted(now, key=_line), sorted(then, key=_line), strict=True):
            take(one, twin)
    for same_line in (True, False):
        for one in tuple(now):
            equals = (c for c in then if c.size_bytes == one.size_bytes)
            near = (c for c in equals if not same_line or _line(c) == _line(one))
            for equal in [*near][:1]:
                take(one, equal)
    while now and then:
        apart = {(abs(a.size_bytes - b.size_bytes), _line(a)): (a, b) for a in now for b in then}
        take(*apart[min(apart)])
    return pairs


def _shape(contributors: Iterable[Contributor]) -> list[int]:
    """Return how far each line is from the first of them."""
    lines = sorted(map(_line, contributors))
    return [line - lines[0] for line in lines]


def _line(contributor: Contributor) -> int:
    return contributor.source.line if contributor.source else 0


def _function(contributor: Contributor) -> tuple[str, str]:
    source = contributor.source
    return (source.file, source.function) if source else ("", "")


def _without_labels(found: list[Difference]) -> list[Difference]:
    """Take out what only changed its category: it is gone from one and new in another."""
    if len({difference.size_bytes > 0 for difference in found}) < 2:
        return found
    gone: dict[tuple[Hashable, ...], int] = defaultdict(int)
    come: dict[tuple[Hashable, ...], int] = defaultdict(int)
    for difference in found:
        side = come if difference.size_bytes > 0 else gone
        side[origin_of(difference.contributor)] += abs(difference.size_bytes)
    moved = {origin: min(size, gone[origin]) for origin, size in come.items()}
    budgets = moved.copy(), moved.copy()
    left = []
    for difference in found:
        budget = budgets[difference.size_bytes > 0]
        sign = 1 if difference.size_bytes > 0 else -1
        origin = origin_of(difference.contributor)
        taken = min(budget.get(origin, 0), abs(difference.size_bytes))
        if not taken:
            left.append(difference)
            continue
        budget[origin] -= taken
        rest = abs(difference.size_bytes) - taken
        kind = DifferenceKind.GROWN if difference.kind is DifferenceKind.NEW else difference.kind
        if rest:
            left.append(replace(difference, size_bytes=sign * rest, kind=kind))
    return left


def _elsewhere(known: Sequence[Contributor], pairs: Iterable[_Pair]) -> list[Contributor]:
    """Return what is known of other moments, but for what is as large on both sides.

    That is itself still: a second one beside it is new, and is not the first one that lives longer.
    """
    still: dict[Hashable, int] = defaultdict(int)
    for now, then in pairs:
        if now and then and now.size_bytes <= then.size_bytes:
            still[then.identity] += then.size_bytes
    left = [replace(c, size_bytes=c.size_bytes - still[c.identity]) for c in known]
    return [contributor for contributor in left if contributor.size_bytes > 0]


def _with_known(found: list[Difference], known: Sequence[Contributor]) -> list[Difference]:
    """Tell what was made before, and as large, from what is new or has grown."""
    made = [d for d in found if d.kind in (DifferenceKind.NEW, DifferenceKind.GROWN)]
    before = {
        id(now): then.size_bytes
        for now, then in _paired((d.contributor for d in made), known)
        if now and then
    }
    return [
        replace(d, kind=DifferenceKind.LONGER)
        if 2 * (d.contributor.size_bytes - before.get(id(d.contributor), 0)) < d.size_bytes
        else d
        for d in found
    ]


def _merged(found: Iterable[Difference]) -> list[Difference]:
    """Tell modules that one line made it in as one: their path is what they have in common."""
    groups: dict[tuple[Hashable, ...], list[Difference]] = defaultdict(list)
    for difference in found:
        c = difference.contributor
        line = (c.category, c.operator, c.source, c.phase, difference.kind)
        groups[line].append(difference)
    merged = []
    for group in groups.values():
        if len(group) == 1:
            merged += group
            continue
        contributors = [difference.contributor for difference in group]
        modules = {contributor.module for contributor in contributors}
        one = replace(
            contributors[0],
            size_bytes=sum(contributor.size_bytes for contributor in contributors),
            count=sum(contributor.count for contributor in contributors),
            module=common_module(modules),
            order=min(contributor.order for contributor in contributors),
        )
        size_bytes = sum(difference.size_bytes for difference in group)
        merged.append(replace(group[0], contributor=one, size_bytes=size_bytes))
    return merged


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two measurements of one thing, side by side.

    Attributes:
        change: How the second differs from the first, over all that a baseline compares.
        before: The first; None when there is none.
        after: The second; None when there is none.
        changed: The number that the change is told by; None where there is one side only.
    """

    change: Change
    before: BaselineEntry | None
    after: BaselineEntry | None
    changed: ChangedNumber | None = None

    @property
    def size_bytes(self) -> int:
        """By how much it changed; the whole peak where there is one side only."""
        if self.changed:
            return self.changed.by_bytes
        before = self.before.total if self.before else 0
        return (self.after.total if self.after else 0) - before

    @property
    def lines(self) -> tuple[LineDifference, ...]:
        """The changes, as `line_differences` has them; none where there is one side only."""
        if self.before is None or self.after is None or self.changed is None:
            return ()
        return line_differences(self.after, self.before, self.changed)


def line_differences(
    after: BaselineEntry, before: BaselineEntry, changed: ChangedNumber
) -> tuple[LineDifference, ...]:
    """Return what made the number ``changed`` what it is, summed by line.

    The cause comes first, then what changed in the same way, then what went the other way, each the
    largest first. With what is too small to be listed they add up to the change.
    """
    lines = by_line(number_differences(after, before, changed.key))
    if changed.by_bytes < 0:
        return tuple(sorted(lines, key=lambda line: line.size_bytes > 0))
    return cause_first(lines, changed.by_bytes)


def lines_of(window: Window) -> tuple[LineDifference, ...]:
    """Return what made the number that a window's change is told by other than its baseline's.

    A failure's own come first; for what failed nothing they are made of what a report keeps.
    """
    if window.lines or window.baseline is None:
        return window.lines
    return line_differences(BaselineEntry.whole(window.result), window.baseline, window.told_by)


def number_differences(
    after: BaselineEntry, before: BaselineEntry, key: str
) -> tuple[Difference, ...]:
    """Return what made a number of `Numbers` larger, and what made it smaller."""
    known: Sequence[Contributor] = ()
    if key == "retained":
        now, then = after.retained_live, before.retained_live
    elif key == TOTAL:
        now, then = after.at_peak_live, before.at_peak_live
        known = before.live
    else:
        now, then = ([c for c in e.live if c.category._value_ == key] for e in (after, before))
    unlisted_bytes = Numbers.of(before).by_key[key] - sum(c.size_bytes for c in then)
    return differences(now, then, max(0, unlisted_bytes), known)


def compare(
    before: BaselineEntry | None, after: BaselineEntry | None, allowance: Allowance
) -> Comparison:
    """Compare two entries of one test as a baseline is compared: total, categories, retained."""
    if before is None or after is None:
        return Comparison(Change.NEW if before is None else Change.GONE, before, after)
    change, changed = told_change(Numbers.of(before), Numbers.of(after), allowance)
    return Comparison(change, before, after, changed)
