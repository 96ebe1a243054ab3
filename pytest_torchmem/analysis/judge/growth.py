"""Which contributors hold the bytes that a baseline does not have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final

from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.findings import Growth

Key = Callable[[Contributor], tuple[str, ...]]
_Sides = tuple[list[Contributor], list[Contributor]]


def _identity(contributor: Contributor) -> tuple[str, ...]:
    return contributor.identity


def _same_module(contributor: Contributor) -> tuple[str, ...]:
    return (contributor.category.value, contributor.operator, contributor.module)


def _same_source(contributor: Contributor) -> tuple[str, ...]:
    source = contributor.source
    where = (source.file, source.function) if source else ("", "")
    return (contributor.category.value, contributor.operator, *where)


# From strict to lenient: a renamed function or a renamed module must not look like one contributor
# gone and another one new, or the rename would be blamed for bytes that were there before.
_KEYS: Final[tuple[Key, ...]] = (_identity, _same_module, _same_source)


def attribute_growth(
    measured: Sequence[Contributor], stored: Sequence[Contributor], omitted_bytes: int = 0
) -> tuple[Growth, ...]:
    """Return what grew between two sets of live contributors, largest growth first.

    ``omitted_bytes`` is what the stored side held in contributors too small to be stored. A
    measured contributor that the baseline does not name may have been one of those, so only what
    exceeds the largest possible omitted one counts as its growth.
    """
    growths: list[Growth] = []
    left, right = list(measured), list(stored)
    for key in _KEYS:
        found, left, right = _match(left, right, key)
        growths += found
    smallest = min((c.size_bytes for c in stored), default=omitted_bytes)
    growths += _unmatched(left, min(omitted_bytes, smallest))
    return tuple(sorted(growths, key=lambda g: (-g.size_bytes, g.contributor.identity)))


def _match(
    measured: list[Contributor], stored: list[Contributor], key: Key
) -> tuple[list[Growth], list[Contributor], list[Contributor]]:
    """Compare the groups that both sides have; hand back the contributors of all others."""
    groups: dict[tuple[str, ...], _Sides] = defaultdict(lambda: ([], []))
    for contributor in measured:
        groups[key(contributor)][0].append(contributor)
    for contributor in stored:
        groups[key(contributor)][1].append(contributor)
    growths: list[Growth] = []
    only_measured: list[Contributor] = []
    only_stored: list[Contributor] = []
    for now, before in groups.values():
        if not (now and before):
            only_measured += now
            only_stored += before
            continue
        changed, gone = _without_equals(now, before)
        growth_bytes = sum(c.size_bytes for c in changed) - sum(c.size_bytes for c in gone)
        if growth_bytes > 0:
            largest = max(changed, key=lambda c: c.size_bytes)
            growths.append(Growth(largest, growth_bytes, new=False))
    return growths, only_measured, only_stored


def _without_equals(
    now: list[Contributor], before: list[Contributor]
) -> tuple[list[Contributor], list[Contributor]]:
    """Drop pairs of equal size, so that of two calls in one function the new one is named.

    A pair on the same line goes first: of two equal calls the one on the old line is the old one.
    """
    left, right = list(now), list(before)
    for exact in (True, False):
        for contributor in list(left):
            for twin in right:
                same_line = _line(twin) == _line(contributor)
                if twin.size_bytes == contributor.size_bytes and (same_line or not exact):
                    left.remove(contributor)
                    right.remove(twin)
                    break
    return left, right


def _line(contributor: Contributor) -> int:
    return contributor.source.line if contributor.source else 0


def _unmatched(measured: list[Contributor], bound_bytes: int) -> list[Growth]:
    groups: dict[tuple[str, ...], list[Contributor]] = defaultdict(list)
    for contributor in measured:
        groups[contributor.identity].append(contributor)
    growths = []
    for group in groups.values():
        growth_bytes = sum(c.size_bytes for c in group) - bound_bytes
        if growth_bytes > 0:
            largest = max(group, key=lambda c: c.size_bytes)
            growths.append(Growth(largest, growth_bytes, new=True, at_least=bound_bytes > 0))
    return growths
