"""Holders: who keeps alive what was left behind, and those that a project knows of.

No limit counts what a known holder has, and no sentence names it as a cause.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.values.contributors import CategoryBytes, Contributor, common_module
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.findings import RETAINED, Finding
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Fate, Holder, Result
from pytest_torchmem.values.units import format_size

_BECAUSE: Final = " because "
# The index into a list, and the number of a module's child.
_INDEX: Final = re.compile(r"(?<=\[)\d+(?=\])|(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """One storage that a window made and that was alive at its end.

    Attributes:
        place: Its device and pointer, its own as long as it lived.
        size_bytes: How large it is.
        is_alive: Nothing freed it until now.
        outlived_note: It was alive at the time that was asked about.
        contributor: It alone, with where it comes from.
    """

    place: tuple[str, int]
    size_bytes: int
    is_alive: bool
    outlived_note: bool
    contributor: Contributor


@dataclass(frozen=True, slots=True)
class Held:
    """A storage's origin, and the holder that keeps it alive or kept it.

    ``at_end`` is False for what the window's steps had left behind and that was freed before the
    window was over: part of the growth, and of nothing else.
    """

    holder: Holder
    contributor: Contributor
    at_end: bool = True


@dataclass(frozen=True, slots=True)
class KnownHolder:
    """A holder that limits do not count.

    Attributes:
        pattern: Its description as failures tell it; ``*`` stands for any text.
        reason: Why it may hold memory.
    """

    pattern: str
    reason: str

    @classmethod
    def read(cls, text: str) -> KnownHolder:
        """Return what ``models.CACHE* because a batch is kept`` says. Raises `MarkerError`."""
        pattern, _, reason = map(str.strip, text.partition(_BECAUSE))
        if not pattern.strip("*") or not reason:
            raise MarkerError(
                f"{text!r} names no holder with a reason; write it as a failure does, and why: "
                "models.CACHE* because the last batch is kept"
            )
        return cls(pattern, reason)

    def matches(self, by: str) -> bool:
        """Return whether it is the holder of that description."""
        parts = (re.escape(part) for part in self.pattern.split("*"))
        return re.fullmatch(".*".join(parts), by, re.DOTALL) is not None


def known_by(holder: Holder, known: Sequence[KnownHolder]) -> str:
    """Return the first pattern that a holder matches; ``""`` for one that nobody knows."""
    return next((k.pattern for k in known if k.matches(holder.by)), "")


def explain_retained(
    window: Window,
    find_holders: Callable[[], tuple[Held, ...]] | None,
    known: Sequence[KnownHolder] = (),
) -> Window:
    """Say what keeps alive what was retained, where that is what failed; only then it is asked.

    A sentence names no holder that is known: it is not the cause.
    """
    if find_holders is None or not any(finding.key in RETAINED for finding in window.findings):
        return window
    held = find_holders()
    holders = group_holders(each.holder for each in held if each.at_end)
    result = replace(window.result, retained=replace(window.result.retained, holders=holders))
    unknown = tuple(each for each in held if not known_by(each.holder, known))
    findings = tuple(_with_holder(finding, unknown) for finding in window.findings)
    return replace(window, result=result, findings=findings)


def _with_holder(finding: Finding, held: tuple[Held, ...]) -> Finding:
    """Add who holds the cause that a finding names; something else may hold more.

    A cause of the peak may be what is left behind at the end: then its holder is the reason, too,
    unless most of it is gone by then.
    """
    asked = (each for each in held if each.at_end or finding.key == "growth")
    made = [e.holder for e in asked if any(_are_one(e.contributor, c) for c in finding.causes)]
    told_bytes = sum(cause.size_bytes for cause in finding.causes)
    if finding.lines:
        told_bytes = min(finding.excess_bytes, finding.lines[0].size_bytes)
    is_gone = 2 * sum(holder.size_bytes for holder in made) < told_bytes
    if not made or (is_gone and finding.key not in RETAINED):
        return finding
    holders = group_holders(made)
    first = min(holders, key=lambda holder: holder.fate is Fate.NOT_LOOKED_FOR)
    return replace(finding, cause=f"{finding.cause}, {first}")


def made_by(contributor: Contributor) -> tuple[object, ...]:
    """Return the line that made it; its label and its module may be others at another moment."""
    _, operator, module, _, where = contributor.told_as
    return (operator, where or module)


def _are_one(one: Contributor, other: Contributor) -> bool:
    """Return whether one line made both, in one module or in a part of it."""
    modules = (one.module, other.module)
    return made_by(one) == made_by(other) and common_module(modules) in modules


def holders_title(holders: Iterable[Holder]) -> str:
    """Return what a list of holders is called."""
    gone = any(holder.fate is Fate.FREED_LATER for holder in holders)
    return "what held it" if gone else "what keeps it alive"


def group_holders(single: Iterable[Holder]) -> tuple[Holder, ...]:
    """Return one holder for all that differ in nothing but an index, largest first."""
    groups: dict[tuple[Fate, str], list[Holder]] = {}
    for holder in single:
        groups.setdefault((holder.fate, _INDEX.sub("*", holder.by)), []).append(holder)
    grouped = []
    for (_, folded), group in groups.items():
        by = folded if len({holder.by for holder in group}) > 1 else group[0].by
        size_bytes, count = sum(h.size_bytes for h in group), sum(h.count for h in group)
        grouped.append(replace(group[0], size_bytes=size_bytes, count=count, by=by))
    return tuple(sorted(grouped, key=lambda holder: (-holder.size_bytes, str(holder))))


def without_known(
    result: Result, held: Iterable[Held], known: Sequence[KnownHolder]
) -> tuple[Result, dict[str, int]]:
    """Return a result without what known holders hold, and the bytes of each by its pattern.

    What a step adds is known where known holders hold all that is left of its origin.
    """
    excused: Counter[str] = Counter()
    known_bytes: Counter[object] = Counter()
    all_known: dict[object, bool] = defaultdict(lambda: True)
    for each in held:
        pattern = known_by(each.holder, known)
        origin = made_by(each.contributor)
        all_known[origin] = all_known[origin] and bool(pattern)
        if pattern:
            excused[pattern] += each.holder.size_bytes
            if each.at_end:
                known_bytes[each.contributor.told_as] += each.holder.size_bytes
    return _reduced(result, known_bytes, all_known), dict(excused)


def _reduced(
    result: Result, known_bytes: Mapping[object, int], all_known: Mapping[object, bool]
) -> Result:
    retained = result.retained
    # The list of contributors may be cut; the sums are not.
    left = (
        replace(c, size_bytes=c.size_bytes - known_bytes.get(c.told_as, 0)) for c in retained.live
    )
    live = sorted((c for c in left if c.size_bytes > 0), key=lambda c: -c.size_bytes)
    total = retained.total - sum(known_bytes.values())
    grown = [c for c in result.grown if not all_known.get(made_by(c), False)]
    known_growth = sum(c.size_bytes for c in result.grown) - sum(c.size_bytes for c in grown)
    steps = (*result.steps[:-1], result.steps[-1] - known_growth) if result.steps else ()
    each_step = result.each_step
    if known_growth:
        left_bytes = sum(c.size_bytes for c in grown)
        each_step = min(each_step, -(-left_bytes // max(1, len(steps) - 1)))
    return replace(
        result,
        retained=replace(retained, total=total, live=tuple(live), by_category=CategoryBytes()),
        grown=tuple(grown),
        steps=steps,
        each_step=each_step,
    )


def judge_unknown(
    result: Result, limits: Mapping[str, int], held: Iterable[Held], known: Sequence[KnownHolder]
) -> tuple[tuple[Finding, ...], dict[str, int]]:
    """Hold what unknown holders retain against the limits on that.

    Returns the findings, and the bytes that known holders hold, by pattern.
    """
    reduced, excused = without_known(result, held, known)
    on_retained = {key: size for key, size in limits.items() if key in RETAINED}
    findings = judge_limits(reduced, on_retained)
    known_bytes = result.retained.total - reduced.retained.total
    beside = f"; known holders have {format_size(known_bytes)} more" if known_bytes else ""
    told = (f if f.key == "growth" else replace(f, numbers=f.numbers + beside) for f in findings)
    return tuple(told), excused
