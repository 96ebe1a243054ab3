"""The measurements of a run: records of single tests, and their sum."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytest_torchmem.values.baseline import TOTAL, BaselineEntry, Change, ChangedNumber
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.findings import (
    CodeLines,
    Finding,
    FindingKind,
    LineDifference,
    is_estimated,
)
from pytest_torchmem.values.json_values import Json, JsonFields, plain, whole_number
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_apart

RENAMED: Final = "renamed"
"""What an update calls a new entry that took another one's place, and its numbers."""

# Written beside the findings that they come from, for whoever reads a file of results.
_DERIVED: Final = ("sentence", "sentences", "kinds", "causes", "place", "changed_since", "status")
_COMPARED: Final = (Change.SAME, Change.WITHIN, Change.GROWN, Change.SHRUNK)
_NUMBER: Final = re.compile(r"\d{1,9}")
NOT_COMPARED: Final = "not compared, ended by an exception"
"""Said of a body that did not come to its end."""

STATUSES: Final = ("failed", "not measured", "grown", "shrunk", "new", "xfailed", "ok")
"""The words of a report for a test, the most telling first."""


@dataclass(frozen=True, slots=True)
class Window(JsonFields):
    """One measured window of a test, and what holding it against limits and a baseline found.

    Attributes:
        result: What was measured.
        findings: What failed, the most telling first; empty when all is well.
        change: How the result differs from its baseline.
        baseline_bytes: The baseline's peak; 0 without one.
        notice: What shrank, in a sentence; ``""`` when nothing did.
        reference: The environment whose baseline a user told us to compare with; ``""`` for that
            of the run.
        nearest: Without a baseline, the nearest environment that has one; ``""`` if none does.
        accepted: The change that an update stores, in a sentence; ``""`` where it stores none.
        excused: The bytes that known holders hold and that no limit counted, by pattern.
        changed: The number that the change is told by; None without a baseline.
        lines: What made that number grow, by line, the cause first; with what is too small to be
            listed they add up to the growth. Empty where it did not grow.
        key: The window's baseline key: the test within its module, with ``::region`` if it is one;
            ``""`` for one that was held against nothing.
        limits: The limits in bytes that the result was held against.
        baseline: The baseline's entry; None without one, and where no report asks for it.
        picture: The timeline; None where no report asks for it.
    """

    result: Result
    findings: tuple[Finding, ...] = ()
    change: Change = Change.NOT_COMPARED
    baseline_bytes: int = 0
    notice: str = ""
    reference: str = ""
    nearest: str = ""
    accepted: str = ""
    excused: Mapping[str, int] = field(default_factory=dict)
    changed: ChangedNumber | None = None
    lines: tuple[LineDifference, ...] = ()
    key: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    baseline: BaselineEntry | None = None
    picture: Picture | None = None

    @property
    def failed(self) -> bool:
        return bool(self.findings)

    @property
    def where(self) -> str:
        """The beginning of a sentence about a region; ``""`` for the whole body."""
        return f"in {self.result.name!r}, " if self.result.name else ""

    @property
    def sentence(self) -> str:
        """The first line of the failure; ``""`` when nothing failed."""
        return self.where + self.findings[0].shown if self.findings else ""

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything that failed, the first line included."""
        return sentences([self], name_regions=False)

    @property
    def kinds(self) -> tuple[FindingKind, ...]:
        """Why it failed, each kind once, the most telling first."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    @property
    def causes(self) -> tuple[Contributor, ...]:
        """The contributors that the sentences name, each once, in their order."""
        return tuple(dict.fromkeys(c for finding in self.findings for c in finding.causes))

    @property
    def place(self) -> CodeLines | None:
        """The lines that the first sentence blames, or the one changed place that leads there."""
        return self.findings[0].place if self.findings else None

    @property
    def changed_since(self) -> tuple[CodeLines, ...]:
        """The code that has changed since the baseline, as far as a sentence names it."""
        return tuple(place for finding in self.findings for place in finding.changed_since)

    @property
    def told_by(self) -> ChangedNumber:
        """The number that the change is told by; the peak where nothing was compared."""
        return self.changed or ChangedNumber(TOTAL, self.baseline_bytes, self.result.peak.total)

    @property
    def peak_text(self) -> str:
        """The peak, with what must be known of it: ``1.0 MiB (estimated)``.

        An interval has both its ends: ``28.0 MiB to 92.0 MiB``.
        """
        mark, result = " (estimated)" if self.result.estimated else "", self.result
        most = result.at_most if result.interval else None
        ends = (result.peak.total, most) if most else (result.peak.total,)
        return " to ".join(format_apart(*ends)) + mark

    @property
    def limit_status(self) -> str:
        """The window's status beside its limits, in a few words; ``""`` where it had none."""
        if FindingKind.OVER_LIMIT in self.kinds:
            return "over limit"
        if not self.limits:
            return ""
        if any(kind.is_unread for kind in self.kinds):
            return "limit not judged"
        total = self.limits.get("total")
        status = f"{self.result.peak.total / total:.0%} of limit" if total else "within limits"
        # A row that is estimated as a whole says so at its peak.
        simulated = [key for key in self.limits if is_estimated(self.result, key)]
        if simulated and not self.result.estimated:
            return f"{status} ({', '.join(simulated)} estimated)"
        return status

    @property
    def is_compared(self) -> bool:
        """True where there was a baseline, of however few bytes."""
        return self.change in _COMPARED

    @property
    def change_text(self) -> str:
        """By how much it differs from its baseline: ``+33.0 MiB (+30 %)``, ``retained +4 B``.

        ``""`` of what is the same, and where there is no baseline.
        """
        if not self.is_compared or self.change is Change.SAME:
            return ""
        return self.told_by.by

    @property
    def change_word(self) -> str:
        """The change in a word or two; ``""`` where nobody asked for a baseline."""
        if self.change is Change.NOT_COMPARED:
            return ""
        same = self.change is Change.SAME
        return "same as baseline" if same else str(self.change.value)

    @property
    def status(self) -> str:
        """The window's status beside its limits and its baseline, in the words of every report."""
        other = f"compared with {self.reference}" if self.reference else ""
        beside_baseline = ", ".join(filter(None, [self.change_word, self.change_text, other]))
        return "; ".join(filter(None, [self.limit_status, beside_baseline]))

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        derived = {name: plain(getattr(self, name)) for name in _DERIVED}
        return {**JsonFields.to_json(self), **derived}


def sentences(windows: Iterable[Window], name_regions: bool = True) -> tuple[str, ...]:
    """Return everything that failed, the first line of the failure first.

    A tensor that is left behind is part of what is retained, of its category's peak and of the
    total. The first of those sentences names it; the others say that the cause is the same.
    """
    by_cause: dict[object, list[str]] = {}
    for window in windows:
        where = window.where if name_regions else ""
        for finding in window.findings:
            # One cause may count in several categories: scratch at one moment, and kept later.
            cause: object = finding.causes[0].told_line if finding.causes else id(finding)
            if finding.place and (finding.is_at_change or not finding.changed_since):
                cause = str(finding.place)
            elif finding.causes and (source := finding.causes[0].source):
                cause = str(source)
            of_cause = by_cause.setdefault(cause, [])
            same = f"{where}{finding.numbers} (same cause)"
            of_cause.append(same if of_cause else where + finding.shown)
    return tuple(sentence for of_cause in by_cause.values() for sentence in of_cause)


@dataclass(frozen=True, slots=True)
class MeasuredTest(JsonFields):
    """The requests of one test, its results, and how it ended.

    Attributes:
        test: The node id.
        file: The test module's path; in a report relative to the project.
        environment: The environment that its baselines belong to; empty when nothing was measured.
        windows: The body first, then the regions that were checked.
        not_measured: Why there are no windows; ``""`` when there are.
        problem: A failure that is not about a number, such as a baseline that cannot be read.
        unjudged: Windows that were held against nothing, where a report asks for them: regions that
            were measured only, and before them the body where its own exception ended it.
        raised: That exception on one line; ``""`` where the body came to its end.
        outcome: pytest's word for how it ended: ``passed``, ``failed``, ``skipped``, ``xfailed``.
        line: The line of its definition, from 1; 0 where that is not known.
    """

    test: str
    file: str
    environment: Mapping[str, str]
    windows: tuple[Window, ...] = ()
    not_measured: str = ""
    problem: str = ""
    unjudged: tuple[Window, ...] = ()
    raised: str = ""
    outcome: str = "passed"
    line: int = 0

    @property
    def rows(self) -> tuple[Window, ...]:
        """The windows that have a row in a table: those judged, or the body that did not end."""
        return self.windows or (self.unjudged[:1] if self.raised else ())

    def status_of(self, window: Window) -> str:
        """Return the status of one of its rows beside its limits and its baseline."""
        return NOT_COMPARED if self.raised else window.status

    @property
    def status(self) -> str:
        """One of `STATUSES`."""
        changes = {window.change for window in self.windows}
        if self.outcome == "xfailed" and not self.problem:
            return "xfailed"
        if self.outcome == "failed" or self.problem or self.failed_windows:
            return "failed"
        if self.not_measured:
            return "not measured"
        notable = (Change.GROWN, Change.SHRUNK, Change.NEW)
        return next((c.value for c in notable if c in changes), "ok")

    @property
    def failed_windows(self) -> tuple[Window, ...]:
        windows = (*self.windows, *self.unjudged)
        return tuple(window for window in windows if window.sentence)

    @property
    def sentence(self) -> str:
        """Why it failed or was not measured, on one line; ``""`` when all is well."""
        failed = self.failed_windows
        first = failed[0].sentence if failed else self.raised
        text = self.problem or first
        expected = "failed as expected: " if text and self.outcome == "xfailed" else ""
        return expected + text if text else self.not_measured

    @property
    def cause(self) -> CodeLines | None:
        """The lines that its first failure blames; None where none are known."""
        return next((window.place for window in self.failed_windows), None)

    @property
    def peak_bytes(self) -> int:
        """The peak of `body`; 0 where nothing was measured."""
        return self.body.result.peak.total if self.body else 0

    @property
    def standing(self) -> str:
        """The word for `body` beside its limits and its baseline; ``""`` without either."""
        return self.status_of(self.body) if self.body else ""

    @property
    def body(self) -> Window | None:
        """The whole body, also where it did not come to its end; None where it was not measured."""
        windows = (*self.windows, *self.unjudged)
        return windows[0] if windows else None

    def to_json(self) -> dict[str, Json]:
        data = JsonFields.to_json(self)
        line = data.pop("line")
        return {**data, "status": self.status, "line": line}


@dataclass(frozen=True, slots=True)
class BaselineChange(JsonFields):
    """One entry that an update wrote, or would remove.

    Attributes:
        file: The baseline file, as shown to the user.
        before_bytes: The stored peak; 0 for a new entry without another name before.
        after_bytes: The measured peak; 0 for an unused one.
        written: False where it is only shown: an unused entry that was kept, a dry run.
        renamed_from: The key that the entry had before. A new one keeps its numbers.
        repaired: A new entry stands in place of one that was damaged or there twice.
        changed: The number that grew or shrank; None for an entry that is new or unused.
    """

    file: str
    key: str
    change: Change
    before_bytes: int = 0
    after_bytes: int = 0
    written: bool = True
    renamed_from: str = ""
    repaired: bool = False
    changed: ChangedNumber | None = None

    @property
    def word(self) -> str:
        """The kind of change for people."""
        is_only_renamed = self.renamed_from and self.change is Change.NEW
        return RENAMED if is_only_renamed else str(self.change.value)

    @property
    def told_by(self) -> ChangedNumber:
        """The number that the change is told by; the peak of an entry that is new or unused."""
        return self.changed or ChangedNumber(TOTAL, self.before_bytes, self.after_bytes)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a job, counted from 0, and how many there are."""

    number: int = 0
    count: int = 1

    @classmethod
    def launched(cls, environment: Mapping[str, str] = os.environ) -> Rank:
        """Return what a launcher such as ``torchrun`` says; rank 0 of 1 where none does."""
        number, count = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        if _NUMBER.fullmatch(number) and _NUMBER.fullmatch(count) and int(number) < int(count):
            return cls(int(number), int(count))
        return cls()

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Rank:
        """Return the rank in a results file."""
        number, count = whole_number(data["rank"]), whole_number(data["rank_count"])
        if number >= count:
            raise ValueError(f"there is no rank {number} of {count}")
        return cls(number, count)

    def __str__(self) -> str:
        return f"rank {self.number} of {self.count}"

    @property
    def environment(self) -> dict[str, str]:
        """The part of the environment that several ranks add; empty in a job of one."""
        return {"rank": f"{self.number} of {self.count}"} if self.count > 1 else {}
