"""Results of scripts and jobs: in files, as a report of a run of tests, or between the ranks."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from pytest_torchmem.analysis.judge.rank_results import RankResults
from pytest_torchmem.store import run_reports
from pytest_torchmem.store.baselines import entry_key, portable
from pytest_torchmem.store.files import write_report
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.errors import RankError, RecordingError
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import MeasuredTest, Rank, unjudged
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.measuring.body_measurement import MeasuredNumbers
    from pytest_torchmem.record.environment import ProcessGroup

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Drawn: TypeAlias = tuple[Result, Picture | None]

# A job may lack so many files, and the message still names each.
_MISSING_SHOWN: Final = 1000
UNNAMED: Final = "measured"
"""What a measurement without a name is called in messages and files."""


def save_results(path: str | os.PathLike[str], results: Iterable[Result]) -> Path:
    """Write results to a file that `load_results` and the command ``torchmem`` read; return it.

    Results of one name are numbered from the second on. For ``{rank}`` in the path and for several
    ranks see `Measure.save`. Raises `ReportError`.
    """
    seen: Counter[str] = Counter()
    tests: list[tuple[str, list[Drawn]]] = []
    for result in results:
        name = result.name or UNNAMED
        seen[name] += 1
        numbered = f"{name} ({seen[name]})" if seen[name] > 1 else name
        tests.append((numbered, [(replace(result, name=""), None)]))
    return write_windows(path, tests)


def write_windows(
    path: str | os.PathLike[str], tests: Iterable[tuple[str, Sequence[Drawn]]]
) -> Path:
    """Write measurements by name: of each the whole first, with no name, then its regions."""
    from pytest_torchmem.record.environment import current_rank, environment  # reads without torch

    rank, folder, reports = current_rank(), Path.cwd(), []
    place = run_reports.path_of_rank(path, rank)
    for name, windows in tests:
        kept = (
            replace(unjudged(portable(result, folder), picture), key=entry_key(name, result.name))
            for result, picture in windows
        )
        reports.append(MeasuredTest(name, "", environment(windows[0][0].device), tuple(kept)))
    run = run_reports.stamped(RunReport(tuple(reports)), folder, rank)
    write_report(place, run_reports.render_run(run))
    return place


def load_results(path: str | os.PathLike[str]) -> dict[str, Result]:
    """Return what is in a results file by name; regions are called ``train step::forward``.

    A file that ``--torchmem-report`` wrote has the results of tests, by node id. Raises
    `ReportError` where there is no such file, or it is damaged.
    """
    return _results(run_reports.read_run(Path(path)))


def _results(run: RunReport) -> dict[str, Result]:
    results = {}
    for test in run.tests:
        for window in test.windows:
            name, region = test.test, window.result.name
            key = f"{name}::{region}" if region else name
            results[key] = replace(window.result, name=region or name)
    return results


def load_ranks(paths: Paths, name: str = "") -> RankResults:
    """Return what all ranks of one job measured, from a file of each.

    Args:
        paths: A pattern such as ``"mem-rank*.json"``, a folder of files, or the files themselves.
        name: Which of their results, as `load_results` calls it; not needed where a file has one
            measurement.

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
        told = ", ".join(f"{count} in {path}" for count, path in counts.items())
        raise RankError(f"the files are of jobs of different sizes: {told}; remove the older ones")
    (count,) = counts
    # A damaged file may count millions.
    found = (str(number) for number in range(count) if number not in by_rank)
    if missing := [*islice(found, _MISSING_SHOWN)]:
        more = count - len(by_rank) - len(missing)
        told = ", ".join(missing) + (f" and {more} more" if more > 0 else "")
        raise RankError(f"of {count} ranks there is no file of rank {told}")
    return RankResults([_named(runs[by_rank[n]], name, by_rank[n]) for n in range(count)])


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


def _named(run: RunReport, name: str, path: Path) -> Result:
    results: Mapping[str, Result] = _results(run)
    if not name and len(run.tests) == 1 and results:
        return next(iter(results.values()))
    if name not in results:
        known = ", ".join(results) or "nothing"
        asked = f"no result called {name!r}" if name else "more than one result, and no name given"
        raise RankError(f"{path} has {asked}; it has {known}")
    return results[name]


def gather_ranks(
    measured: Result | MeasuredNumbers, group: ProcessGroup | None = None
) -> RankResults:
    """Return what every rank measured; all ranks of the process group have to call it.

    ``measured`` is a result, or a block or region that is over. Exchanging the results is no part
    of a measurement that is still going on. A process alone gets its own result. Raises
    `RankError` when a rank has no result, and in a job of several ranks without a process group.
    """
    from pytest_torchmem.measuring.body_measurement import running
    from pytest_torchmem.record.environment import group_rank
    from pytest_torchmem.record.torch_api.distributed import gather

    found = group_rank(group)
    if found is None:
        if (rank := Rank.launched()).count > 1:
            raise RankError(
                f"this is {rank}, and there is no process group to gather results with: call "
                "torch.distributed.init_process_group() first, or save a file for each rank and "
                "read them with load_ranks"
            )
        return RankResults((measured if isinstance(measured, Result) else measured.result,))
    if found[0] < 0:
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
        gathered = gather(mine, group)
    for rank_number, data in enumerate(gathered):
        if "missing" in data:
            raise RankError(f"rank {rank_number} has no result: {data['missing']}")
    return RankResults([Result.from_json(data["result"]) for data in gathered])
