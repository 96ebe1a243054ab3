"""The results of all ranks of one job, looked at together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from pytest_torchmem.analysis.judge.causes import cause_of
from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.analysis.judge.lines import by_line, cause_first
from pytest_torchmem.analysis.judge.verdict import judge_baseline, judge_limits
from pytest_torchmem.values import findings
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Reference
from pytest_torchmem.values.errors import LimitError, MarkerError, RankError
from pytest_torchmem.values.findings import FindingKind, Size, Verdict
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_apart, format_size

_OWNER: Final = "check"
"""What messages say that a bad argument was given to."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The measurement of one rank."""

    rank: int
    result: Result


@dataclass(frozen=True, slots=True)
class RankResults:
    """The measurements of all ranks of a job of the same thing, rank 0 first.

    Raises `RankError` when there is none.
    """

    results: Sequence[Result] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", tuple(self.results))
        if not self.results:
            raise RankError("there is no result of any rank")

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[RankResult]:
        return (RankResult(rank, result) for rank, result in enumerate(self.results))

    def of(self, rank: int) -> Result:
        """Return the result of one rank. Raises `RankError` when there is no such rank."""
        if not 0 <= rank < len(self.results):
            raise RankError(f"there is no rank {rank}; there are {len(self.results)}, from 0 on")
        return self.results[rank]

    @property
    def largest(self) -> RankResult:
        """The rank with the largest peak; the first of equals."""
        return max(self, key=lambda one: one.result.peak.total)

    @property
    def smallest(self) -> RankResult:
        """The rank with the smallest peak; the first of equals."""
        return min(self, key=lambda one: one.result.peak.total)

    @property
    def spread_bytes(self) -> int:
        """The largest peak minus the smallest."""
        return self.largest.result.peak.total - self.smallest.result.peak.total

    def check(
        self,
        total: Size | None = None,
        *,
        spread: Size | None = None,
        before: RankResults | None = None,
        tolerance: object = "2%",
        floor: object = "5% up to 1MiB",
        **limits: Size | None,
    ) -> None:
        """Raise `LimitError` unless every rank is as it must be; the first line names the rank.

        Args:
            total: What the peak of each rank may be; further ``limits`` are those of the marker
                ``memory_budget``, such as ``activation="1GiB"``.
            spread: How far the peaks of two ranks may be apart.
            before: Results of the same ranks that none may exceed by more than ``tolerance`` and
                ``floor``, as with a baseline: a rank that grew alone is found.

        Raises `MarkerError` for an argument that cannot be used, and `RankError` when ``before``
        has another number of ranks.
        """
        asked = findings.read_limits(_OWNER, {"total": total, **limits})
        apart = {} if spread is None else {"spread": findings.read_size(_OWNER, "spread", spread)}
        if not asked and not apart and before is None:
            raise MarkerError(f"{_OWNER} needs a limit, a spread or results to compare with")
        sizes = findings.sizes_now(_OWNER, findings.limits_on(_OWNER, asked, ()))
        judged = [(one, Verdict(one.result, judge_limits(one.result, sizes))) for one in self]
        if before is not None:
            judged += self._compared(before, findings.read_allowance(_OWNER, tolerance, floor))
        wrong = sorted(((one, v) for one, v in judged if v.failed), key=_telling)
        told = [
            (f"on rank {one.rank} of {len(self)}, {v.where}{v.findings[0].sentence}", v.kinds[0])
            for one, v in wrong
        ]
        for allowed in findings.sizes_now(_OWNER, apart).values():
            told += ((text, FindingKind.OVER_LIMIT) for text in self._apart(allowed))
        if told:
            sentence, kind = told[0]
            raise LimitError(sentence, tuple(k.ends(text) for text, k in told), kind.value)

    def _compared(
        self, before: RankResults, allowance: Allowance
    ) -> Iterator[tuple[RankResult, Verdict]]:
        if len(before) != len(self):
            raise RankError(f"{len(before)} ranks cannot be compared with {len(self)}")
        for one in self:
            stored = Reference.of(BaselineEntry.of(before.of(one.rank)))
            yield one, judge_baseline(one.result, stored, allowance)

    def _apart(self, allowed_bytes: int) -> list[str]:
        if self.spread_bytes <= allowed_bytes:
            return []
        top, low = self.largest, self.smallest
        high, small = format_apart(top.result.peak.total, low.result.peak.total)
        found = differences(top.result.peak.live, low.result.peak.live)
        lines = cause_first(by_line(found), self.spread_bytes)
        is_known = any(line.size_bytes > 0 for line in lines)
        found_cause = cause_of(lines, self.spread_bytes, "total") if is_known else None
        cause = f": {found_cause.text}{found_cause.others}" if found_cause else ""
        over = format_size(self.spread_bytes - allowed_bytes)
        return [
            f"rank {top.rank} of {len(self)} peaked at {high} and rank {low.rank} at {small}, "
            f"{over} over the spread of {format_size(allowed_bytes)}{cause}"
        ]


def _telling(pair: tuple[RankResult, Verdict]) -> tuple[bool, int, int]:
    """Sort what could not be judged first, then the largest excess."""
    one, verdict = pair
    first = verdict.findings[0]
    return first.kind.has_excess, -first.excess_bytes, one.rank
