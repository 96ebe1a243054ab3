"""Pytest learns these when it starts: options, ini names, markers, and which tests need us.

Every run of pytest in which the plugin is installed pays for this module, so it imports nothing
that a run may not need.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import pytest

BUDGET: Final = "memory_budget"
BASELINE: Final = "memory_baseline"


class Option(NamedTuple):
    """One option of a run, ``--torchmem-NAME``, one setting of a project, ``torchmem_NAME`` in its
    ini file, or both: then the option is for one run what the setting is for all.
    """

    name: str
    help: str
    default: str | bool
    metavar: str = ""
    several: bool = False
    """Each time it is given counts; in the ini file, each line, and in TOML a list."""
    is_typed: bool = True
    is_setting: bool = False

    @property
    def flag(self) -> str:
        return "--torchmem" if self.name == "torchmem" else f"--torchmem-{self.name}"

    @property
    def ini(self) -> str:
        return self.flag.strip("-").replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)


def _option(spelling: str, text: str, default: str = "", several: bool = False) -> Option:
    """Return an option as it is typed: a flag is a name alone, others are ``NAME=METAVAR``."""
    name, has_value, metavar = spelling.partition("=")
    return Option(name, text, default if has_value else False, metavar, several)


def _both(spelling: str, text: str, default: str = "") -> Option:
    return _option(spelling, text, default)._replace(is_setting=True)


def _setting(spelling: str, text: str, default: str = "", several: bool = False) -> Option:
    option = _option(spelling, text, default, several)
    return option._replace(is_typed=False, is_setting=True)


SIMULATE_VARIABLE: Final = "TORCHMEM_SIMULATE"

OPTIONS: Final = (
    _option(
        "update-baseline",
        "store the measured numbers as the new baselines: entries that are new, grown or "
        "shrunk, of tests that passed otherwise",
    ),
    _option(
        "accept=CHANGES",
        "with --torchmem-update-baseline: store only these changes, separated by commas: new, "
        "grown, shrunk, unused (removes entries that no test uses) (default: new,grown,shrunk)",
        "new,grown,shrunk",
    ),
    _option(
        "dry-run",
        "with --torchmem-update-baseline: show the change as a table and as a diff, write nothing",
    ),
    _option(
        "ask",
        "with --torchmem-update-baseline: after all tests, ask on the terminal about each change",
    ),
    _option(
        "repeat=N",
        "with --torchmem-update-baseline: measure each test N times, and store only numbers "
        "that agree (default: 1)",
        "1",
    ),
    _option(
        "ci",
        "run as a required check: fail tests whose baseline is missing or that cannot be "
        "measured wholly, store nothing, and write a report to the folder torchmem-report or to "
        "--torchmem-report",
    ),
    _option(
        "report=PATH",
        "write a report of the run to PATH: .json, .md or .html, a folder with all of them, or "
        "an .svg of one test; can be given several times",
        several=True,
    ),
    _option(
        "torchmem=MODE",
        "off: run every test unmeasured, check no limit and no baseline (default: on)",
        "on",
    ),
    _both(
        "simulate=GPU",
        "run on a simulated GPU: H100, A100-40GB, H100x8, or capability=9.0,memory=80GiB; the "
        "variable TORCHMEM_SIMULATE does the same",
    ),
    _both(
        "baseline-from=NAME",
        "if a test has no baseline for this environment, compare with that of another one, such "
        "as cpu-torch2.12; of several, separated by commas, the first that has one",
    ),
    _both(
        "strict",
        "fail a test that cannot be measured, or not wholly: some of its memory was not seen",
    ),
    _both(
        "summary=KIND",
        "closing table: short (the largest tests), all, or off (only what went wrong)",
        "short",
    ),
    _setting(
        "device=DEVICE",
        "device to measure if no marker names one: cpu, cuda or cuda:1 (default: cuda if it "
        "works, otherwise cpu)",
    ),
    _setting(
        "world=N",
        "on a simulated GPU: run as rank 0 of a job of N ranks, and assume that every other "
        "rank does the same",
    ),
    _setting(
        "tolerance=PERCENT",
        "how much a number may exceed its baseline before the test fails (default: 2%%)",
        "2%",
    ),
    _setting(
        "floor=SIZE",
        "a number that exceeds its baseline by less never fails; a share is of the test's peak "
        "without the workspaces of libraries (default: 5%% up to 1MiB)",
        "5% up to 1MiB",
    ),
    _setting(
        "baseline-all=SIZE",
        "compare every test function whose body needs at least SIZE, such as 1MiB, with a "
        "baseline, with or without a marker; doctests and items of other plugins need a marker",
    ),
    _setting(
        "baseline-dir=DIR",
        "folder for the baselines of all tests, relative to the rootdir (default: a folder "
        "__torchmem__ beside each test module)",
    ),
    _setting(
        "require-baseline",
        "fail a test with memory_baseline that has no stored baseline",
    ),
    _setting(
        "fail-shrunk",
        "fail a test whose number is below its baseline by more than the tolerance and the floor",
    ),
    _setting(
        "known-holder=TEXT",
        "'PATTERN because REASON', one a line: limits on what is left behind do not count what "
        "a matching holder keeps, such as 'models.CACHE* because the last batch is kept'",
        several=True,
    ),
)

_BY_NAME: Final = {option.name: option for option in OPTIONS}

MARKERS: Final = (
    f"{BUDGET}(total, *, activation, temporary, gradient, parameter, optimizer_state, input, "
    "autograd_detail, buffer, workspace, unknown, retained, net_retained, growth, allocated, "
    "active, reserved, device, warmup, collect): fail the test when its body needs more memory "
    "than this. Sizes are bytes, text such as '2GiB', a callable, or a dictionary from a device's "
    "model or kind to one; None removes an inherited limit. The closest marker wins per key.",
    f"{BASELINE}(*, tolerance, floor): fail the test when its body needs more memory than the "
    "stored baseline by more than the larger of the two.",
)


def option_named(name: str) -> Option:
    return _BY_NAME[name]


def add_options(parser: pytest.Parser, config: pytest.Config) -> None:
    """Register the options and settings. Raises `pytest.UsageError` for one typed as it is not."""
    _refuse_misspelt(config)
    group = parser.getgroup("torchmem", "memory of PyTorch code")
    for option in OPTIONS:
        if option.is_typed and option.is_flag:
            # Default None, not False: it tells "not given" apart, so that the ini value shows.
            group.addoption(
                option.flag, action="store_true", dest=option.ini, default=None, help=option.help
            )
        elif option.is_typed:
            action = "append" if option.several else "store"
            group.addoption(
                option.flag, action=action, default=None, metavar=option.metavar, help=option.help
            )
        if option.is_setting:
            kind: Literal["bool", "linelist", "string"] = "bool" if option.is_flag else "string"
            kind = "linelist" if option.several else kind
            text = f"the same as {option.flag}" if option.is_typed else option.help
            parser.addini(option.ini, text.replace("%%", "%"), type=kind, default=None)


def _refuse_misspelt(config: pytest.Config) -> None:
    """Say how to write what argparse would refuse without a hint."""
    settings = {option.flag: option for option in OPTIONS if not option.is_typed}
    for where, text in given_options(config):
        flag, equals, words = text.partition("=")
        if flag == "--torchmem-update-baseline" and equals:
            problem = f"{flag} takes no value; write {flag} --torchmem-accept={words}"
        elif setting := settings.get(flag):
            value = "true" if setting.is_flag else words or setting.metavar
            typed_option = shlex.join(["-o", f"{setting.ini}={value}"])
            problem = (
                f"{setting.ini} is a setting: write it into the ini file, or type {typed_option}"
            )
        else:
            continue
        raise pytest.UsageError(f"{f'{flag} {where}'.rstrip()}: {problem} [bad-argument]")


def refuse_misplaced(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` for what stands in the ini file and cannot stand there.

    An update there would make every regression green, in CI as well.
    """
    # pytest only warns of a name that it does not know, and keeps what it read for itself.
    ini_values = vars(config).get("_inicfg") or vars(config).get("inicfg") or ()
    overrides = [text.partition("=")[0].strip() for text in _overrides(config)]
    options_by_ini = {option.ini: option for option in OPTIONS}
    for name in (*overrides, *ini_values):
        option = options_by_ini.get(name)
        if not name.startswith("torchmem") or (option and option.is_setting):
            continue
        where = f"-o {name}" if name in overrides else f"{name} in {_ini_file(config)}"
        if option is None:
            from pytest_torchmem.values.results import meant  # few runs need it

            near = meant(name, [option.ini for option in OPTIONS if option.is_setting])
            problem = f"there is no such setting{near}"
        else:
            problem = f"this is for one run: type {option.flag} where you start it"
        raise pytest.UsageError(f"{where}: {problem} [bad-argument]")
    for where, text in given_options(config):
        if text == "--torchmem-update-baseline" and where.startswith("in addopts"):
            problem = "type it for one run: here it would accept each change of every run"
            raise pytest.UsageError(f"{text} {where}: {problem} [bad-argument]")


def given_options(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Yield where each argument of the run was given, and the argument; the first one wins.

    ``""`` is the command line. Arguments in the ini file are left out while pytest has not read it.
    """
    yield from (("", str(a)) for a in reversed(config.invocation_params.args))
    variable = "PYTEST_ADDOPTS"
    yield from ((f"in {variable}", a) for a in reversed(shlex.split(os.environ.get(variable, ""))))
    try:
        addopts = config.getini("addopts")
    except ValueError:
        return
    yield from ((f"in addopts of {_ini_file(config)}", a) for a in reversed(addopts))


def place_of(config: pytest.Config, option: Option) -> str:
    """Return an option as it was given, and where: one that was not typed may be hard to find."""
    if option.is_typed and config.getoption(option.flag) is not None:
        sources = (
            where for where, text in given_options(config) if text.partition("=")[0] == option.flag
        )
        return f"{option.flag} {next(sources, '')}".rstrip()
    if is_overridden(config, option.name):
        return f"-o {option.ini}"
    return f"{option.ini} in {_ini_file(config)}"


def _overrides(config: pytest.Config) -> list[str]:
    return config.known_args_namespace.override_ini or []


def is_overridden(config: pytest.Config, name: str) -> bool:
    """Return whether a setting was typed for this run, with ``-o``."""
    ini = _BY_NAME[name].ini
    return any(text.partition("=")[0].strip() == ini for text in _overrides(config))


def _ini_file(config: pytest.Config) -> str:
    """Return the ini file as the user would type it where pytest was started."""
    if config.inipath is None:
        return "the ini file"
    return relative_path(config.inipath, config.invocation_params.dir)


def relative_path(path: Path, start: Path) -> str:
    """Return a path as the user would type it in ``start``."""
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:  # another drive
        return str(path)


def typed_nodeid(config: pytest.Config, nodeid: str) -> str:
    """Return a node id as the user would type it where pytest was started."""
    module, separator, rest = nodeid.partition("::")
    return relative_path(config.rootpath / module, config.invocation_params.dir) + separator + rest


def ini_value(config: pytest.Config, option: Option) -> str | bool | list[str] | None:
    """Return what the ini file says; None if nothing. Raises `pytest.UsageError`."""
    try:
        value: str | bool | list[str] | None = config.getini(option.ini)
    except (ValueError, pytest.UsageError):
        if not option.is_flag:
            raise
        # What pytest says of a flag may tell neither which one it is nor where.
        expected = "a flag is true or false"
        raise pytest.UsageError(f"{place_of(config, option)}: {expected} [bad-argument]") from None
    return value


def asks(item: pytest.Item) -> bool:
    """Return whether a test asks to be measured, as far as can be seen before it runs."""
    return uses_fixture(item) or any(map(item.get_closest_marker, (BUDGET, BASELINE)))


def uses_fixture(item: pytest.Item) -> bool:
    return "torchmem" in getattr(item, "fixturenames", ())


def simulation_asked(config: pytest.Config) -> tuple[str, str]:
    """Return the GPU that this run is to see as it was written, ``""`` for what is there; and where
    that was: an option, a variable or the ini file.

    It is asked before any conftest is loaded, and long before the settings are read.
    """
    if typed := config.known_args_namespace.torchmem_simulate:
        return typed, f"--torchmem-simulate={typed}"
    if gpu := os.environ.get(SIMULATE_VARIABLE):
        return gpu, f"{SIMULATE_VARIABLE}={gpu}"
    gpu = config.getini("torchmem_simulate") or ""
    return gpu, f"torchmem_simulate in {_ini_file(config)}"


def anything_set(config: pytest.Config) -> bool:
    """Return whether the command line or the ini file sets any of the options.

    Raises `pytest.UsageError` for a flag in the ini file that is neither true nor false.
    """
    typed = (option for option in OPTIONS if option.is_typed)
    settings = (option for option in OPTIONS if option.is_setting)
    return any(config.getoption(option.flag) is not None for option in typed) or any(
        ini_value(config, option) is not None for option in settings
    )
