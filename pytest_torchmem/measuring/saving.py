"""Results of scripts and jobs: in files, as a report of a run of tests, or between the ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

from pytest_torchmem.measuring.profile import Profile
from pytest_torchmem.store import run_reports
from pytest_torchmem.store.baselines import entry_key, portable
from pytest_torchmem.store.files import write_report
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result

Drawn: TypeAlias = tuple[Result, Picture | None]

UNNAMED: Final = "measured"
"""What a measurement without a name is called in messages and files."""


def save(path: str | os.PathLike[str], measured: Profile | Result | Iterable[Result]) -> Path:
    """Write results or a recording to a file that `load` and the command ``torchmem`` read.

    Returns the file. Results of one name are numbered from the second on; for ``{rank}`` in the
    path and for several ranks see ``save`` of a measured block. A `Profile` is written whole: the
    file answers the same questions without torch and without a GPU. Raises `ReportError`, and
    `TraceError` for a recording.
    """
    if isinstance(measured, Profile):
        measured.events.tree.trace.save(path)
        return Path(path)
    results = [measured] if isinstance(measured, Result) else list(measured)
    name_counts: Counter[str] = Counter()
    tests: list[tuple[str, list[Drawn]]] = []
    for result in results:
        if not isinstance(result, Result):
            raise MarkerError(f"save writes results and profiles, got {result!r}")
        name = result.name or UNNAMED
        name_counts[name] += 1
        numbered = f"{name} ({name_counts[name]})" if name_counts[name] > 1 else name
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
        rows = (
            Window(portable(result, folder), key=entry_key(name, result.name), picture=picture)
            for result, picture in windows
        )
        reports.append(MeasuredTest(name, "", environment(windows[0][0].device), tuple(rows)))
    run = run_reports.stamped(RunReport(tuple(reports)), folder, rank)
    write_report(place, run_reports.render_run(run))
    return place


def results_by_name(run: RunReport) -> dict[str, Result]:
    """Return the results of a run; regions are called ``train step::forward``."""
    results = {}
    for test in run.tests:
        for window in test.windows:
            name, region = test.test, window.result.name
            key = f"{name}::{region}" if region else name
            results[key] = replace(window.result, name=region or name)
    return results
