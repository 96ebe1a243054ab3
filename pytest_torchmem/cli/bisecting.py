"""The commit that moved a test's number: ``git bisect run`` in a worktree of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.judge.verdict import judge_baseline
from pytest_torchmem.store.acceptances import read_acceptances
from pytest_torchmem.store.git import run_git
from pytest_torchmem.store.run_reports import read_run
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Reference
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_change, format_share, format_size, one_line

_GOOD, _BAD, _SKIP, _STOP = 0, 1, 125, 255
"""The answers that ``git bisect run`` asks for."""
_SHORT: Final = 9
_STEP: Final = (
    "from pathlib import Path; from pytest_torchmem.cli.bisecting import judge_commit; "
    "raise SystemExit(judge_commit(Path({!r}), Path({!r}), {!r}, {!r}))"
)


@dataclass(frozen=True, slots=True)
class Moved:
    """The commit that moved a test's peak.

    Attributes:
        commit: Its whole name.
        headline: Its day, author and subject.
        before: What was measured at the commit before it.
        after: What was measured at it.
    """

    test: str
    commit: str
    headline: str
    before: Result
    after: Result

    def lines(self) -> Iterator[str]:
        """Yield what there is to say."""
        before, after = self.before.peak.total, self.after.peak.total
        by = after - before
        share = format_share(by, before)
        change_text = f"{format_size(before)} -> {format_size(after)}, {format_change(by)}"
        yield f"{one_line(self.test)}: {change_text}{f' ({share})' if share else ''}"
        yield f"since {self.commit[:_SHORT]}  {one_line(self.headline)}"
        stored = Reference.of(BaselineEntry.of(self.before))
        for finding in judge_baseline(self.after, stored, Allowance(0, 0)).findings[:1]:
            yield finding.sentence


def bisect(test: str, good: str = "", bad: str = "HEAD", folder: Path = Path()) -> Moved:
    """Return the commit that moved a test's peak between two others.

    ``good`` is by default the commit that accepted the test's baseline last. Each commit is
    measured in a worktree of its own, so that nothing in the folder changes; what is not committed
    is not looked at. Raises `ReportError` where the number is the same at both, where the test
    cannot be measured at one of them, and where git does not know a commit.
    """
    good = _commit(folder, good or _accepted(test, folder))
    bad = _commit(folder, bad)
    inner = run_git(folder, "rev-parse", "--show-prefix").strip()
    with (
        _worktree(folder, bad) as tree,
        tempfile.TemporaryDirectory(prefix="torchmem-") as results_folder,
    ):
        place, results = tree / inner, Path(results_folder)
        last = _measured(place, test, results, bad)
        run_git(tree, "checkout", "--quiet", "--detach", good)
        first = _measured(place, test, results, good)
        sizes = [format_size(result.peak.total) for result in (first, last)]
        if first.peak.total == last.peak.total:
            raise ReportError(
                f"{test} has a peak of {sizes[0]} at both {good[:_SHORT]} and {bad[:_SHORT]}: no "
                "commit between them moved it; --good and --bad name others"
            )
        run_git(tree, "bisect", "start", bad, good)
        step = _STEP.format(str(place), str(results), test, [good, bad])
        commit = _first_bad(tree, step, f"{test} went from {sizes[0]} to {sizes[1]}")
        headline = run_git(tree, "show", "--no-patch", "--format=%as  %an  %s", commit).strip()
        found = []
        for name in (run_git(tree, "rev-parse", f"{commit}^").strip(), commit):
            run_git(tree, "checkout", "--quiet", "--detach", name)
            found.append(_measured(place, test, results, name))
        return Moved(test, commit, headline, *found)


def _first_bad(tree: Path, step: str, message: str) -> str:
    """Let git find the first bad commit. Raises `ReportError` where several may be."""
    try:
        run_git(tree, "bisect", "run", sys.executable, "-c", step)
    except ReportError:
        possible = re.findall(r"first bad commit: \[(\w+)\]", run_git(tree, "bisect", "log"))
        if not possible:
            raise
        commits = ", ".join(name[:_SHORT] for name in possible)
        raise ReportError(
            f"{message} in one of {commits}: at some of them it gives no number"
        ) from None
    return run_git(tree, "rev-parse", "refs/bisect/bad").strip()


def judge_commit(place: Path, results: Path, test: str, ends: list[str]) -> int:
    """Measure the commit that is checked out here, and return what ``git bisect run`` asks for."""
    name = run_git(Path(), "rev-parse", "HEAD").strip()
    good, bad = (_stored_result(test, results, end) for end in ends)
    try:
        result = _measured(place, test, results, name)
    except (OSError, ReportError):  # also where the folder was not there yet
        return _SKIP
    if good is None or bad is None:
        return _STOP
    to_good, to_bad = (abs(result.peak.total - end.peak.total) for end in (good, bad))
    return _GOOD if to_good <= to_bad else _BAD


def _accepted(test: str, folder: Path) -> str:
    commits = [item.commit for item in read_acceptances(folder) if item.test == test]
    if not commits:
        raise ReportError(
            f"no commit has accepted a baseline of {test}; name one that was good with --good"
        )
    return commits[-1]


def _commit(folder: Path, name: str) -> str:
    run_git(folder, "rev-parse", "--git-dir")  # without a repository that is what is said
    try:
        return run_git(folder, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except ReportError:
        raise ReportError(f"there is no commit {name!r} in {folder}") from None


@contextmanager
def _worktree(folder: Path, commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchmem-") as outer:
        tree = Path(outer, "tree")
        run_git(folder, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            run_git(folder, "worktree", "remove", "--force", str(tree))


def _measured(place: Path, test: str, results: Path, name: str) -> Result:
    """Run a test where a commit is checked out. Raises `ReportError` where it gives no number."""
    if result := _stored_result(test, results, name):
        return result
    file = results / f"{name}.json"
    sources = [str(path) for path in (place, place / "src") if path.is_dir()]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    report = f"--torchmem-report={file}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", test, "-q", "-p", "no:cacheprovider", report],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    result = _stored_result(test, results, name)
    if result is None:
        lines = [line for text in (done.stdout, done.stderr) for line in text.strip().splitlines()]
        # What pytest says of a name that it does not find, or the last that it says.
        message = next((line for line in lines if line.startswith("ERROR: ")), "".join(lines[-1:]))
        raise ReportError(f"{test} gives no number at {name[:_SHORT]}: {message}")
    return result


def _stored_result(test: str, results: Path, name: str) -> Result | None:
    file = results / f"{name}.json"
    tests = read_run(file).tests if file.exists() else ()
    # Of one test alone the id may begin with another folder than where it was asked for.
    for found in tests:
        if (found.test == test or len(tests) == 1) and found.windows and not found.raised:
            return found.windows[0].result
    return None
