"""A whole run as one value, where it comes from, and its file: see docs/results-schema.md."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_torchmem.store.git import git_output
from pytest_torchmem.values import json_values
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.findings import CodeLines
from pytest_torchmem.values.json_values import OTHERWISE, WRONG, Json, JsonFields
from pytest_torchmem.values.measured import (
    STATUSES,
    BaselineChange,
    MeasuredTest,
    Rank,
    Window,
)
from pytest_torchmem.values.units import format_change

KIND: Final = "torchmem-results"
_AMOUNTS: Final = 5
FORMAT: Final = 1
"""Tests with windows, regions and pictures; changes of baselines; problems."""


@dataclass(frozen=True, slots=True)
class Story:
    """One cause, and the tests that failed for it, those that grew most first."""

    cause: CodeLines
    tests: tuple[MeasuredTest, ...]

    @property
    def sentence(self) -> str:
        """The cause in a sentence: ``net.py:19-24 made 2 tests grow: +31.9 MiB, +18.7 MiB``."""
        windows = (test.failed_windows[0] for test in self.tests)
        sizes = sorted(w.told_by.by_bytes for w in windows if w.change is Change.GROWN)[::-1]
        if len(sizes) < len(self.tests):
            return f"{self.cause} made {len(self.tests)} tests fail"
        amounts = ", ".join(map(format_change, sizes[:_AMOUNTS]))
        more = f" and {len(sizes) - _AMOUNTS} more" if sizes[_AMOUNTS:] else ""
        return f"{self.cause} made {len(sizes)} tests grow: {amounts}{more}"


@dataclass(frozen=True, slots=True)
class RunReport(JsonFields):
    """A run: what was measured, and with what.

    Attributes:
        tests: One for each test that asked to be measured, by node id.
        created: When the run ended: ISO 8601, UTC.
        commit: The commit that was checked out; ``""`` outside git.
        dirty: True when the working tree differed from the commit.
        versions: Versions of ``torchmem``, ``torch``, ``python`` and the platform.
        changes: What an update changed.
        problems: Sentences about what went wrong outside any single test.
        rank: Which process of a job it was.
    """

    tests: tuple[MeasuredTest, ...] = ()
    created: str = ""
    commit: str = ""
    dirty: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[BaselineChange, ...] = ()
    problems: tuple[str, ...] = ()
    rank: Rank = field(default_factory=Rank, metadata=OTHERWISE)

    def __add__(self, other: RunReport) -> RunReport:
        """Return what both parts of a run have: in either order it is the same."""
        tests = {test.test: test for test in (*self.tests, *other.tests)}
        changes = {(c.file, c.key): c for c in (*self.changes, *other.changes)}
        return replace(
            self,
            tests=tuple(tests[test] for test in sorted(tests)),
            changes=tuple(changes[key] for key in sorted(changes)),
            problems=tuple(sorted({*self.problems, *other.problems})),
        )

    @property
    def windows(self) -> Iterator[tuple[MeasuredTest, Window]]:
        return ((test, window) for test in self.tests for window in test.windows)

    @property
    def anything(self) -> bool:
        """False when nobody asked for a measurement, so that nothing is to be said."""
        return bool(self.tests or self.changes or self.problems)

    def ranked(self) -> list[MeasuredTest]:
        """Return the tests, those that a reader must see first.

        Equals stand by how much they grew over their baseline, then by the size of the peak.
        """

        def place(test: MeasuredTest) -> tuple[int, int, int, str]:
            before_bytes = test.body.baseline_bytes if test.body else 0
            grown_bytes = max(0, test.peak_bytes - before_bytes) if before_bytes else 0
            status = STATUSES.index(test.status)
            return status, -grown_bytes, -test.peak_bytes, test.test

        return sorted(self.tests, key=place)

    @property
    def stories(self) -> tuple[Story, ...]:
        """The causes that made more than one test fail, with the most tests first."""
        failed = [test for test in self.ranked() if test.cause and test.status == "failed"]
        # The widest lines come first: a test blames one line of a change, another all of them.
        causes = {test.cause for test in failed if test.cause}
        widest = sorted(causes, key=lambda c: (c.first - c.last, c.file, c.first))
        tests_by_cause: dict[CodeLines, list[MeasuredTest]] = {}
        for test in failed:
            cause = next(c for c in widest if test.cause and (c == test.cause or c.has(test.cause)))
            tests_by_cause.setdefault(cause, []).append(test)
        stories = [
            Story(cause, tuple(tests)) for cause, tests in tests_by_cause.items() if tests[1:]
        ]
        return tuple(sorted(stories, key=lambda story: -len(story.tests)))

    def counts(self) -> dict[str, int]:
        """Return how many tests have each status, in the order of `STATUSES`."""
        statuses = [test.status for test in self.tests]
        return {status: statuses.count(status) for status in STATUSES if status in statuses}

    @property
    def headline(self) -> str:
        """Count the tests of each status, in words."""
        counts = ", ".join(f"{count} {status}" for status, count in self.counts().items())
        return counts or "nothing was measured"

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        data = JsonFields.to_json(self)
        own = {name: data.pop(name) for name in ("created", "commit", "dirty", "versions")}
        rank = {"rank": self.rank.number, "rank_count": self.rank.count}
        return {"kind": KIND, "format": FORMAT, **own, **rank, "counts": self.counts(), **data}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> RunReport:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        return replace(json_values.read_fields(cls, data), rank=Rank.from_json(data))


def render_run(run: RunReport) -> str:
    """Return a run as the text of a results file: one line for each test, to ``grep``."""
    data = run.to_json()
    tests = ",\n".join("  " + _line(test) for test in data.pop("tests"))
    head = ",\n".join(f"{json.dumps(key)}: {_line(value)}" for key, value in data.items())
    return f'{{{head},\n"tests": [\n{tests}\n]}}\n'


def _line(value: object) -> str:
    return json.dumps(value, separators=(", ", ": "))


def read_run(path: Path) -> RunReport:
    """Return the run in a results file. Raises `ReportError` when there is none in it."""
    return parse_run(read_json(path), str(path))


def read_json(path: Path) -> Json:
    """Return the JSON in a file. Raises `ReportError` where there is none."""
    try:
        return json_values.parse_json(json_values.read_text(path))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, MemoryError) as error:
        raise ReportError(f"{path} cannot be read: {json_values.told_damage(error)}") from None


def parse_run(data: object, name: str) -> RunReport:
    """Return the run in parsed JSON. Raises `ReportError` when there is none in it."""
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise ReportError(f"{name} is no results file; `--torchmem-report=x.json` writes one")
    if "format" not in data:
        raise ReportError(f"{name} is damaged: it does not say its format")
    if data["format"] != FORMAT:
        raise ReportError(f"{name} {json_values.OTHER_VERSION}")
    try:
        return RunReport.from_json(data)
    except WRONG as error:
        raise ReportError(f"{name} is damaged: {json_values.told_damage(error)}") from None


def merged(runs: Iterable[RunReport]) -> RunReport:
    """Return several runs as one, as of the last of them; a test in several counts once, the last.

    Shards of one run and ranks of one job become one report this way. The tests of different ranks
    are told apart by their names.
    """
    every = list(runs)
    if len({run.rank for run in every}) > 1:
        every = [_named_by_rank(run) for run in every]
    tests = {test.test: test for run in every for test in run.tests}
    last = max(every, key=lambda run: run.created, default=RunReport())
    return replace(
        last,
        tests=tuple(tests[name] for name in sorted(tests)),
        changes=tuple(change for run in every for change in run.changes),
        problems=tuple(problem for run in every for problem in run.problems),
    )


def _named_by_rank(run: RunReport) -> RunReport:
    tests = (replace(test, test=f"{test.test} [{run.rank}]") for test in run.tests)
    return replace(run, tests=tuple(tests), rank=Rank())


_PACKAGES: Final = {"torchmem": "pytest-torchmem", "torch": "torch"}


def stamped(run: RunReport, folder: Path, rank: Rank) -> RunReport:
    """Return a run that ends now, of the code in ``folder``, on one rank."""
    commit = git_output(folder, "rev-parse", "HEAD").strip()
    changed = git_output(folder, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return replace(
        run,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        dirty=bool(changed),
        versions=_versions(),
        rank=rank,
    )


PLACE: Final = "{rank}"
"""What stands for the rank's number in the name of a file."""


def path_of_rank(path: str | os.PathLike[str], rank: Rank) -> Path:
    """Return the path for one rank: with its number for ``{rank}``, or at the name's end.

    Where there is one rank only, a path without ``{rank}`` stays as it is.
    """
    text = os.fspath(path)
    if PLACE in text:
        return Path(text.replace(PLACE, str(rank.number)))
    plain = Path(text)
    return plain if rank.count == 1 else plain.with_stem(f"{plain.stem}-rank{rank.number}")


def checked_out(folder: Path, files: Iterable[str]) -> frozenset[str]:
    """Return those of some files, relative to ``folder``, that git has in its index."""
    names = git_output(folder, "--literal-pathspecs", "ls-files", "-z", "--", *files)
    return frozenset(filter(None, names.split("\0")))


def _versions() -> dict[str, str]:
    versions = {}
    for name, package in _PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(package)
    versions["python"] = platform.python_version()
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions
