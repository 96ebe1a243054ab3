"""The settings of a whole run, and what its tests share.

Of a setting the command line beats the ini file, and that the default.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import pytest

from pytest_torchmem.analysis.judge.holders import KnownHolder
from pytest_torchmem.contexts import ORIGINALS, OwnModules
from pytest_torchmem.plugin.options.option_table import (
    OPTIONS,
    ini_value,
    is_overridden,
    place_of,
)
from pytest_torchmem.report.writing import FOLDER, kind_of
from pytest_torchmem.store.baselines import BaselineStore
from pytest_torchmem.store.changed_lines import KeptCode
from pytest_torchmem.store.run_reports import path_of_rank
from pytest_torchmem.values import units
from pytest_torchmem.values.baseline import Allowance, Change
from pytest_torchmem.values.errors import MarkerError, TorchmemError
from pytest_torchmem.values.json_values import shown
from pytest_torchmem.values.measured import Rank
from pytest_torchmem.values.units import MOST_RUNS, device_text

if TYPE_CHECKING:
    from pytest_torchmem.analysis.storages.explanation import OwnPass


class SummaryKind(enum.Enum):
    """The part of the closing table that is shown."""

    SHORT = "short"
    ALL = "all"
    OFF = "off"


class Mode(enum.Enum):
    """The choice to measure tests, or none."""

    ON = "on"
    OFF = "off"


class Timelines(enum.Enum):
    """The tests that have a timeline in the report."""

    ALL = "all"
    FAILED = "failed"
    NONE = "none"


_Choice = TypeVar("_Choice", bound=enum.Enum)
_Parsed = TypeVar("_Parsed")


_ANYWHERE: Final = re.compile(r"(cpu|cuda|xpu|mps|mtia)(:(0|[1-9]\d?))?")

CI_REPORT: Final = "torchmem-report"
"""The folder of the report that a required check writes."""

ACCEPTABLE: Final = (Change.NEW, Change.GROWN, Change.SHRUNK, Change.UNUSED)
"""The changes that an update can be told to accept, in the order in which they are reported."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of a run, checked; `OPTIONS` says what each is for that has its name here.

    Attributes:
        device: ``""`` lets the recorder choose.
        allowance: Tolerance and floor where a marker gives none.
        accepted: The changes that this run writes to the baselines; empty without an update.
        baseline_dir: None means beside each test module.
        reports_folder: One of the reports is a folder of files.
        timelines: Which tests have a timeline in the report; NONE without a report.
        fallbacks: Names of other environments to compare with, where this one has no entry.
        baseline_all_bytes: 0 stands for no such size.
        off: No test is measured.
        follows_renames: A renamed test takes its entries along, a moved module its files.
    """

    device: str
    allowance: Allowance
    accepted: frozenset[Change]
    require_baseline: bool
    strict: bool
    baseline_dir: Path | None
    summary: SummaryKind
    report_paths: tuple[Path, ...] = ()
    reports_folder: bool = False
    timelines: Timelines = Timelines.NONE
    dry_run: bool = False
    ask: bool = False
    repeat_count: int = 1
    follows_renames: bool = True
    fallbacks: tuple[str, ...] = ()
    fail_shrunk: bool = False
    baseline_all_bytes: int = 0
    known_holders: tuple[KnownHolder, ...] = ()
    off: bool = False

    @property
    def keeps_traces(self) -> bool:
        """True when the recording of a failed test becomes a file of the report."""
        return self.reports_folder and self.timelines is not Timelines.NONE

    @property
    def reports(self) -> bool:
        """True when what was measured goes into a report, with all that is known of it."""
        return bool(self.report_paths)


class Run:
    """The tests of one process share this: the settings, and the baselines read so far."""

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        self.settings = settings
        self.rootdir = config.rootpath
        self.originals = ORIGINALS
        self.own_modules = OwnModules()
        self.store = BaselineStore(
            config.rootpath, settings.baseline_dir, settings.fallbacks, _kept_code(config)
        )
        self._config = config
        self._environments: dict[str, Mapping[str, str]] = {}

    @cached_property
    def passes(self) -> tuple[OwnPass, ...]:
        """The category passes of users: each plugin that has any returns several."""
        user_passes = self._config.hook.pytest_torchmem_category_passes(config=self._config)
        return tuple(itertools.chain.from_iterable(user_passes))

    @cached_property
    def keeps_origins(self) -> bool:
        """True where it is wanted of each test what was alive and where it comes from.

        Else that is found out where a number is not as it was. A worker of xdist cannot know who
        listens in its controller.
        """
        settings, config = self.settings, self._config
        return bool(
            settings.reports
            or settings.accepted
            or hasattr(config, "workerinput")
            or os.environ.get("GITHUB_ACTIONS") == "true"
            or config.hook.pytest_torchmem_measured.get_hookimpls()
        )

    def say(self, text: str) -> None:
        """Write a line to the terminal while a test runs, past what captures its output.

        A worker of xdist has no terminal; there the line is with the test's result alone.
        """
        plugins = self._config.pluginmanager
        reporter, capture = (plugins.get_plugin(n) for n in ("terminalreporter", "capturemanager"))
        if reporter is None:
            return
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"torchmem: {text}", yellow=True)

    def environment(self, device: str) -> Mapping[str, str]:
        """Return what the baselines of a device are keyed by."""
        if device not in self._environments:
            from pytest_torchmem.record.environment import environment

            self._environments[device] = environment(device)
        return self._environments[device]


def _kept_code(config: pytest.Config) -> KeptCode | None:
    """Return the code that was kept in pytest's cache; None in a run that has no cache."""
    if not config.pluginmanager.hasplugin("cacheprovider"):
        return None
    return KeptCode(config.rootpath, lambda: config.cache.mkdir("torchmem"))


def read_settings(config: pytest.Config) -> Settings:
    """Return the settings of this run. Raises `pytest.UsageError` for a value without meaning."""
    values = _Values(config)
    _refuse_empty(values)
    folder = values.text("baseline-dir")
    allowance = Allowance(
        values.parsed("tolerance", units.parse_fraction), *values.parsed("floor", units.parse_floor)
    )
    off = values.parsed("torchmem", _choice(Mode)) is Mode.OFF
    ci = values.flag("ci")
    _require_effect(values)
    reports = () if off else _report_paths(values)
    kinds = values.parsed("report", lambda _: [kind_of(path) for path in reports])
    accepted = values.parsed("accept", _accepted)
    settings = Settings(
        device=values.parsed("device", checked_device_name),
        allowance=allowance,
        accepted=accepted if values.flag("update-baseline") else frozenset(),
        require_baseline=values.flag("require-baseline") or ci,
        strict=values.flag("strict") or ci,
        baseline_dir=config.rootpath / folder if folder else None,
        summary=values.parsed("summary", _choice(SummaryKind)),
        report_paths=reports,
        reports_folder=FOLDER in kinds,
        timelines=_timelines(kinds),
        dry_run=values.flag("dry-run"),
        ask=values.flag("ask"),
        repeat_count=values.parsed("repeat", _repeat_count),
        follows_renames=not ci,
        fallbacks=tuple(filter(None, values.text("baseline-from").replace(" ", "").split(","))),
        fail_shrunk=values.flag("fail-shrunk"),
        baseline_all_bytes=0 if off else values.parsed("baseline-all", _least_bytes),
        known_holders=values.parsed(
            "known-holder", lambda text: tuple(map(KnownHolder.read, _lines(text)))
        ),
        off=off,
    )
    _require_device(values, settings.device)
    return settings


def _refuse_empty(values: _Values) -> None:
    """Refuse an option that was typed with nothing after it, as a shell does with a name unset.

    It would read as the default, and a report that was asked for would be missing in silence.
    """
    for option in OPTIONS:
        typed = values.config.getoption(option.flag) if option.is_typed else None
        words = typed if isinstance(typed, list) else [typed]
        if option.default == "" and any(w is not None and not w.strip() for w in words):
            off = f", or write -o {option.ini}= for none" if option.is_setting else ""
            problem = f"it has no value; leave it out{off}"
            raise values.refused(option.name, MarkerError(problem))


def _require_effect(values: _Values) -> None:
    """Refuse options that do nothing without another one, and two that contradict each other."""
    update = "update-baseline"
    if not values.is_typed(update):
        for name in filter(values.is_typed, ("accept", "dry-run", "ask", "repeat")):
            raise _refused(f"--torchmem-{name} does nothing without --torchmem-{update}; add it")
    if values.is_typed("ask") and values.is_typed("dry-run"):
        raise _refused(
            "--torchmem-ask asks before something is stored, and --torchmem-dry-run stores "
            "nothing; leave one of them out"
        )
    if values.is_typed("ci") and values.is_typed(update):
        raise _refused(
            f"--torchmem-ci stores no baseline, and --torchmem-{update} stores them; leave one of "
            "them out"
        )
    if values.text("torchmem") == Mode.OFF.value:
        for name in filter(values.is_typed, ("ci", update)):
            raise _refused(
                f"--torchmem=off measures nothing, which --torchmem-{name} needs; leave one of "
                "them out"
            )


def _refused(text: str) -> pytest.UsageError:
    return pytest.UsageError(f"{text} [bad-argument]")


def _require_device(values: _Values, device: str) -> None:
    """Raise `pytest.UsageError` for a device that was typed and is not there.

    The one of the ini file may be on other machines: here its tests are skipped.
    """
    if is_overridden(values.config, "device") and device and not device.startswith("cpu"):
        from pytest_torchmem.record.devices import find_device

        try:
            find_device(device)
        except TorchmemError as error:
            raise values.refused("device", error) from None


class _Values:
    """The options and settings as they were given, and where, for the error about a wrong one."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._options = {option.name: option for option in OPTIONS}

    def raw(self, name: str) -> str | bool:
        option = self._options[name]
        value: str | bool | list[str] | None = None
        if option.is_typed:
            value = self.config.getoption(option.flag)
        if value is None and option.is_setting:
            value = ini_value(self.config, option)
        if value is None:
            return option.default
        return "\n".join(value) if isinstance(value, list) else value

    def text(self, name: str) -> str:
        return str(self.raw(name))

    def flag(self, name: str) -> bool:
        return bool(self.raw(name))

    def refused(self, name: str, error: TorchmemError) -> pytest.UsageError:
        """Return the error that says what is wrong with an option."""
        return pytest.UsageError(f"{place_of(self.config, self._options[name])}: {error}")

    def is_typed(self, name: str) -> bool:
        """Return whether an option was typed, for this run or in what is added to each."""
        return self.config.getoption(self._options[name].flag) is not None

    def parsed(self, name: str, parse: Callable[[str], _Parsed]) -> _Parsed:
        try:
            return parse(self.text(name))
        except TorchmemError as error:
            raise self.refused(name, error) from None


def _choice(kinds: type[_Choice]) -> Callable[[str], _Choice]:
    """Return what reads one of some words."""
    return lambda word: _one_of({kind.value: kind for kind in kinds}, word)


def _one_of(values: Mapping[str, _Parsed], word: str) -> _Parsed:
    if word not in values:
        raise MarkerError(f"{shown(word)} is not one of {', '.join(values)}")
    return values[word]


def _accepted(text: str) -> frozenset[Change]:
    changes = {change.value: change for change in ACCEPTABLE}
    return frozenset(_one_of(changes, word.strip()) for word in text.lower().split(","))


def _repeat_count(text: str) -> int:
    text = text.strip()
    if not re.fullmatch(r"\d{1,9}", text) or not units.is_run_count(int(text), 1):
        raise MarkerError(f"{shown(text)} is not a number of runs, 1 to {MOST_RUNS:,}")
    return int(text)


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of an option that can be given several times."""
    return filter(None, map(str.strip, text.splitlines()))


def _report_paths(values: _Values) -> tuple[Path, ...]:
    """Return where the reports go; that of a required check goes to a folder of the rootdir.

    Of the ranks of a job each has reports of its own.
    """
    config = values.config
    paths = [config.invocation_params.dir / _expanded(p) for p in _lines(values.text("report"))]
    if not paths and values.flag("ci"):
        paths = [config.rootpath / CI_REPORT]
    return tuple(dict.fromkeys(path_of_rank(path, Rank.launched()) for path in paths))


def _expanded(text: str) -> Path:
    """Return a path with its variables and ``~`` replaced, as a shell does."""
    path = Path(os.path.expandvars(text))
    try:
        return path.expanduser()
    except RuntimeError:  # nobody of that name has a home
        return path


def _least_bytes(text: str) -> int:
    least_bytes = units.parse_size(text) if text else 0
    if text and not least_bytes:
        raise MarkerError("a test that needs nothing has nothing to compare")
    return least_bytes


def _timelines(kinds: Sequence[str]) -> Timelines:
    """Return which tests have a timeline; only a folder alone is content with those that failed."""
    if not kinds:
        return Timelines.NONE
    return Timelines.FAILED if set(kinds) == {FOLDER} else Timelines.ALL


def checked_device_name(name: str) -> str:
    """Return a device's name. Raises `DeviceNameError` for one that cannot be measured anywhere.

    Whether it is there is another question. Names that every torch knows are not worth loading it.
    """
    name = device_text(name)
    if name and not _ANYWHERE.fullmatch(name):
        from pytest_torchmem.record.devices import measurable_device

        measurable_device(name)
    return name
