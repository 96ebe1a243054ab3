"""Causes: the difference that leads a sentence, and the words for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_torchmem.analysis.judge.differences import origin_of
from pytest_torchmem.values.contributors import Category, Contributor, Source, common_module
from pytest_torchmem.values.findings import Difference, DifferenceKind, words
from pytest_torchmem.values.units import format_change, format_size

_SCRATCH: Final = (
    Category.TEMPORARY,
    Category.AUTOGRAD_DETAIL,
    Category.WORKSPACE,
    Category.UNKNOWN,
)
_SCRATCH_FACTOR: Final = 4
_FOLLOWERS: Final = (Category.GRADIENT, Category.OPTIMIZER_STATE)
_MOST_FOLLOWERS: Final = 4
"""How many times a parameter's bytes a gradient and the state of Adam with amsgrad take."""

_KINDS: Final = tuple(DifferenceKind)
_MADE: Final = (DifferenceKind.NEW, DifferenceKind.GROWN)
_EXPLAINS: Final = 4
_ABOUT: Final = 1.2
_MULTIPLE: Final = 8
_FEW_PLACES: Final = 4
_FEW_MODULES: Final = 3
_FEW_CHANGES: Final = 3
_NEGLIGIBLE: Final = 200
"""The part of a growth that is not worth a word, as one in so many."""


def most_telling_first(growths: Iterable[Difference], excess_bytes: int) -> tuple[Difference, ...]:
    """Sort what grew: what is likely to be the cause, then its consequences.

    What the body made comes before what lives longer or is merely read, if it explains a fourth of
    the whole. The largest leads, but for one of these that is larger than half of it: one whose
    line has changed, then one that is new. Of several the largest leads again, and of those about
    as large as that the one that was made first. A line that has changed and made half of the whole
    leads in any case: what is larger took the place of something.

    Scratch often grows as a consequence: a state kept in fp32 makes the scratch of all that reads
    it wider, too. So it counts for a fourth of its size, unless it was made before the rest: what
    comes first is no consequence. Gradients and optimizer state of new parameters are consequences
    of these, and count for them.
    """
    by_size = sorted(growths, key=lambda g: (-g.size_bytes, g.contributor.identity))
    lead = _lead(_with_followers(by_size), excess_bytes)
    return tuple(sorted(by_size, key=lambda g: g.contributor is not lead)) if lead else ()


def _with_followers(growths: list[Difference]) -> list[Difference]:
    """Return growths in which new parameters have the size of what was made for them, too."""
    own = [g for g in growths if g.contributor.category is Category.PARAMETER and g.kind in _MADE]
    rest = [g for g in growths if g.contributor.category not in _FOLLOWERS and g not in own]
    own_bytes = sum(g.size_bytes for g in own)
    whole_bytes = sum(g.size_bytes for g in growths) - sum(g.size_bytes for g in rest)
    if whole_bytes > (1 + _MOST_FOLLOWERS) * own_bytes:
        return growths
    return [*(replace(g, size_bytes=g.size_bytes * whole_bytes // own_bytes) for g in own), *rest]


def _lead(by_size: list[Difference], excess_bytes: int) -> Contributor | None:
    made = [g for g in by_size if g.kind in _MADE and _EXPLAINS * g.size_bytes >= excess_bytes]
    candidates = [g for g in by_size if g.kind in _MADE] if made else by_size
    if not candidates:
        return None
    largest = max(candidates, key=_weight)
    comparable = [
        g
        for g in candidates
        if _is_comparable(g, largest) or (g.changed and 2 * g.size_bytes >= excess_bytes)
    ]
    best = min(map(_evidence, comparable))
    comparable = [g for g in comparable if _evidence(g) == best]
    size_bytes = max(g.size_bytes for g in comparable)
    about = [g for g in comparable if _ABOUT * g.size_bytes >= size_bytes]
    return min(about, key=lambda g: (_KINDS.index(g.kind), _when(g))).contributor


def _is_comparable(growth: Difference, largest: Difference) -> bool:
    if growth is largest or 2 * _weight(growth) > _weight(largest):
        return True
    is_large = 2 * growth.size_bytes > largest.size_bytes
    return is_large and precedes(growth.contributor, largest.contributor)


def _evidence(growth: Difference) -> tuple[bool, int]:
    """Return a key that sorts causes by what speaks for them beside their size, most first.

    What has grown to a multiple is as good as new: the small thing that it is paired with may be
    another one of the same operator.
    """
    kind, size_bytes = growth.kind, growth.contributor.size_bytes
    before_bytes = size_bytes - growth.size_bytes
    if kind is DifferenceKind.GROWN and _MULTIPLE * before_bytes <= size_bytes:
        kind = DifferenceKind.NEW
    return (not growth.changed, _KINDS.index(kind))


def _when(growth: Difference) -> tuple[int, int]:
    """Return when it was made; where nobody knows, how far down in its function."""
    source, order = growth.contributor.source, growth.contributor.order
    return (order, source.line if source and not order else 0)


def _weight(growth: Difference) -> int:
    is_scratch = growth.contributor.category in _SCRATCH
    return growth.size_bytes * (1 if is_scratch else _SCRATCH_FACTOR)


def precedes(one: Contributor, other: Contributor) -> bool:
    """True when ``one`` was made first; where nobody knows, when it is further up in a function."""
    if one.order and other.order:
        return one.order < other.order
    if not (one.source and other.source):
        return False
    same = (one.source.file, one.source.function) == (other.source.file, other.source.function)
    return same and 0 < one.source.line < other.source.line


LostByOrigin: TypeAlias = dict[tuple[Hashable, ...], dict[Category, int]]


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a growth.

    Attributes:
        text: It in words.
        contributors: What the words are about.
        others: What else came and went, in words that follow; ``""`` for nothing.
    """

    text: str
    contributors: tuple[Contributor, ...]
    others: str


def cause_of(growths: Sequence[Difference], excess_bytes: int, key: str) -> Cause:
    """Return what a growth is made of; the numbers in it add up to the growth.

    ``growths`` are all that grew, the most telling first. ``key`` is the limit or number that grew:
    a cause of its category need not name it.
    """
    members = _spread(growths)
    if members:
        text, told = _spread_text(members, growths), members
        first = _first(members, growths)
        contributors = (first.contributor, *(m.contributor for m in members if m is not first))
    else:
        text, told = _text(growths[0], key), (growths[0],)
        contributors = (growths[0].contributor,)
    rest = sum(g.size_bytes for g in growths if g not in told)
    elsewhere = excess_bytes - sum(g.size_bytes for g in growths)
    if elsewhere > 0:
        rest, elsewhere = rest + elsewhere, 0
    others = ""
    if _NEGLIGIBLE * rest > excess_bytes:
        others += f", {format_change(rest)} from others"
    if _NEGLIGIBLE * -elsewhere > excess_bytes:
        others += f", {format_change(elsewhere)} elsewhere"
    return Cause(text, contributors, others)


def _text(growth: Difference, key: str) -> str:
    text = origin(growth.contributor, key)
    if growth.kind is DifferenceKind.RELABELLED and growth.was is not None:
        size = format_size(growth.size_bytes)
        return f"{size} {origin(growth.contributor)}, {words(growth.was.value)} before"
    if growth.kind is DifferenceKind.LONGER:
        text += ", which lives longer"
    elif growth.kind is DifferenceKind.READ:
        text += ", there before and read now"
    return f"{format_change(growth.size_bytes)} {text}"


def _spread(growths: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the growth of one category that is spread over modules; none where a part leads.

    Micro-batching that is off makes all activations of a model larger, a graph that lives longer
    keeps all of them: no single line is the cause.
    """
    lead = growths[0]
    if lead.changed:
        return ()
    category = lead.contributor.category
    members = [
        g
        for g in growths
        if g.contributor.category is category and g.kind is not DifferenceKind.READ
    ]
    size_bytes = sum(g.size_bytes for g in members)
    modules = {g.contributor.module for g in members if 50 * g.size_bytes >= size_bytes}
    follow = _FOLLOWERS if category is Category.PARAMETER else ()
    largest = max(g.size_bytes for g in growths if g.contributor.category not in follow)
    is_spread = len(members) >= _FEW_PLACES and len(modules) >= _FEW_MODULES
    # A part that is larger than all others together is the cause.
    return tuple(members) if is_spread and 2 * largest < size_bytes else ()


def _spread_text(members: Sequence[Difference], growths: Sequence[Difference]) -> str:
    """Return ``+96.0 MiB of activation throughout LM, 4 times over, first aten::mm in ...``."""
    size_bytes = sum(m.size_bytes for m in members)
    large = [m.contributor.module for m in members if 50 * m.size_bytes >= size_bytes]
    within = common_module(large)
    text = f"{format_change(size_bytes)} of {words(members[0].contributor.category.value)}"
    text += f" throughout {within}" if within else f" in {len(members)} places"
    before = sum(m.contributor.size_bytes for m in members) - size_bytes
    if before > 0 and all(m.kind is DifferenceKind.GROWN for m in members):
        text += f", {round((before + size_bytes) / before, 1):g} times over"
    first = _first(members, growths)
    category = members[0].contributor.category.value
    return f"{text}, first {format_change(first.size_bytes)} {origin(first.contributor, category)}"


def _first(members: Sequence[Difference], growths: Sequence[Difference]) -> Difference:
    """Return the one that was made first: what made the others larger is there, or before it."""
    size_bytes = sum(m.size_bytes for m in members)
    large = [g for g in growths if 1000 * g.size_bytes >= size_bytes and g.kind in _MADE]
    return min(large or members, key=lambda g: (not g.changed, g.contributor.order))


def changed_elsewhere(made: Iterable[Contributor], places: Sequence[Source]) -> str:
    """Return ``; changed since: train.py:26``, for a cause whose own line has not changed.

    A list that keeps losses, or a larger number in a configuration, makes no memory itself. A few
    places are all named, those in the files of what was ``made`` first. Of many, the first choice
    that is few is named: those in code, those in these files and settings, those in these files.
    """
    files = {c.source.file for c in made if c.source}
    code = [place for place in places if place.file.endswith(".py")]
    settings = [place for place in places if place not in code]
    near = [place for place in code if place.file in files]
    nearest_first = [*near, *(place for place in code if place not in near)]
    choices = ([*nearest_first, *settings], nearest_first, [*near, *settings], near)
    told = next((some for some in choices if 0 < len(some) <= _FEW_CHANGES), ())
    return f"; changed since: {', '.join(map(str, told))}" if told else ""


def origin(contributor: Contributor, key: str = "total") -> str:
    """Return ``from aten::mm in model.fc (net.py:12)``; names the category unless ``key`` does."""
    c = contributor
    parts = (
        f"of {words(c.category.value)}" if key != c.category.value else "",
        f"({c.claimed})" if c.claimed else "",
        f"from {c.operator}" if c.operator else "",
        f"in {c.module}" if c.module else "",
        f"({c.source})" if c.source else "",
    )
    return " ".join(filter(None, parts)) or "of unknown origin"


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
    told = []
    for growth in growths:
        of_origin = lost.get(origin_of(growth.contributor), {}).items()
        others = (pair for pair in of_origin if pair[0] is not growth.contributor.category)
        was = next((category for category, gone in others if gone >= growth.size_bytes), None)
        told.append(replace(growth, kind=DifferenceKind.RELABELLED, was=was) if was else growth)
    return told
