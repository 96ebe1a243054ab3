"""Differences summed by the line that made them, and the line that is likely to be the cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from pytest_torchmem.values.contributors import Category, Contributor, Source
from pytest_torchmem.values.findings import CodeLines, Difference, DifferenceKind, LineDifference

ChangedAt: TypeAlias = Callable[[Source], CodeLines | None]
"""Returns the lines that were changed together with a line; None for one that is as it was."""

SCRATCH: Final = (
    Category.TEMPORARY,
    Category.AUTOGRAD_DETAIL,
    Category.WORKSPACE,
    Category.UNKNOWN,
)
_SCRATCH_FACTOR: Final = 4
FOLLOWERS: Final = (Category.GRADIENT, Category.OPTIMIZER_STATE)
_MOST_FOLLOWERS: Final = 4
"""How many times a parameter's bytes a gradient and the state of Adam with amsgrad take."""

_KINDS: Final = tuple(DifferenceKind)
MADE: Final = (DifferenceKind.NEW, DifferenceKind.GROWN)
_EXPLAINS: Final = 4
_ABOUT: Final = 1.2
_MULTIPLE: Final = 8


def by_line(
    found: Iterable[Difference], changed_at: ChangedAt = lambda source: None
) -> tuple[LineDifference, ...]:
    """Sum differences by the line that made them, the largest change first."""
    groups: dict[Hashable, list[Difference]] = defaultdict(list)
    changed: dict[Hashable, CodeLines] = {}
    for difference in found:
        source = difference.contributor.source
        place = changed_at(source) if source else None
        key = place or _line_of(difference.contributor)
        groups[key].append(difference)
        if place:
            changed[key] = place
    lines = [LineDifference(_in_order(parts), changed.get(key)) for key, parts in groups.items()]
    lines.sort(key=lambda line: (-abs(line.size_bytes), line.parts[0].contributor.identity))
    return tuple(lines)


def _in_order(parts: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the parts of a line, those first that changed as the whole did."""
    grew = sum(part.size_bytes for part in parts) > 0

    def place(part: Difference) -> tuple[bool, int, tuple[str, ...]]:
        is_against = (part.size_bytes > 0) != grew
        return (is_against, -abs(part.size_bytes), part.contributor.identity)

    return tuple(sorted(parts, key=place))


def largest_line(live: Iterable[Contributor]) -> tuple[Contributor, ...]:
    """Return what the line made that made most of some contributors, the largest first."""
    groups: dict[Hashable, list[Contributor]] = defaultdict(list)
    for contributor in sorted(live, key=lambda c: (-c.size_bytes, c.identity)):
        groups[_line_of(contributor)].append(contributor)
    return tuple(max(groups.values(), key=lambda g: sum(c.size_bytes for c in g), default=()))


def _line_of(c: Contributor) -> Hashable:
    """Return a line of a file; for what no line made, all that is known of its origin."""
    if c.source is None:
        return c.identity
    return (c.source.file, c.source.line) if c.source.line else (c.source.file, c.source.function)


def cause_first(lines: Sequence[LineDifference], excess_bytes: int) -> tuple[LineDifference, ...]:
    """Return lines with the one that is likely to be the cause first, then what grew, by size.

    What the body made comes before what lives longer or is merely read, if it explains a fourth of
    the whole. The largest leads, but for one of these that is larger than half of it: one that has
    changed, then one that is new. Of several the largest leads again, and of those about as large
    as that the one that was made first. A line that has changed and made half of the whole leads in
    any case: what is larger took the place of something.

    Scratch often grows as a consequence: a state kept in fp32 makes the scratch of all that reads
    it wider, too. So it counts for a fourth of its size, unless it was made before the rest: what
    comes first is no consequence. Gradients and optimizer state of new parameters are consequences
    of these, and count for them. Workspaces of libraries count where nothing else grew.
    """
    counted = _with_followers(lines)
    own = [(line, tuple(filter(_is_own, parts))) for line, parts in counted]
    candidates = [c for line in own if (c := _Candidate.of(line))]
    if candidates:
        excess_bytes -= sum(p.size_bytes for _, ps in counted for p in ps if not _is_own(p))
    else:
        candidates = [c for line in counted if (c := _Candidate.of(line))]
    lead = _lead(candidates, excess_bytes)
    return tuple(sorted(lines, key=lambda line: (line is not lead, line.size_bytes < 0)))


def _is_own(part: Difference) -> bool:
    return part.contributor.category is not Category.WORKSPACE


def _with_followers(
    lines: Sequence[LineDifference],
) -> list[tuple[LineDifference, tuple[Difference, ...]]]:
    """Return each line with the parts it counts for: new parameters have the size of what follows
    them, and what follows counts for nothing."""
    grown = [part for line in lines for part in line.parts if part.size_bytes > 0]
    own_bytes = sum(part.size_bytes for part in grown if _is_new_parameter(part))
    follow_bytes = sum(p.size_bytes for p in grown if p.contributor.category in FOLLOWERS)
    whole_bytes = own_bytes + follow_bytes
    if whole_bytes > (1 + _MOST_FOLLOWERS) * own_bytes:
        return [(line, line.parts) for line in lines]
    counted = []
    for line in lines:
        parts = (p for p in line.parts if p.contributor.category not in FOLLOWERS)
        scaled = (
            replace(p, size_bytes=p.size_bytes * whole_bytes // own_bytes)
            if p.size_bytes > 0 and _is_new_parameter(p)
            else p
            for p in parts
        )
        counted.append((line, tuple(scaled)))
    return counted


def _is_new_parameter(part: Difference) -> bool:
    return part.contributor.category is Category.PARAMETER and part.kind in MADE


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A line that may be the cause, and what speaks for it."""

    line: LineDifference
    size_bytes: int
    weight: int
    kind: DifferenceKind
    is_like_new: bool
    order: int
    source: Source | None

    @classmethod
    def of(cls, counted: tuple[LineDifference, tuple[Difference, ...]]) -> _Candidate | None:
        """Return a line as a candidate; None for one that did not grow."""
        line, parts = counted
        grown = [part for part in parts if part.size_bytes > 0]
        if line.size_bytes <= 0 or not grown:
            return None
        # What the line no longer makes does not speak against it: it may be what was edited.
        size_bytes = sum(part.size_bytes for part in grown)
        by_kind: dict[DifferenceKind, int] = defaultdict(int)
        for part in grown:
            by_kind[part.kind] += part.size_bytes
        kind = max(by_kind, key=lambda kind: (by_kind[kind], -_KINDS.index(kind)))
        # What has grown to a multiple is as good as new: the small thing that it is paired with may
        # be another one of the same line.
        now_bytes = sum(part.contributor.size_bytes for part in grown)
        before_bytes = now_bytes - size_bytes
        is_like_new = kind is DifferenceKind.GROWN and _MULTIPLE * before_bytes <= now_bytes
        orders = [part.contributor.order for part in grown if part.contributor.order]
        scratch_bytes = sum(p.size_bytes for p in grown if p.contributor.category in SCRATCH)
        weight = scratch_bytes + _SCRATCH_FACTOR * (size_bytes - scratch_bytes)
        order = min(orders, default=0)
        source = grown[0].contributor.source
        return cls(line, size_bytes, weight, kind, is_like_new, order, source)

    @property
    def evidence(self) -> tuple[bool, int]:
        """A key that sorts causes by what speaks for them beside their size, most first."""
        kind = DifferenceKind.NEW if self.is_like_new else self.kind
        return (self.line.changed is None, _KINDS.index(kind))

    @property
    def when(self) -> tuple[int, int]:
        """When it was made; where nobody knows, how far down in its function."""
        return (self.order, self.source.line if self.source and not self.order else 0)

    def precedes(self, other: _Candidate) -> bool:
        """True when this was made first; where nobody knows, when it is further up."""
        if self.order and other.order:
            return self.order < other.order
        if not (self.source and other.source):
            return False
        same = (self.source.file, self.source.function) == (
            other.source.file,
            other.source.function,
        )
        return same and 0 < self.source.line < other.source.line


def _lead(candidates: Sequence[_Candidate], excess_bytes: int) -> LineDifference | None:
    made = [c for c in candidates if c.kind in MADE]
    if any(_EXPLAINS * c.size_bytes >= excess_bytes for c in made):
        candidates = made
    if not candidates:
        return None
    largest = max(candidates, key=lambda c: c.weight)
    comparable = [
        c
        for c in candidates
        if _is_comparable(c, largest) or (c.line.changed and 2 * c.size_bytes >= excess_bytes)
    ]
    best = min(c.evidence for c in comparable)
    comparable = [c for c in comparable if c.evidence == best]
    size_bytes = max(c.size_bytes for c in comparable)
    about = [c for c in comparable if _ABOUT * c.size_bytes >= size_bytes]
    return min(about, key=lambda c: (_KINDS.index(c.kind), c.when)).line


def _is_comparable(one: _Candidate, largest: _Candidate) -> bool:
    if one is largest or 2 * one.weight > largest.weight:
        return True
    return 2 * one.size_bytes > largest.size_bytes and one.precedes(largest)
