"""Causes: the line that leads a sentence, and the words for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_torchmem.analysis.judge.differences import origin_of
from pytest_torchmem.analysis.judge.lines import FOLLOWERS, MADE
from pytest_torchmem.values.contributors import Category, Contributor, Source, common_module
from pytest_torchmem.values.findings import (
    CodeLines,
    Difference,
    DifferenceKind,
    LineDifference,
    words,
)
from pytest_torchmem.values.units import format_change, format_parts, format_size

_FEW_PLACES: Final = 4
_FEW_MODULES: Final = 3
_FEW_CHANGES: Final = 3
_NEGLIGIBLE: Final = 200
"""The part of a growth that is not worth a word, as one in so many."""

_MOST: Final = 50
"""A module with less than one in so many of a line's bytes does not widen its path."""


LostByOrigin: TypeAlias = dict[tuple[Hashable, ...], dict[Category, int]]


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a growth.

    Attributes:
        text: It in words.
        contributors: What the words are about.
        others: What else came and went, in words that follow; ``""`` for nothing.
        place: Its lines; None where no line made it.
        lead: The line that the words name.
    """

    text: str
    contributors: tuple[Contributor, ...]
    others: str
    place: CodeLines | None
    lead: LineDifference


def cause_of(lines: Sequence[LineDifference], excess_bytes: int, key: str) -> Cause:
    """Return what a growth is made of; the numbers in it add up to the growth.

    ``lines`` are those of `lines.cause_first`. ``key`` is the limit or number that grew: a cause of
    its category need not name it.
    """
    grown = [line for line in lines if line.size_bytes > 0]
    members = _spread(grown)
    if members:
        first = _first(members, grown)
        lead = next(line for line in grown if any(part is first for part in line.parts))
        text, told_bytes = _spread_text(members, first), sum(m.size_bytes for m in members)
        contributors = (first.contributor, *(m.contributor for m in members if m is not first))
        place = None
        told = {id(member) for member in members}
        rest = [p.size_bytes for line in grown for p in line.parts if id(p) not in told]
        more_bytes = sum(rest)
    else:
        lead = grown[0]
        text, told_bytes = line_text(lead, key), lead.size_bytes
        contributors = tuple(part.contributor for part in lead.parts if part.size_bytes > 0)
        place = lead.place
        more_bytes = sum(line.size_bytes for line in grown[1:])
    less_bytes = told_bytes + more_bytes - excess_bytes
    if less_bytes < 0:  # too small to be listed
        more_bytes, less_bytes = more_bytes - less_bytes, 0
    named = [
        f"{format_size(size_bytes)} {word}"
        for size_bytes, word in ((more_bytes, "more"), (less_bytes, "less"))
        if _NEGLIGIBLE * size_bytes > excess_bytes
    ]
    others = f", {' and '.join(named)} elsewhere" if named else ""
    return Cause(text, contributors, others, place, lead)


def line_text(line: LineDifference, key: str = "total") -> str:
    """Return ``+16.0 MiB from aten::mul at net.py:14 in Net (temporary 8.0, activation 8.0)``.

    ``key`` is the number that grew: where it is that of a category, the category is not named.
    """
    lead = max(line.parts, key=lambda part: part.size_bytes * (1 if line.size_bytes > 0 else -1))
    if lead.kind is DifferenceKind.RELABELLED and lead.was is not None:
        size = format_size(line.size_bytes)
        return f"{size} {told_by_line(line.contributors)}, {words(lead.was.value)} before"
    amounts: Counter[Category] = Counter()
    for part in line.parts:
        amounts[part.contributor.category] += part.size_bytes
    grew = [part.contributor for part in line.parts if part.size_bytes * line.size_bytes > 0]
    sizes = [p.size_bytes for p in line.parts if p.size_bytes * line.size_bytes > 0]
    text = (
        f"{format_change(line.size_bytes)} {_line_words(grew, sizes, amounts, line.changed, key)}"
    )
    if lead.kind is DifferenceKind.LONGER:
        return f"{text}, which lives longer"
    if lead.kind is DifferenceKind.READ:
        return f"{text}, there before and {'larger' if lead.is_larger_now else 'read'} now"
    return text


def told_by_line(contributors: Sequence[Contributor], key: str = "total") -> str:
    """Return ``of activation from aten::mm at net.py:12 in model.fc`` for what one line made."""
    amounts: Counter[Category] = Counter()
    for c in contributors:
        amounts[c.category] += c.size_bytes
    return _line_words(contributors, [c.size_bytes for c in contributors], amounts, None, key)


def origin(contributor: Contributor, key: str = "total") -> str:
    """Return ``of activation from aten::mm at net.py:12 in model.fc``.

    The category is named unless ``key`` does.
    """
    return told_by_line((contributor,), key)


def _line_words(
    made: Sequence[Contributor],
    sizes: Sequence[int],
    amounts: Counter[Category],
    changed: CodeLines | None,
    key: str,
) -> str:
    """Return what made ``amounts`` at one line: ``made`` has ``sizes`` of it, the largest first."""
    whole = sum(amounts.values())
    shares = {c: n for c, n in amounts.most_common() if abs(n) * _NEGLIGIBLE > abs(whole)}
    one = next(iter(shares)) if len(shares) == 1 else None
    large = [c for c, size in zip(made, sizes, strict=True) if _MOST * abs(size) >= abs(whole)]
    module = common_module(c.module for c in large or made)
    source = made[0].source
    parts = (
        f"of {words(one.value)}" if one and key != one.value else "",
        f"({made[0].claimed})" if made[0].claimed else "",
        _operators(made, sizes),
        _where(source, changed),
        f"in {module}" if module else "",
        f"({format_parts({words(c.value): n for c, n in shares.items()}, whole)})"
        if len(shares) > 1
        else "",
    )
    return " ".join(filter(None, parts)) or "of unknown origin"


def _operators(made: Sequence[Contributor], sizes: Sequence[int]) -> str:
    """Return ``from aten::exp``, with ``and others`` where a tenth comes from other operators."""
    amounts: Counter[str] = Counter()
    for c, size_bytes in zip(made, sizes, strict=True):
        amounts[c.operator] += abs(size_bytes)
    (operator, size_bytes), *_ = amounts.most_common(1)
    others = " and others" if 10 * (amounts.total() - size_bytes) >= amounts.total() else ""
    return f"from {operator}{others}" if operator else ""


def _where(source: Source | None, changed: CodeLines | None) -> str:
    if changed:
        if changed.last > changed.first:
            return f"in the changed lines {changed}"
        return f"at the changed line {changed}"
    if source is None:
        return ""
    return f"at {source}" if source.line else f"in {source}"


def _spread(lines: Sequence[LineDifference]) -> tuple[Difference, ...]:
    """Return the growth of one category that is spread over modules; none where a part leads.

    Micro-batching that is off makes all activations of a model larger, a graph that lives longer
    keeps all of them: no single line is the cause.
    """
    if lines[0].changed:
        return ()
    parts = [part for line in lines for part in line.parts if part.size_bytes > 0]
    category = lines[0].parts[0].contributor.category
    members = [
        p for p in parts if p.contributor.category is category and p.kind is not DifferenceKind.READ
    ]
    size_bytes = sum(m.size_bytes for m in members)
    modules = {m.contributor.module for m in members if _MOST * m.size_bytes >= size_bytes}
    follow = FOLLOWERS if category is Category.PARAMETER else ()
    largest_bytes = max(
        sum(p.size_bytes for p in line.parts if p.contributor.category not in follow)
        for line in lines
    )
    places = {(p.contributor.source, p.contributor.operator, p.contributor.module) for p in members}
    is_spread = len(places) >= _FEW_PLACES and len(modules) >= _FEW_MODULES
    # A line that made more than all others together is the cause.
    return tuple(members) if is_spread and 2 * largest_bytes < size_bytes else ()


def _spread_text(members: Sequence[Difference], first: Difference) -> str:
    """Return ``+96.0 MiB of activation throughout LM, 4 times over, first aten::mm in ...``."""
    size_bytes = sum(m.size_bytes for m in members)
    large = [m.contributor.module for m in members if _MOST * m.size_bytes >= size_bytes]
    within = common_module(large)
    category = members[0].contributor.category.value
    text = f"{format_change(size_bytes)} of {words(category)}"
    text += f" throughout {within}" if within else f" in {len(members)} places"
    before = sum(m.contributor.size_bytes for m in members) - size_bytes
    if before > 0 and all(m.kind is DifferenceKind.GROWN for m in members):
        text += f", {round((before + size_bytes) / before, 1):g} times over"
    return f"{text}, first {format_change(first.size_bytes)} {origin(first.contributor, category)}"


def _first(members: Sequence[Difference], lines: Sequence[LineDifference]) -> Difference:
    """Return the one that was made first: what made the others larger is there, or before it."""
    size_bytes = sum(m.size_bytes for m in members)
    changed = {id(part) for line in lines if line.changed for part in line.parts}
    parts = (part for line in lines for part in line.parts)
    large = [p for p in parts if 1000 * p.size_bytes >= size_bytes and p.kind in MADE]
    return min(large or members, key=lambda p: (id(p) not in changed, p.contributor.order))


def nearest_first(
    made: Iterable[Contributor], places: Sequence[CodeLines]
) -> tuple[CodeLines, ...]:
    """Sort the places that have changed: those in the files of what was ``made`` come first.

    Their own order ranks the rest: the code that a test reaches first, then files of settings.
    """
    files = {c.source.file for c in made if c.source}
    is_far = lambda place: (place.file not in files, not place.file.endswith(".py"))  # noqa: E731
    return tuple(sorted(places, key=is_far))


def changes_text(places: Sequence[CodeLines], *, is_beside: bool = False) -> str:
    """Return ``; changed since: train.py:26``, for a cause whose own line has not changed.

    A list that keeps losses, or a larger number in a configuration, makes no memory itself. Of many
    places the nearest are named. They are ``beside`` a cause whose line has changed, too.
    """
    named = ", ".join(map(str, places[:_FEW_CHANGES]))
    more = f" and {len(places) - _FEW_CHANGES} more" if places[_FEW_CHANGES:] else ""
    word = "also changed" if is_beside else "changed since"
    return f"; {word}: {named}{more}" if places else ""


def lost_by_origin(now: Iterable[Contributor], then: Iterable[Contributor]) -> LostByOrigin:
    """Return the bytes of each origin that a category held before, and holds no longer.

    A side is what all categories hold at their own peaks.
    """
    lost: LostByOrigin = {}
    for side, sign in ((then, 1), (now, -1)):
        for c in side:
            of_origin = lost.setdefault(origin_of(c), {})
            of_origin[c.category] = of_origin.get(c.category, 0) + sign * c.size_bytes
    return lost


def tell_labels(growths: Iterable[Difference], lost: LostByOrigin) -> list[Difference]:
    """Return a category's growth, with RELABELLED for what another category has lost."""
    told, left = [], {origin: dict(gone) for origin, gone in lost.items()}
    for growth in growths:
        of_origin = left.get(origin_of(growth.contributor), {})
        others = (pair for pair in of_origin.items() if pair[0] is not growth.contributor.category)
        was = next((c for c, gone in others if gone >= growth.size_bytes > 0), None)
        if was is None:
            told.append(growth)
        else:
            of_origin[was] -= growth.size_bytes
            told.append(replace(growth, kind=DifferenceKind.RELABELLED, was=was))
    return told


def moved_labels(lines: Iterable[LineDifference]) -> list[Difference]:
    """Return what only counts in another category than before."""
    parts = (part for line in lines for part in line.parts)
    return [part for part in parts if part.kind is DifferenceKind.RELABELLED]


def label_note(part: Difference) -> str:
    """Return ``1.0 MiB of input from aten::zeros at cache.py:8 counted as temporary before``."""
    was = words(part.was.value) if part.was else ""
    return f"{format_size(part.size_bytes)} {origin(part.contributor)} counted as {was} before"
