"""Holders: what keeps alive what a window left behind, and which of it a sentence is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.findings import RETAINED, Finding, Verdict
from pytest_torchmem.values.results import Fate, Holder

_BECAUSE: Final = " because "
# Of a list, and of a module's numbered child.
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
                f"{text!r} names no holder with a reason; write it as a failure tells it, and why: "
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
    verdict: Verdict,
    find_holders: Callable[[], tuple[Held, ...]] | None,
    known: Sequence[KnownHolder] = (),
) -> Verdict:
    """Say what keeps alive what was retained, where that is what failed; only then it is asked.

    A sentence names no holder that is known: it is not the cause.
    """
    if find_holders is None or not any(finding.key in RETAINED for finding in verdict.findings):
        return verdict
    held = find_holders()
    holders = group_holders(each.holder for each in held if each.at_end)
    result = replace(verdict.result, retained=replace(verdict.result.retained, holders=holders))
    unknown = tuple(each for each in held if not known_by(each.holder, known))
    findings = tuple(_with_holder(finding, unknown) for finding in verdict.findings)
    return replace(verdict, result=result, findings=findings)


def _with_holder(finding: Finding, held: tuple[Held, ...]) -> Finding:
    """Add who holds the cause that a finding names; something else may hold more.

    A cause of the peak may be what is left behind at the end: then its holder is the reason, too.
    """
    causes = {made_by(cause) for cause in finding.causes}
    asked = (each for each in held if each.at_end or finding.key == "growth")
    holders = group_holders(each.holder for each in asked if made_by(each.contributor) in causes)
    if not holders:
        return finding
    first = min(holders, key=lambda holder: holder.fate is Fate.NOT_LOOKED_FOR)
    return replace(finding, cause=f"{finding.cause}, {first}")


def made_by(contributor: Contributor) -> tuple[object, ...]:
    """Return the line that made it; its label and its module may be others at another moment."""
    _, operator, module, _, where = contributor.told_as
    return (operator, where or module)


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
