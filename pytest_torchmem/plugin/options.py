"""What a user can set for a whole run: command line beats ini file beats default."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import pytest

from pytest_torchmem.analysis.baseline import Allowance, Change
from pytest_torchmem.errors import ReportError, SizeError
from pytest_torchmem.plugin.registration import CHANGE_WORDS, OPTIONS, Option, given
from pytest_torchmem.ranks import environment_rank, path_of_rank
from pytest_torchmem.report.files import FOLDER, kind_of
from pytest_torchmem.units import parse_fraction, parse_size


class SummaryKind(enum.Enum):
    """How much of the closing table is shown."""

    SHORT = "short"
    ALL = "all"
    OFF = "off"


class LevelChoice(enum.Enum):
    """How the level is chosen at which a body is looked at."""

    AUTO = "auto"
    FULL = "full"


class Timelines(enum.Enum):
    """Which tests have a timeline in the report."""

    ALL = "all"
    FAILED = "failed"
    NONE = "none"


_Choice = TypeVar("_Choice", bound=enum.Enum)
_Number = TypeVar("_Number", int, float)


WORDS: Final = tuple(Change(word) for word in CHANGE_WORDS)
"""The changes that an update can be told to accept, in the order in which they are reported."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run, checked.

    Attributes:
        device: Where to measure unless a marker says otherwise; ``""`` lets the recorder choose.
        allowance: Tolerance and floor where a marker gives none.
        accepted: The changes that this run writes to the baselines; empty without an update.
        require_baseline: A missing baseline fails its test.
        strict: A measurement that was asked for and not possible, or not whole, fails its test.
        baseline_dir: One folder for all baselines; None means beside each test module.
        summary: How much of the closing table is shown.
        report: Where a report goes; None without one.
        report_is_folder: The report is a folder of files.
        timelines: Which tests have a timeline in the report; NONE without a report.
        dry_run: An update shows what it would change, and writes nothing.
        repeat_count: How often an update measures each test.
        follow_renames: An unused entry moves to a new one of equal numbers.
        fallbacks: Names of other environments to compare with, where this one has no entry.
        fail_shrunk: A test that needs less than its baseline fails.
        level: Whether a body may be looked at through the allocator's counters alone.
    """

    device: str
    allowance: Allowance
    accepted: frozenset[Change]
    require_baseline: bool
    strict: bool
    baseline_dir: Path | None
    summary: SummaryKind
    report: Path | None = None
    report_is_folder: bool = False
    timelines: Timelines = Timelines.NONE
    dry_run: bool = False
    repeat_count: int = 1
    follow_renames: bool = False
    fallbacks: tuple[str, ...] = ()
    fail_shrunk: bool = False
    level: LevelChoice = LevelChoice.AUTO

    @property
    def keeps_traces(self) -> bool:
        """True when the recording of a failed test becomes a file of the report."""
        return self.report_is_folder and self.timelines is not Timelines.NONE

    @property
    def reports(self) -> bool:
        """True when what was measured goes into a report, with all that is known of it."""
        return self.report is not None


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of this run. Raises `pytest.UsageError` for a value without meaning."""
    values = {option.name: _value(config, option) for option in OPTIONS}
    folder = str(values["baseline-dir"])
    allowance = Allowance(
        _parsed("tolerance", parse_fraction, values), _parsed("floor", parse_size, values)
    )
    summary = _choice(SummaryKind, "summary", values["summary"])
    level = _choice(LevelChoice, "level", values["level"])
    accepted = _accepted(config, values["update-baseline"])
    if values["dry-run"] and not accepted and not values["follow-renames"]:
        raise pytest.UsageError(
            "--torchmem-dry-run shows what --torchmem-update-baseline would change; give that, too "
            "[bad-argument]"
        )
    report = _report_path(config, str(values["report"]))
    folder_asked = report is not None and _report_kind(report) == FOLDER
    return Settings(
        device=str(values["device"]),
        allowance=allowance,
        accepted=accepted,
        require_baseline=bool(values["require-baseline"]),
        strict=bool(values["strict"]),
        level=level,
        baseline_dir=config.rootpath / folder if folder else None,
        summary=summary,
        report=report,
        report_is_folder=folder_asked,
        timelines=_timelines(str(values["report-timelines"]), report, folder_asked),
        dry_run=bool(values["dry-run"]),
        repeat_count=_repeat_count(str(values["repeat"])),
        follow_renames=bool(values["follow-renames"]),
        fallbacks=tuple(filter(None, str(values["baseline-from"]).replace(" ", "").split(","))),
        fail_shrunk=bool(values["fail-shrunk"]),
    )


def _parsed(
    name: str, parse: Callable[[object], _Number], values: Mapping[str, str | bool]
) -> _Number:
    try:
        return parse(values[name])
    except SizeError as error:
        raise pytest.UsageError(f"--torchmem-{name}: {error}") from None


def _choice(kinds: type[_Choice], name: str, given: str | bool) -> _Choice:
    try:
        return kinds(given)
    except ValueError:
        words = ", ".join(kind.value for kind in kinds)
        text = f"--torchmem-{name}: {given!r} is not one of {words} [bad-argument]"
        raise pytest.UsageError(text) from None


def _accepted(config: pytest.Config, value: str | bool) -> frozenset[Change]:
    """Return the changes that an update accepts; the bare flag accepts all that delete nothing."""
    text = str(value).strip().lower()
    empty = config.getoption("--torchmem-update-baseline") == ""
    if not empty and text in ("", "0", "false", "no", "off"):
        return frozenset()
    if text in ("1", "true", "yes", "on"):
        return frozenset({Change.NEW, Change.GROWN, Change.SHRUNK})
    words = [word.strip() for word in text.split(",")]
    known = {change.value: change for change in WORDS}
    for word in words:
        if word not in known:
            raise pytest.UsageError(
                f"{_place(config, 'update-baseline')}: {word!r} is not one of {', '.join(known)} "
                "[bad-argument]"
            )
    return frozenset(known[word] for word in words)


def _place(config: pytest.Config, name: str) -> str:
    """Return an option as it was given, and where: one that was not typed may be hard to find."""
    option = next(option for option in OPTIONS if option.name == name)
    if config.getoption(option.flag) is None:
        return f"{option.ini} in {config.inipath}"
    where = (where for where, text in given(config) if text.startswith(f"{option.flag}="))
    return f"{option.flag} {next(where, '')}".rstrip()


def _repeat_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise pytest.UsageError(
            f"--torchmem-repeat: {text!r} is not a number of runs, 1 or more [bad-argument]"
        )
    return int(text)


def _report_path(config: pytest.Config, text: str) -> Path | None:
    """Return where the report goes: a typed path starts here, a configured one at the rootdir.

    Of the ranks of a job each has a report of its own.
    """
    if not text:
        return None
    typed = config.getoption("--torchmem-report") is not None
    start = config.invocation_params.dir if typed else config.rootpath
    path = start / Path(os.path.expandvars(text)).expanduser()
    return path_of_rank(path, environment_rank())


def _report_kind(path: Path) -> str:
    try:
        return kind_of(path)
    except ReportError as error:
        raise pytest.UsageError(f"--torchmem-report: {error}") from None


def _timelines(text: str, report: Path | None, folder: bool) -> Timelines:
    try:
        asked = Timelines(text) if text else (Timelines.FAILED if folder else Timelines.ALL)
    except ValueError:
        words = ", ".join(kind.value for kind in Timelines)
        raise pytest.UsageError(
            f"--torchmem-report-timelines: {text!r} is not one of {words} [bad-argument]"
        ) from None
    return asked if report else Timelines.NONE


def _value(config: pytest.Config, option: Option) -> str | bool:
    given: str | bool | None = config.getoption(option.flag)
    if given is not None:
        return given
    stored: str | bool | None = config.getini(option.ini)
    return option.default if stored is None else stored
