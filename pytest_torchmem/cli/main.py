"""The command line, and what its exit codes mean."""

from __future__ import annotations

import argparse
import contextlib
import enum
import io
import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from pytest_torchmem import __version__
from pytest_torchmem.cli import bisecting, calibrating, diff, show
from pytest_torchmem.cli.inputs import converted, read_measurements, read_recordings, read_reports
from pytest_torchmem.report.history import history_page, history_plots, history_table
from pytest_torchmem.report.text.tables import ANY_WIDTH, log_line
from pytest_torchmem.report.writing import write_run
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import notice, parse_world, variables
from pytest_torchmem.simulate.torch_builds import fetch, torch_build
from pytest_torchmem.store.acceptances import commits_address, read_acceptances
from pytest_torchmem.store.file_kinds import Recording, recording_kind
from pytest_torchmem.store.files import write_report
from pytest_torchmem.store.run_reports import RunReport, merged
from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.errors import (
    ReportError,
    RequestError,
    SimulationError,
    SizeError,
    TorchmemError,
)
from pytest_torchmem.values.json_values import WRONG, told_damage
from pytest_torchmem.values.units import format_size, one_line, parse_floor, parse_fraction


class Exit(enum.IntEnum):
    """The exit codes of ``torchmem``."""

    OK = 0
    GROWN = DOES_NOT_FIT = DIFFERS = 1
    BAD_INPUT = 2
    FAULT = 3


_FLOOR: Final = "5% up to 1MiB"
_COUNTERS: Final = ("reserved", "active", "allocated", "requested")
_DAMAGE: Final = (*WRONG, ArithmeticError, LookupError, MemoryError)
_EPILOG: Final = "exit codes: 0 printed or written, 2 bad input"
_DIFF_EPILOG: Final = "exit codes: 0 nothing grew, 1 something grew, 2 bad input"
_FITS_EPILOG: Final = "exit codes: 0 all fit, 1 one does not, 2 bad input"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a console may lack a character
    options = _parser().parse_args(arguments)
    try:
        code: Exit = options.run(options)
        sys.stdout.flush()
        return int(code)
    except TorchmemError as error:
        print(f"torchmem: {one_line(str(error))}", file=sys.stderr)
    except _DAMAGE as error:
        # Every number and index in a file that somebody sent may be wrong.
        print(f"torchmem: the input is damaged: {one_line(told_damage(error))}", file=sys.stderr)
    except BrokenPipeError:  # the reader has seen enough, as in `torchmem show x | head`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        return int(Exit.OK)
    except OSError as error:  # a name that is no name here: too long, with a NUL
        about = f"{error.filename}: " if error.filename else ""
        print(f"torchmem: {one_line(about)}{error.strerror or error}", file=sys.stderr)
    except Exception:
        # Python's own code for this would say that something grew.
        traceback.print_exc()
        print("torchmem: this is a fault of torchmem; please report it", file=sys.stderr)
        return int(Exit.FAULT)
    return int(Exit.BAD_INPUT)


def _say(text: str, coloured: bool = False) -> None:
    """Print what was asked for, and no character of a file that tells a terminal what to do.

    Text that has colours is made of names without such characters.
    """
    print(text if coloured else "\n".join(map(log_line, text.split("\n"))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchmem",
        description="Read results, baselines and recordings of memory.",
        epilog="exit codes: those of the command, 2 bad input, 3 a fault of torchmem",
    )
    parser.add_argument("--version", action="version", version=f"torchmem {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    first = (_add_diff, _add_show, _add_explain, _add_history, _add_bisect)
    for add in (*first, _add_report, _add_fits, _add_reserved, _add_simulate, _add_calibrate):
        add(commands)
    return parser


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "diff",
        help="what changed from A to B",
        description="Compare two results files, baseline files, or folders of either.",
        epilog=_DIFF_EPILOG,
    )
    add = command.add_argument
    add("before", type=Path, metavar="A", help="what was before: a file or a folder")
    add("after", type=Path, metavar="B", help="what came after: a file or a folder")
    add("--tolerance", default="2%", help="how much a number may grow (default: 2%%)")
    add("--floor", default=_FLOOR, help="a smaller growth is none (default: 5%% up to 1MiB)")
    add("--format", choices=("text", "json"), default="text", help="default: text")
    add("--all", action="store_true", help="also show what is the same")
    add("-o", "--output", type=Path, help="also write a page (.html) with both timelines")
    command.set_defaults(run=_diff)


def _add_show(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("show", help="what a file holds, as text", epilog=_EPILOG)
    add = command.add_argument
    add("file", type=Path, metavar="FILE", help="results, a baseline, a recording or a snapshot")
    add("test", nargs="?", default="", metavar="TEST", help="a part of names: these in full")
    operators = "show what ran at the peak, and operators with their memory and time"
    add("--operators", action="store_true", help=operators)
    _add_device_of_snapshot(command)
    command.set_defaults(run=_show)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "explain",
        help="why each storage of a trace has its category",
        description="Print a line for each storage of a stored trace: when it was born and died, "
        "its bytes and category, which category pass decided that and by what evidence, and the "
        "operator, module and line that allocated it.",
        epilog="exit codes: 0 printed, 2 bad input",
    )
    add = command.add_argument
    add("trace", type=Path, metavar="TRACE", help="a recording of save_trace")
    add("--category", choices=[c.value for c in Category], help="only storages of this category")
    add("--module", default="", help="only storages of modules with this in their path")
    add("--at", metavar="TIME", help="only what is alive then: peak, or milliseconds")
    own_pass = "your own category pass, such as conftest.py:kv_cache; this runs the file"
    form = "FILE:FUNCTION"
    add("--pass", metavar=form, action="append", default=[], dest="passes", help=own_pass)
    add("--device", default="", help="default: the one that was recorded")
    add("--format", choices=("text", "json"), default="text", help="default: text")
    command.set_defaults(run=_explain)


def _add_history(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "history",
        help="who accepted which number when",
        description="Read the history of the committed baselines from git: a table of the latest "
        "changes, or a plot for each test whose name contains TEST.",
        epilog=_EPILOG,
    )
    add = command.add_argument
    add("test", nargs="?", default="", metavar="TEST", help="a part of names: draw these tests")
    add("-C", "--folder", type=Path, default=Path(), help="the project (default: this folder)")
    add("-o", "--output", type=Path, help="write a page (.html) with all plots")
    command.set_defaults(run=_history)


def _history(options: argparse.Namespace) -> Exit:
    history = tuple(i for i in read_acceptances(options.folder) if options.test in i.test)
    if not history:
        raise ReportError(f"no test in the history has {options.test!r} in its name")
    if options.output:
        if options.output.suffix != ".html":
            raise ReportError(f"{options.output}: a history is written as .html")
        write_report(options.output, history_page(history, commits_address(options.folder)))
        print(f"history written: {options.output}")
        return Exit.OK
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    _say("\n".join(history_plots(history, plain) if options.test else history_table(history)))
    return Exit.OK


def _add_bisect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "bisect",
        help="which commit moved a test's peak",
        description="Find the commit that moved a test's peak: git bisect, in a worktree of its "
        "own, runs the test alone and measures it. Uncommitted changes are ignored.",
        epilog="exit codes: 0 found, 2 bad input, or the peak did not move",
    )
    add = command.add_argument
    add("test", metavar="TEST", help="the test's node id")
    add("--good", default="", help="default: the commit that last accepted the test's baseline")
    add("--bad", default="HEAD", help="default: HEAD")
    add("-C", "--folder", type=Path, default=Path(), help="the project (default: this folder)")
    command.set_defaults(run=_bisect)


def _bisect(options: argparse.Namespace) -> Exit:
    bisection = bisecting.bisect(options.test, options.good, options.bad, options.folder)
    _say("\n".join(bisection.lines()))
    return Exit.OK


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "report",
        help="turn results or a trace into a report",
        description="Turn results files, such as those of the shards of one run, into one report. "
        "The output's ending decides: .json, .md, .html, .svg (one test), none for a "
        "folder; for a stored trace also .perfetto.json and .pickle (for memory_viz).",
        epilog=_EPILOG,
    )
    add = command.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="results, or one recording")
    add(
        *("-o", "--output"),
        type=Path,
        action="append",
        required=True,
        help="what to write; several times for several reports",
    )
    add("--test", default="", help="only the test of this id, or those with this in it")
    _add_device_of_snapshot(command)
    command.set_defaults(run=_report)


def _add_fits(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "fits",
        help="whether traces fit on a GPU",
        description="Run torch's CUDA caching allocator, simulated, over stored traces of any "
        "device, and say whether they fit into so much memory.",
        epilog=_FITS_EPILOG,
    )
    command.add_argument(
        "traces", type=Path, nargs="+", metavar="TRACE", help="recordings or snapshots"
    )
    command.add_argument(
        "--capacity", required=True, metavar="SIZE", help="the memory of the allocator: 24GiB"
    )
    _add_gpu_options(command)
    command.set_defaults(run=_fits)


def _add_reserved(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "reserved",
        help="what a GPU would reserve for a trace",
        description="Run torch's CUDA caching allocator, simulated, over a stored trace of any "
        "device, and print what its counters would peak at.",
        epilog="exit codes: 0 printed, 2 bad input",
    )
    command.add_argument("trace", type=Path, metavar="TRACE", help="a recording or a snapshot")
    _add_gpu_options(command)
    command.set_defaults(run=_reserved)


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "simulate",
        help="run a command on a simulated GPU",
        description="Run a command with torch's own CUDA build on a simulated GPU: torchmem "
        "simulate --gpu H100 -- python train.py. Memory is what that GPU's would be; kernels do "
        "not run.",
        epilog="exit codes: those of the command, 2 when it could not be started",
    )
    add = command.add_argument
    add("--gpu", default="H100", help="default: H100; also H100x8, L4, T4, ...")
    add(
        "--world",
        default="",
        metavar="N",
        help="run one rank of N, and assume that every other rank does the same",
    )
    add("--rank", default="", metavar="R", help="the rank to run; default: 0")
    add("--torch", default="", metavar="RELEASE", help="default: as installed")
    add("--fetch", action="store_true", help="fetch torch's CUDA build if it is missing")
    add(
        "--patience", type=float, default=900, metavar="S", help="seconds for a fetch; default: 900"
    )
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    command.set_defaults(run=_simulate)


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "calibrate",
        help="compare a GPU with its simulation",
        description="Run twelve small programs, or a command (torchmem calibrate -- python "
        "train.py), on the GPU that is here and on a simulated one, and print which allocations "
        "differ, by operator and line. FILE is what an earlier run wrote; it needs no GPU.",
        epilog="exit codes: 0 all are equal, 1 some are not, 2 bad input",
    )
    add = command.add_argument
    add("--out", type=Path, metavar="FILE", help="also write the result, to attach to an issue")
    add("--gpu", default="", help="default: what the real one says of itself")
    add(
        "what",
        nargs=argparse.REMAINDER,
        metavar="FILE | -- COMMAND",
        help="a file of --out, or what to run",
    )
    command.set_defaults(run=_calibrate)


def _add_device_of_snapshot(command: argparse.ArgumentParser) -> None:
    command.add_argument("--device", default="", help="a device of a snapshot (default: each)")


def _add_gpu_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add(
        "--settings",
        default="",
        help="written as in PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True",
    )
    add("--device", default="", help="default: the one that was recorded, and each of a snapshot")
    add("--format", choices=("text", "json"), default="text", help="default: text")


def _diff(options: argparse.Namespace) -> Exit:
    option = "--tolerance"
    try:
        tolerance = parse_fraction(options.tolerance)
        option = "--floor"
        floor = parse_floor(options.floor)
    except SizeError as error:
        raise SizeError(f"{option}: {error.sentence}") from None
    if options.output and options.output.suffix != ".html":
        raise ReportError(f"{options.output}: differences are written as a page; end it in .html")
    allowance = Allowance(tolerance, *floor)
    before, after = read_measurements(options.before), read_measurements(options.after)
    comparison = diff.find_diff(before, after, allowance)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    as_json = options.format == "json"
    _say(
        diff.diff_json(comparison) if as_json else diff.diff_text(comparison, options.all, colour),
        colour,
    )
    if options.output:
        write_report(options.output, diff.as_page(comparison))
        # Not among the differences, which a program may read.
        print(f"report written: {options.output}", file=sys.stderr)
    return Exit.GROWN if comparison.grown else Exit.OK


def _show(options: argparse.Namespace) -> Exit:
    if options.operators:
        _say(show.operators(options.file, options.test))
        return Exit.OK
    measurements = read_measurements(options.file, unjudged=True, device=options.device)
    if not options.test:
        _say(show.table(measurements))
        return Exit.OK
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    columns = max(20, shutil.get_terminal_size().columns)
    room = columns if sys.stdout.isatty() or columns < 80 else ANY_WIDTH
    text = show.details(measurements, options.test, min(100, columns), plain, room)
    if not text:
        raise ReportError(f"no test in {options.file} has {options.test!r} in its name")
    _say(text)
    return Exit.OK


def _explain(options: argparse.Namespace) -> Exit:
    explained = show.explanations(
        options.trace, options.device, options.category, options.module, options.at, options.passes
    )
    _say(
        json.dumps([one.to_json() for one in explained], indent=1)
        if options.format == "json"
        else show.explanations_text(explained)
    )
    return Exit.OK


def _report(options: argparse.Namespace) -> Exit:
    outputs: list[Path] = []
    is_trace = len(options.files) == 1 and recording_kind(options.files[0]) is Recording.TRACE
    for output in options.output:
        if is_trace and (content := converted(options.files[0], output)) is not None:
            write_report(output, content)
            print(f"report written: {output}")
        else:
            outputs.append(output)
    if not outputs:
        return Exit.OK
    runs = [run for path in options.files for run in read_reports(path, options.device)]
    run = merged(runs)
    if again := sum(len(one.tests) for one in runs) - len(run.tests):
        print(
            f"torchmem: results left out because a later file has the same test: {again}",
            file=sys.stderr,
        )
    run = _only(run, options.test)
    for output in outputs:
        print(f"report written: {write_run(run, output)}")
    return Exit.OK


def _fits(options: argparse.Namespace) -> Exit:
    """Answer for each device of each recording: those that do not fit come first."""
    answers = []
    for path in options.traces:
        fits = []
        for device, recording in read_recordings(path, options.device):
            with _unanswered_named(path, device):
                fits.append((path, device, recording.fits(options.capacity, options.settings)))
        answers += sorted(fits, key=lambda row: (bool(row[2]), -row[2].peak_reserved_bytes))
    rows = [
        {
            "trace": str(path),
            "device": device,
            "estimated": True,
            "fits": bool(fit),
            "capacity_bytes": fit.capacity_bytes,
            "reserved_bytes": fit.peak_reserved_bytes,
            "fragmentation": round(fit.fragmentation, 6),
            "retries": fit.retry_count,
            "sentence": str(fit),
        }
        for path, device, fit in answers
    ]
    several = len(options.traces) > 1, len(answers) > len(options.traces)
    lines = []
    for path, device, fit in answers:
        names = (
            name for name, is_shown in zip((str(path), device), several, strict=True) if is_shown
        )
        lines.append(": ".join([*names, str(fit)]))
    _say(json.dumps(rows, indent=1) if options.format == "json" else "\n".join(lines))
    return Exit.OK if all(fit for *_, fit in answers) else Exit.DOES_NOT_FIT


@contextlib.contextmanager
def _unanswered_named(path: Path, device: str) -> Iterator[None]:
    """Say of which file and device a history contradicts itself."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{path}: {device}: {error.sentence}") from None


def _reserved(options: argparse.Namespace) -> Exit:
    """Print the counters of a simulated allocator, each at its own peak."""
    simulations = []
    for device, recording in read_recordings(options.trace, options.device):
        with _unanswered_named(options.trace, device):
            simulations.append((device, recording.simulate(options.settings)))
    simulations.sort(key=lambda row: -row[1].peak.reserved)
    if options.format == "json":
        data = [
            {
                "device": device,
                "estimated": True,
                **{f"{name}_bytes": getattr(run.peak, name) for name in _COUNTERS},
                "fragmentation": round(run.fragmentation, 6),
                "device_allocations": run.device_alloc_count,
            }
            for device, run in simulations
        ]
        _say(json.dumps(data[0] if len(data) == 1 else data, indent=1))
        return Exit.OK
    for device, run in simulations:
        rows = {name: format_size(getattr(run.peak, name)) for name in _COUNTERS}
        rows["fragmentation"] = f"{run.fragmentation:.0%}"
        rows["device allocations"] = str(run.device_alloc_count)
        wide = max(map(len, rows.values()))
        heading = [f"{device}:"] if len(simulations) > 1 else []
        lines = (f"{value:>{wide}}  {name} (estimated)" for name, value in rows.items())
        _say("\n".join([*heading, *lines]))
    return Exit.OK


def _simulate(options: argparse.Namespace) -> Exit:
    """Become a command that sees a simulated GPU, or only fetch what that needs."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.fetch:
        built = fetch(options.torch, options.patience)
        print(f"torch {built.version} for CUDA {built.cuda} is ready: {built.site}")
        if not command:
            return Exit.OK
    world = parse_world(options.world, options.rank)
    if not command:
        raise SimulationError("a command is needed: torchmem simulate --gpu H100 -- COMMAND")
    parse_gpu(options.gpu)
    built = torch_build(options.torch)
    if said := notice(built):
        print(f"torchmem: {said}", file=sys.stderr)
    # The CUDA build was found for this Python, whether or not its environment is activated.
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, **variables(options.gpu, built, world), "PATH": path}
    program = shutil.which(command[0], path=path)
    if program is None:
        raise SimulationError(f"there is no command {command[0]!r}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, command, environment)
    return Exit.OK


def _calibrate(options: argparse.Namespace) -> Exit:
    """Compare a GPU with its simulation, or show what somebody else's comparison found."""
    separator, command = options.what[:1], options.what[1:]
    if separator and separator != ["--"]:
        if command:
            raise ReportError(
                "give one FILE alone, or options and a command after two dashes: "
                "torchmem calibrate --out FILE -- python train.py"
            )
        if options.out or options.gpu:
            raise ReportError("a FILE is only shown; --out and --gpu are for a run")
        calibration = calibrating.read_calibration(Path(*separator))
    else:
        if options.out and options.out.is_dir():
            raise ReportError(f"{options.out} is a folder: name a file")
        calibration = calibrating.calibrate(command, options.gpu)
    _say("\n".join(calibration.lines()))  # a file that cannot be written loses nothing
    if options.out:
        write_report(options.out, calibrating.as_file(calibration))
    return Exit.OK if calibration.is_equal else Exit.DIFFERS


def _only(run: RunReport, pattern: str) -> RunReport:
    exact = tuple(test for test in run.tests if pattern == test.test)
    chosen = exact or tuple(test for test in run.tests if pattern in test.test)
    if pattern and not chosen:
        raise ReportError(f"no test has {pattern!r} in its name")
    return replace(run, tests=chosen)
