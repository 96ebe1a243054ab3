"""Findings: what is not as it must be, and the words for what a limit can be set on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.results import Result

COUNTERS: Final = ("allocated", "active", "reserved")
LIMIT_KEYS: Final = ("total", *(c.value for c in Category), "retained", "growth", *COUNTERS)
"""What a limit can be set on, in the order in which reports name them."""

RETAINED: Final = ("retained", "growth")
"""The limits that what is left behind may exceed."""

NOT_JUDGED: Final = "cannot be judged: "
NO_READING: Final = "a limit needs a reading"
UNJUDGED: Final = (NOT_JUDGED, NO_READING)
"""What the sentence about a limit without a reading has one of."""

SLUGS: Final = (
    "no-activation",
    "no-counter",
    "no-steps",
    "no-reading",
    "shrunk",
    "unstable",
    "unseen",
)
"""Why a number could not be judged, or fails without being too large; docs/messages.md explains."""


@dataclass(frozen=True, slots=True)
class Growth:
    """One contributor that holds more than the baseline knows of.

    Attributes:
        contributor: The measured contributor; the largest of those that are new.
        size_bytes: By how much its group grew.
        new: True when the baseline has no contributor like it.
        at_least: True when the baseline left small contributors out, so that the growth may be
            smaller than what is live but not smaller than ``size_bytes``.
    """

    contributor: Contributor
    size_bytes: int
    new: bool
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """One number that is not as it must be.

    Attributes:
        key: One of `LIMIT_KEYS`.
        sentence: Both numbers and the largest cause, on one line.
        excess_bytes: By how much; 0 when the number could not be judged.
        growths: What grew, largest first, when there was a baseline to compare with.
        numbers: The sentence without its cause.
        causes: The contributor that the sentence names as the largest cause; empty for none.
    """

    key: str
    sentence: str
    excess_bytes: int = 0
    growths: tuple[Growth, ...] = ()
    numbers: str = ""
    causes: tuple[Contributor, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holding one result against its limits and its baseline found.

    Attributes:
        result: The result that was judged.
        findings: What failed, the most telling first; empty when all is well.
        change: How the result differs from its baseline entry.
        baseline_bytes: The entry's peak; 0 without one.
        notice: What shrank most, in a sentence; ``""`` when nothing did.
        reference: The environment whose baseline a user told us to compare with; ``""`` for that
            of the run.
        nearest: Without a baseline, the nearest environment that has one; ``""`` if none does.
    """

    result: Result
    findings: tuple[Finding, ...] = ()
    change: Change = Change.NOT_COMPARED
    baseline_bytes: int = 0
    notice: str = ""
    reference: str = ""
    nearest: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.findings)

    @property
    def sentence(self) -> str:
        """The first line of a failure; ``""`` when nothing failed."""
        if not self.findings:
            return ""
        where = f"in {self.result.name!r}, " if self.result.name else ""
        return where + self.findings[0].sentence

    @property
    def growths(self) -> tuple[Growth, ...]:
        """What grew against the baseline, each contributor once, largest growth first."""
        seen: dict[tuple[str, ...], Growth] = {}
        for finding in self.findings:
            for growth in finding.growths:
                seen.setdefault(growth.contributor.identity, growth)
        return tuple(sorted(seen.values(), key=lambda g: -g.size_bytes))


def is_estimated(result: Result, key: str) -> bool:
    """Return whether the number that ``key`` stands for was not measured."""
    simulated = key in COUNTERS and result.counters is not None and result.counters.estimated
    return result.estimated or simulated


def words(key: str) -> str:
    """Return a limit's key as the subject of a sentence."""
    if key == "total":
        return "memory"
    return f"{key} memory" if key in COUNTERS else key.replace("_", " ")
