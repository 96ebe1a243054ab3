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
    """One option: ``--torchmem-NAME`` and its ini twin ``torchmem_NAME``."""

    name: str
    help: str
    default: str | bool
    metavar: str = ""
    several: bool = False
    """Each time it is given counts; in the ini file, each line, and in TOML a list."""

    @property
    def flag(self) -> str:
        return f"--torchmem-{self.name}"

    @property
    def ini(self) -> str:
        return "torchmem_" + self.name.replace("-", "_")

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)


def _option(spelling: str, text: str, default: str = "", several: bool = False) -> Option:
    """Return an option as it is typed: a flag is a name alone, others are ``NAME=METAVAR``."""
    name, has_value, metavar = spelling.partition("=")
    return Option(name, text, default if has_value else False, metavar, several)


SIMULATE_VARIABLE: Final = "TORCHMEM_SIMULATE"

OPTIONS: Final = (
    _option(
        "device=DEVICE",
        "device to measure where no marker names one: cpu, cuda or cuda:1 "
        "(default: cuda if it works, otherwise cpu)",
    ),
    _option(
        "simulate=GPU",
        "run on a simulated GPU, on a machine without one: H100, A100-40GB, H100x8, or "
        "capability=9.0,memory=80GiB (also in the variable TORCHMEM_SIMULATE)",
    ),
    _option(
        "world=N",
        "with --torchmem-simulate: run as rank 0 of a job of N ranks, and assume that each "
        "other rank does what this one does",
    ),
    _option(
        "tolerance=PERCENT",
        "by how much a number may exceed its baseline before the test fails (default: 2%%)",
        "2%",
    ),
    _option(
        "floor=SIZE",
        "a number less than this above its baseline never fails; a share is of the test's peak "
        "without the workspaces of libraries (default: 5%% up to 1MiB)",
        "5% up to 1MiB",
    ),
    _option(
        "update-baseline",
        "store what was measured as the new baseline: entries that are new, grown or shrunk, "
        "of tests that passed otherwise",
    ),
    _option(
        "accept=CHANGES",
        "with --torchmem-update-baseline: store only these changes, of new, grown, shrunk and "
        "unused with commas; unused removes entries that no test asks for "
        "(default: new,grown,shrunk)",
        "new,grown,shrunk",
    ),
    _option(
        "dry-run",
        "with --torchmem-update-baseline: show the change as a table and as a diff, write nothing",
    ),
    _option(
        "ask",
        "with --torchmem-update-baseline: ask on the terminal about each change before it is "
        "stored, when all tests are over",
    ),
    _option(
        "repeat=N",
        "with --torchmem-update-baseline: measure each test N times, and refuse to store what is "
        "not stable (default: 1)",
        "1",
    ),
    _option(
        "follow-renames",
        "move an unused entry to the test of the same module that is new and has equal numbers, "
        "and the baselines of a module that is gone to the new module that has its tests",
    ),
    _option(
        "baseline-from=NAME",
        "where there is no baseline for this environment, compare with that of another one, such "
        "as cpu-torch2.12; several with commas, the first that has the entry counts",
    ),
    _option(
        "baseline-all=SIZE",
        "compare every test function whose body needs at least so much, such as 1MiB, with a "
        "baseline, whether it asks for one or not; doctests and items of other plugins have to ask",
    ),
    _option(
        "fail-shrunk",
        "fail a test that needs less than its baseline by more than the tolerance and the floor",
    ),
    _option(
        "require-baseline",
        "fail a test that asks for a baseline and has none",
    ),
    _option(
        "strict",
        "fail a test that asks to be measured and cannot be, or not wholly: another thread ran "
        "torch, memory does not reconcile",
    ),
    _option(
        "known-holder=TEXT",
        "'PATTERN because REASON': limits on what is left behind do not count what a holder of "
        "that description has, such as 'models.CACHE* because the last batch is kept'; can be "
        "given several times",
        several=True,
    ),
    _option(
        "level=LEVEL",
        "how closely to look: full records every test; auto only reads the allocator's "
        "counters where a test has nothing but limits on a GPU that they answer (default: auto)",
        "auto",
    ),
    _option(
        "baseline-dir=DIR",
        "folder for the baselines of all tests, relative to the rootdir "
        "(default: a folder __torchmem__ beside each test module)",
    ),
    _option(
        "summary=KIND",
        "closing table: short (the largest tests), all, or off (only what went wrong)",
        "short",
    ),
    _option(
        "report=PATH",
        "write a report of the run to PATH: .json, .md or .html, a folder with all of them, or an "
        ".svg of one test; can be given several times",
        several=True,
    ),
    _option(
        "report-timelines=WHICH",
        "which tests have a timeline in the report: all, failed or none "
        "(default: all in a file, failed in a folder)",
    ),
)

MARKERS: Final = (
    f"{BUDGET}(total, *, activation, temporary, gradient, parameter, optimizer_state, input, "
    "autograd_detail, buffer, workspace, unknown, retained, net_retained, growth, allocated, "
    "active, reserved, device, warmup, collect): fail the test when its body needs more memory "
    "than this. Sizes are bytes, text such as '2GiB', a callable, or a dictionary from a device's "
    "model or kind to one; None lifts a limit set further out. The closest marker wins per key.",
    f"{BASELINE}(*, tolerance, floor): fail the test when its body needs more memory than the "
    "stored baseline by more than the larger of the two.",
)


def add_options(parser: pytest.Parser, config: pytest.Config) -> None:
    """Register each option and its ini twin. Raises `pytest.UsageError` for an old spelling."""
    _refuse_words_of_update(config)
    group = parser.getgroup("torchmem", "memory of PyTorch code")
    for option in OPTIONS:
        if option.is_flag:
            # Default None, not False: it tells "not given" apart, so that the ini value shows.
            group.addoption(
                option.flag, action="store_true", dest=option.ini, default=None, help=option.help
            )
        else:
            action = "append" if option.several else "store"
            group.addoption(
                option.flag, action=action, default=None, metavar=option.metavar, help=option.help
            )
        kind: Literal["bool", "linelist", "string"] = "bool" if option.is_flag else "string"
        kind = "linelist" if option.several else kind
        parser.addini(option.ini, f"the same as {option.flag}", type=kind, default=None)


def _refuse_words_of_update(config: pytest.Config) -> None:
    """Say how ``--torchmem-update-baseline=new`` is written now; argparse would not."""
    update = "--torchmem-update-baseline"
    for where, text in given(config):
        flag, equals, words = text.partition("=")
        if flag == update and equals:
            told = f"{update} takes no words; write {update} --torchmem-accept={words}"
            raise pytest.UsageError(f"{f'{flag} {where}'.rstrip()}: {told} [bad-argument]")


def given(config: pytest.Config) -> Iterator[tuple[str, str]]:
    """Yield where each argument of the run was given, and the argument; the first one wins.

    ``""`` is the command line. Arguments in the ini file are left out while pytest has not read it.
    """
    yield from (("", str(a)) for a in reversed(config.invocation_params.args))
    variable = "PYTEST_ADDOPTS"
    yield from ((f"in {variable}", a) for a in reversed(shlex.split(os.environ.get(variable, ""))))
    try:
        stored = config.getini("addopts")
    except ValueError:
        return
    yield from ((f"in addopts of {_ini_file(config)}", a) for a in reversed(stored))


def place_of(config: pytest.Config, option: Option) -> str:
    """Return an option as it was given, and where: one that was not typed may be hard to find."""
    if config.getoption(option.flag) is not None:
        found = (where for where, text in given(config) if text.partition("=")[0] == option.flag)
        return f"{option.flag} {next(found, '')}".rstrip()
    overrides = config.getoption("override_ini") or ()
    if any(text.partition("=")[0].strip() == option.ini for text in overrides):
        return f"-o {option.ini}"
    return f"{option.ini} in {_ini_file(config)}"


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
        stored: str | bool | list[str] | None = config.getini(option.ini)
    except (ValueError, pytest.UsageError):
        if not option.is_flag:
            raise
        # What pytest says of a flag may tell neither which one it is nor where.
        told = "a flag is true or false"
        if option.name == "update-baseline":
            told += "; torchmem_accept says what it stores"
        raise pytest.UsageError(f"{place_of(config, option)}: {told} [bad-argument]") from None
    return stored


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
    if asked := os.environ.get(SIMULATE_VARIABLE):
        return asked, f"{SIMULATE_VARIABLE}={asked}"
    asked = config.getini("torchmem_simulate") or ""
    return asked, f"torchmem_simulate in {_ini_file(config)}"


def anything_set(config: pytest.Config) -> bool:
    """Return whether the command line or the ini file sets any of the options.

    Raises `pytest.UsageError` for a flag in the ini file that is neither true nor false.
    """
    return any(
        config.getoption(option.flag) is not None or ini_value(config, option) is not None
        for option in OPTIONS
    )
