"""The results of all ranks of one job, looked at together."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_torchmem.analysis.judge.causes import cause_of
from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.analysis.judge.lines import by_line, cause_first
from pytest_torchmem.analysis.judge.verdict import judge_baseline, judge_limits
from pytest_torchmem.measuring.body_measurement import Region, running
from pytest_torchmem.measuring.saving import results_by_name
from pytest_torchmem.store import run_reports
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values import findings
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Reference
from pytest_torchmem.values.errors import LimitError, MarkerError, RankError, RecordingError
from pytest_torchmem.values.findings import FindingKind, Size
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import Rank, Window
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_apart, format_size

if TYPE_CHECKING:
    from pytest_torchmem.record.environment import ProcessGroup

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

# A job may lack so many files, and the message still names each.
_MISSING_SHOWN: Final = 1000
_OWNER: Final = "check"
"""What messages say that a bad argument was given to."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """The measurement of one rank."""

    rank: int
    result: Result


@dataclass(frozen=True, slots=True)
class Ranks:
    """The measurements of all ranks of a job of the same thing, rank 0 first.

    Raises `RankError` when there is none.
    """

    results: Sequence[Result] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", tuple(self.results))
        if not self.results:
            raise RankError("there is no result of any rank")

    @classmethod
    def load(cls, paths: Paths, name: str = "") -> Ranks:
        """Return what all ranks of one job measured, from a file of each.

        Args:
            paths: A pattern such as ``"mem-rank*.json"``, a folder of files, or the files
                themselves.
            name: Which of their results, as `pytest_torchmem.load` calls it; not needed where a
                file has one measurement.

        Raises `ReportError` for a file that cannot be read, and `RankError` when the files are not
        those of all ranks of one job, each once.
        """
        runs = {path: run_reports.read_run(path) for path in _files(paths)}
        by_rank: dict[int, Path] = {}
        for path, run in runs.items():
            if run.rank.number in by_rank:
                raise RankError(
                    f"{by_rank[run.rank.number]} and {path} are both of rank {run.rank.number}; "
                    "give the files of one job only"
                )
            by_rank[run.rank.number] = path
        counts = {run.rank.count: path for path, run in runs.items()}
        if len(counts) > 1:
            lengths_text = ", ".join(f"{count} in {path}" for count, path in counts.items())
            raise RankError(
                f"the files are of jobs of different sizes: {lengths_text}; remove the older ones"
            )
        (count,) = counts
        # A damaged file may count millions.
        missing_ranks = (str(number) for number in range(count) if number not in by_rank)
        if missing := [*islice(missing_ranks, _MISSING_SHOWN)]:
            more = count - len(by_rank) - len(missing)
            lengths_text = ", ".join(missing) + (f" and {more} more" if more > 0 else "")
            raise RankError(f"of {count} ranks there is no file of rank {lengths_text}")
        return cls([_result_named(runs[by_rank[n]], name, by_rank[n]) for n in range(count)])

    @classmethod
    def gather(cls, measured: Result | Region, group: ProcessGroup | None = None) -> Ranks:
        """Return what every rank measured; all ranks of the process group must call it.

        ``measured`` is a result, or a block or region that has ended. An open measurement does not
        count the exchange. A single process gets its own result. Raises `RankError` when a rank has
        no result, and in a job of several ranks without a process group.
        """
        from pytest_torchmem.record.environment import group_rank
        from pytest_torchmem.record.torch_api.distributed import gather as exchange

        own_rank = group_rank(group)
        if own_rank is None:
            if (rank := Rank.launched()).count > 1:
                raise RankError(
                    f"this is {rank}, and there is no process group to gather results with: call "
                    "torch.distributed.init_process_group() first, or save a file for each rank "
                    "and read them with Ranks.load"
                )
            return cls((measured if isinstance(measured, Result) else measured.result,))
        if own_rank[0] < 0:
            raise RankError("this process is not in the group whose results are gathered")
        # A rank without a result must take part, too: the others would wait for it.
        mine: dict[str, Json]
        try:
            own = measured if isinstance(measured, Result) else measured.result
            mine = {"result": own.to_json()}
        except RecordingError as error:
            mine = {"missing": str(error)}
        measurement = running()
        with measurement.paused() if measurement else nullcontext():
            gathered = exchange(mine, group)
        for rank_number, data in enumerate(gathered):
            if "missing" in data:
                raise RankError(f"rank {rank_number} has no result: {data['missing']}")
        return cls([Result.from_json(data["result"]) for data in gathered])

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
        before: Ranks | None = None,
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
        limit_sizes = findings.read_limits(_OWNER, {"total": total, **limits})
        spread_sizes = (
            {} if spread is None else {"spread": findings.read_size(_OWNER, "spread", spread)}
        )
        if not limit_sizes and not spread_sizes and before is None:
            raise MarkerError(f"{_OWNER} needs a limit, a spread or results to compare with")
        sizes = findings.sizes_now(_OWNER, findings.limits_on(_OWNER, limit_sizes, ()))
        windows = [(one, Window(one.result, judge_limits(one.result, sizes))) for one in self]
        if before is not None:
            windows += self._compare(before, findings.read_allowance(_OWNER, tolerance, floor))
        wrong = sorted(((one, v) for one, v in windows if v.failed), key=_telling)
        sentences = [
            (f"on rank {one.rank} of {len(self)}, {v.where}{v.findings[0].sentence}", v.kinds[0])
            for one, v in wrong
        ]
        for allowed_bytes in findings.sizes_now(_OWNER, spread_sizes).values():
            sentences += (
                (text, FindingKind.OVER_LIMIT) for text in self._spread_problems(allowed_bytes)
            )
        if sentences:
            sentence, kind = sentences[0]
            raise LimitError(sentence, tuple(k.ends(text) for text, k in sentences), kind.value)

    def _compare(self, before: Ranks, allowance: Allowance) -> Iterator[tuple[RankResult, Window]]:
        if len(before) != len(self):
            raise RankError(f"{len(before)} ranks cannot be compared with {len(self)}")
        for one in self:
            stored = Reference.of(BaselineEntry.of(before.of(one.rank)))
            yield one, judge_baseline(one.result, stored, allowance)

    def _spread_problems(self, allowed_bytes: int) -> list[str]:
        if self.spread_bytes <= allowed_bytes:
            return []
        top, low = self.largest, self.smallest
        high, small = format_apart(top.result.peak.total, low.result.peak.total)
        rank_differences = differences(top.result.peak.live, low.result.peak.live)
        lines = cause_first(by_line(rank_differences), self.spread_bytes)
        is_known = any(line.size_bytes > 0 for line in lines)
        found_cause = cause_of(lines, self.spread_bytes, "total") if is_known else None
        cause = f": {found_cause.text}{found_cause.others}" if found_cause else ""
        over = format_size(self.spread_bytes - allowed_bytes)
        return [
            f"rank {top.rank} of {len(self)} peaked at {high} and rank {low.rank} at {small}, "
            f"{over} over the spread of {format_size(allowed_bytes)}{cause}"
        ]


def _telling(pair: tuple[RankResult, Window]) -> tuple[bool, int, int]:
    """Sort what could not be judged first, then the largest excess."""
    one, window = pair
    first = window.findings[0]
    return first.kind.has_excess, -first.excess_bytes, one.rank


def _files(paths: Paths) -> list[Path]:
    if not isinstance(paths, str | os.PathLike):
        files = [Path(path) for path in paths]
    elif Path(paths).is_dir():
        files = sorted(Path(paths).glob("*.json"))
    else:
        text = os.fspath(paths)
        files = sorted(map(Path, glob.glob(text))) or ([] if glob.has_magic(text) else [Path(text)])  # noqa: PTH207
    if not files:
        raise RankError(f"there is no file in {paths!r}")
    return files


def _result_named(run: RunReport, name: str, path: Path) -> Result:
    results: Mapping[str, Result] = results_by_name(run)
    if not name and len(run.tests) == 1 and results:
        return next(iter(results.values()))
    if name not in results:
        names = ", ".join(results) or "nothing"
        problem = (
            f"no result called {name!r}" if name else "more than one result, and no name given"
        )
        raise RankError(f"{path} has {problem}; it has {names}")
    return results[name]
