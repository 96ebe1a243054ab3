"""Everything that reads what somebody wrote, each with whole inputs to damage.

A reader gives a value or raises `TorchmemError`; the command gives an exit code and one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import pickle
import random
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from _pytest.config import get_config

from pytest_torchmem.allocator import AllocatorSettings, RequestLog, simulate
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.sampling import sketch
from pytest_torchmem.cli.main import main
from pytest_torchmem.measuring.loading import load
from pytest_torchmem.measuring.ranks import Ranks
from pytest_torchmem.plugin.options.marker import read_markers
from pytest_torchmem.plugin.options.option_table import OPTIONS
from pytest_torchmem.plugin.options.settings import read_settings
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import parse_world
from pytest_torchmem.store.baseline_file import read_any, read_file
from pytest_torchmem.store.baseline_rows import origins_path
from pytest_torchmem.store.baselines import BaselineStore, FileChanges, write_file
from pytest_torchmem.store.run_reports import read_run, render_run
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.baseline import Allowance, BaselineEntry
from pytest_torchmem.values.errors import TorchmemError
from pytest_torchmem.values.measured import Rank
from pytest_torchmem.values.trace import TABLES, Ownership, Trace
from pytest_torchmem.values.units import MiB, format_size, parse_floor, parse_fraction, parse_size
from tests.analysis.snapshots import frame, snapshot_of
from tests.builders import TraceBuilder
from tests.cli.files import CPU, A, baseline, results
from tests.faults.hostile import damaged_bytes, damaged_json, damaged_text, damaged_value
from tests.report.sample_run import sample_run
from tests.results import contributor, result

Damage = Callable[[random.Random], Any]


@dataclass(frozen=True)
class Reader:
    """One reader: damaged inputs for it, and how it is asked for one."""

    damaged: Damage
    read: Callable[[Path, Any], object]


def of_file(
    name: str, damage: Callable[[random.Random], bytes], *reads: Callable[[Path], object]
) -> Reader:
    """A reader of a file called ``name``; each way to read it is taken in turn."""

    def read(folder: Path, damaged: tuple[int, bytes]) -> object:
        turn, content = damaged
        path = folder / name
        path.write_bytes(content)
        return reads[turn % len(reads)](path)

    return Reader(lambda chance: (chance.randrange(1000), damage(chance)), read)


def of_text(parse: Callable[[str], object], *whole: str) -> Reader:
    return Reader(
        lambda chance: damaged_text(chance.choice(whole), chance), lambda _, text: parse(text)
    )


def command(*arguments: object) -> Callable[[Path], object]:
    """Run the command on a file, for which ``FILE`` stands; ``HERE`` is its folder.

    It says one line at most of what is bad.
    """

    def run(path: Path) -> object:
        typed = [
            str(path) if a == "FILE" else str(a).replace("HERE", str(path.parent))
            for a in arguments
        ]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(typed)
        said = out.getvalue()
        assert code in (0, 1, 2)
        assert (code == 2) == err.getvalue().startswith("torchmem: "), err.getvalue()
        assert err.getvalue().count("\n") <= 1, err.getvalue()
        for text in (said, err.getvalue()):
            assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in text), text
            assert not any(line.startswith("::") for line in text.splitlines()), text
            (said + err.getvalue()).encode()
        return code

    return run


# --- results ------------------------------------------------------------------------------------


def _small_run() -> Any:
    run = json.loads(render_run(sample_run()))
    return {**run, "tests": run["tests"][:1] + run["tests"][5:6]}


RUN = _small_run()
RESULTS = of_file(
    "run.json",
    lambda chance: damaged_json(RUN, chance),
    read_run,
    load,
    lambda path: Ranks.load([path]),
    command("show", "FILE"),
    command("show", "FILE", "test_train"),
    command("show", "FILE", "--operators"),
    command("diff", "FILE", "HERE/whole.json"),
    command("diff", "HERE/whole.json", "FILE", "--all", "-o", "HERE/diff.html"),
    command("diff", "HERE/whole.json", "FILE", "--format", "json"),
    command("report", "FILE", "-o", "HERE/x.html"),
    command("report", "FILE", "HERE/whole.json", "-o", "HERE/x.md"),
    command("report", "FILE", "-o", "HERE/x.json"),
    command("report", "FILE", "--test", "test_train", "-o", "HERE/x.svg"),
    command("explain", "FILE"),
)


# --- baselines ----------------------------------------------------------------------------------

ENTRY = BaselineEntry.of(result(contributor(8 * MiB), retained=(contributor(MiB),)))


def _every_entry(path: Path) -> object:
    _, entries = read_any(path)
    return [entries.entry(key, path) for key in entries.lines]


def _as_a_run_does(path: Path) -> object:
    store = BaselineStore(path.parent, path.parent, ("cpu-torch2.13",))
    module = path.parent / "test_a.py"
    return store.reference(module, CPU, "test_x"), store.nearest(module, CPU, "test_y")


def _updated(path: Path) -> object:
    """An update never writes to a file that it cannot read, and keeps the entries of one it can."""
    before = path.read_bytes()
    try:
        whole = {key: _entry_or_none(path, key) for key in read_file(path, CPU).lines}
    except TorchmemError:
        whole = None
    try:
        write_file(path, CPU, FileChanges({"test_new": ENTRY}))
    except TorchmemError:
        assert path.read_bytes() == before
        raise
    assert whole is not None
    stored = read_file(path, CPU)
    assert stored.entry("test_new", path).total == ENTRY.total
    for key, total in whole.items():
        assert key == "test_new" or _entry_or_none(path, key) == total
    return stored


def _entry_or_none(path: Path, key: str) -> int | None:
    try:
        return read_file(path, CPU).entry(key, path).total
    except TorchmemError:
        return None


def _baseline_text(folder: Path) -> bytes:
    path = folder / "test_a.json"
    baseline(path, {"test_x": 8 * MiB, "test_y[" + "a" * 80 + "]": 3 * MiB})
    return path.read_bytes()


OLD = {
    "format": 1,
    "environment": CPU,
    "entries": {"test_x": ENTRY.to_json(), "test_y": ENTRY.to_json()},
}


def baselines(text: bytes) -> Reader:
    def damage(chance: random.Random) -> bytes:
        if chance.random() < 0.25:
            return damaged_json(OLD, chance)
        if chance.random() < 0.5:
            return damaged_bytes(text, chance)
        data = json.loads(text)
        return json.dumps(damaged_value(data, chance)).encode()

    return of_file(
        "cpu-torch2.13/test_a.json",
        damage,
        _every_entry,
        _as_a_run_does,
        _updated,
        command("show", "FILE"),
        command("show", "FILE", "test"),
        command("diff", "FILE", "HERE/../whole.json"),
    )


def origins(text: bytes) -> Reader:
    """The file beside a baseline costs names of causes, never a number or an error."""

    def read(path: Path) -> object:
        stored = read_file(path.with_suffix(".json"), CPU)
        for key in stored.lines:
            entry = stored.entry(key, path)
            assert entry.total > 0
            assert all(c.size_bytes >= 0 for c in (*entry.live, *entry.at_peak_live))
        return stored

    return of_file("cpu-torch2.13/test_b.origins", lambda chance: damaged_bytes(text, chance), read)


# --- recordings ---------------------------------------------------------------------------------


def whole_trace() -> Trace:
    b = TraceBuilder()
    w = b.existing(100, Ownership.PARAMETER)
    with b.module(7, "Net"), b.op("aten::mm", reads=[w]):
        y = b.alloc(4000)
    with b.backward(), b.node("MmBackward0", [y]), b.op("aten::mm", reads=[y, w]):
        g = b.alloc(100)
    with b.optimizer_step(), b.op("aten::add_", reads=[g], writes=[w]):
        b.alloc(64)
    b.free(y)
    return b.build()


def damaged_trace(chance: random.Random) -> bytes:
    trace = whole_trace()
    header: Any = {
        "format": chance.choice((1, 2, 3, 3, 3, 3, 3)),
        "strings": list(trace.strings),
        "devices": list(trace.devices),
        "meta": dict(trace.meta),
    }
    tables = {name: getattr(trace, name).copy() for name in TABLES}
    kind = chance.randrange(4)
    if kind == 0:
        header = damaged_value(header, chance)
    elif kind == 1:
        for _ in range(chance.choice((1, 1, 3))):
            name = chance.choice([name for name in tables if len(tables[name])])
            column = chance.choice(tables[name].dtype.names)
            row = chance.randrange(len(tables[name]))
            limits = {"u": (0, 255), "i": (-(2**15), 2**15 - 1), "b": (0, 1)}
            value = chance.choice((0, 1, 3, *limits[tables[name].dtype[column].kind]))
            with contextlib.suppress(OverflowError):
                wide = tables[name].dtype[column].itemsize == 8
                tables[name][column][row] = chance.choice((value, 2**62)) if wide else value
    elif kind == 2:
        name = chance.choice(list(tables))
        tables[name] = chance.choice(
            (
                tables[name][:0],
                tables[name][::-1],
                np.repeat(tables[name], 2),
                tables[name].astype("O") if len(tables[name]) else np.zeros(2, object),
                np.zeros((3, 2)),
                tables[name].reshape(1, -1),
            )
        )
    file = io.BytesIO()
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    chance.choice((np.savez, np.savez_compressed))(file, header=text, **tables)
    return damaged_bytes(file.getvalue(), chance) if kind == 3 else file.getvalue()


def _analysed(path: Path) -> object:
    profile = analyze_trace(load_trace(path))
    return profile.result().to_json(), sketch(profile).to_json(), profile.explain()


TRACES = of_file(
    "body.trace",
    damaged_trace,
    _analysed,
    _analysed,
    command("fits", "FILE", "--capacity", "1GiB"),
    command("reserved", "FILE"),
    command("explain", "FILE"),
    command("show", "FILE", "--operators"),
    command("report", "FILE", "-o", "HERE/t.perfetto.json"),
    command("report", "FILE", "-o", "HERE/t.pickle"),
    command("report", "FILE", "-o", "HERE/t.html"),
)


def whole_snapshot() -> Any:
    log = RequestLog()
    for key, size in enumerate((30 * MiB, 4 * MiB, 512)):
        log.alloc(key, size)
    log.free(1)
    data = snapshot_of(log.requests(), simulate(log.requests()), 1)
    data["device_traces"][0][0]["frames"] = [
        frame("at::_ops::add_Tensor::call(at::Tensor const&)"),
        frame("forward", "/home/me/net.py", 3),
    ]
    data["allocator_settings"] = {"max_split_size": -1, "garbage_collection_threshold": 0.0}
    return data


SNAPSHOT = whole_snapshot()


def damaged_snapshot(chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return damaged_bytes(pickle.dumps(SNAPSHOT, chance.choice((2, 4))), chance)
    return pickle.dumps(damaged_value(SNAPSHOT, chance))


def _looked_at(path: Path) -> object:
    snapshot = load_snapshot(path)
    return snapshot.result().to_json(), snapshot.picture().to_json()


SNAPSHOTS = of_file(
    "step.pickle",
    damaged_snapshot,
    _looked_at,
    lambda path: load_snapshot(path, 0).simulate("expandable_segments:True", "1GiB"),
    command("show", "FILE"),
    command("fits", "FILE", "--capacity", "1GiB"),
    command("report", "FILE", "-o", "HERE/s.html"),
)


# --- what people type ---------------------------------------------------------------------------


def _size(text: str) -> str:
    return format_size(parse_size(text))


def _judged(text: str) -> object:
    allowance = Allowance(parse_fraction(text), 0)
    return allowance.text_for(10**9), allowance.compare(10**12, 10**9)


def _floor(text: str) -> object:
    return Allowance(0.02, *parse_floor(text)).at(10**6).text_for(10**6)


def _settings(text: str) -> object:
    settings = AllocatorSettings.parse(text)
    return settings.block_bytes(10 * MiB), settings.segment_bytes(MiB)


def _rank(text: str) -> object:
    return Rank.launched({"RANK": text, "WORLD_SIZE": text + "0"})


def _world(text: str) -> object:
    return parse_world(text, "1")


TYPED = {
    "sizes": of_text(_size, "64MiB", "1.5 GB", "12_000B", "0 b"),
    "tolerances": of_text(_judged, "2%", "0.02", " 5.25 % ", ".5"),
    "floors": of_text(_floor, "5% up to 1MiB", "1MiB"),
    "allocator settings": of_text(
        _settings,
        "expandable_segments:True,max_split_size_mb:128",
        "roundup_power2_divisions:[256:1,512:2,>:4],garbage_collection_threshold:0.8",
    ),
    "GPUs": of_text(parse_gpu, "H100x8", "capability=9.0,memory=80GiB,processors=132,name=x"),
    "worlds": of_text(_world, "8", "512"),
    "ranks": of_text(_rank, "0", "3"),
}


# --- options and markers ------------------------------------------------------------------------

OPTIONS_TYPED = {
    "device": ("cpu", "cuda:1"),
    "tolerance": ("2%",),
    "floor": ("5% up to 1MiB",),
    "accept": ("new,grown,shrunk,unused",),
    "torchmem": ("off",),
    "repeat": ("3",),
    "baseline-from": ("cpu-torch2.12, cpu-torch2.11",),
    "baseline-all": ("1MiB",),
    "known-holder": ("net.CACHE* because it is kept\nb because c",),
    "baseline-dir": ("kept/here",),
    "summary": ("short",),
    "report": ("a.html\nb.json", "folder"),
}
FLAGS = ("update-baseline", "dry-run", "ask", "ci", "strict", "require-baseline", "fail-shrunk")


@functools.cache
def config() -> pytest.Config:
    """A configuration of pytest with our options, of no project."""
    made = get_config(["-p", "pytest_torchmem.plugin.hooks"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.delenv("PYTEST_PLUGINS", raising=False)
        made.parse(["-p", "pytest_torchmem.plugin.hooks", "-s", "-c", os.devnull, "--noconftest"])
    return made


@functools.cache
def session() -> pytest.Session:
    return pytest.Session.from_config(config())


def damaged_options(chance: random.Random) -> dict[str, object]:
    """Some options with damaged texts, as the command line or an ini file gives them."""
    names = chance.sample(sorted(OPTIONS_TYPED), chance.choice((1, 1, 3)))
    typed: dict[str, object] = {
        name: damaged_text(chance.choice(OPTIONS_TYPED[name]), chance) for name in names
    }
    typed.update((name, True) for name in chance.sample(FLAGS, chance.choice((0, 0, 1, 2))))
    return typed


def _options(folder: Path, typed: dict[str, object]) -> object:
    """Read settings; `pytest.UsageError` is the error of our own that a run prints."""
    with pytest.MonkeyPatch.context() as patch:
        for option in OPTIONS:
            given = typed.get(option.name)
            several = option.several and given is not None
            text = str(given).splitlines() if several else given
            if option.is_typed:
                patch.setattr(config().option, option.ini, text, raising=False)
            else:
                patch.setitem(config()._inicache, option.ini, text)
        try:
            return read_settings(config())
        except pytest.UsageError as error:
            raise TorchmemError(str(error)) from error


BUDGET: dict[str, object] = {
    "total": "2GiB",
    "activation": 4096,
    "retained": "0B",
    "growth": {"cpu": "1MiB", "NVIDIA H200": None},
    "device": "cpu",
    "warmup": 1,
    "collect": True,
}
COMPARED: dict[str, object] = {"tolerance": "2%", "floor": "5% up to 1MiB"}


def damaged_marks(chance: random.Random) -> list[pytest.Mark]:
    """Markers with damaged arguments: values of other kinds, keys that nobody knows."""
    marks = []
    for name, whole in (("memory_budget", BUDGET), ("memory_baseline", COMPARED)):
        keys = chance.sample(sorted(whole), chance.randrange(len(whole) + 1))
        arguments = damaged_value({key: whole[key] for key in keys}, chance)
        texts = [key for key, value in arguments.items() if isinstance(value, str)]
        if texts and chance.random() < 0.5:
            key = chance.choice(texts)
            arguments[key] = damaged_text(arguments[key], chance)
        first = (damaged_text("2GiB", chance),) if chance.random() < 0.2 else ()
        marks.append(getattr(pytest.mark, name)(*first, **arguments).mark)
    return marks


def _markers(folder: Path, marks: list[pytest.Mark]) -> object:
    module = pytest.Module.from_parent(session(), path=folder / "test_a.py")
    no_fixtures = SimpleNamespace(names_closure=[], name2fixturedefs={})
    item = pytest.Function.from_parent(
        module, name="test_a", callobj=lambda: None, fixtureinfo=no_fixtures
    )
    item.own_markers.extend(marks)
    asked = read_markers(item, Allowance(0.02, MiB))
    on_cpu = asked.on_device("cpu")
    return on_cpu.sizes(), asked.allowance.at(10**6).text_for(10**6)


ASKED = {
    "options": Reader(damaged_options, _options),
    "markers": Reader(damaged_marks, _markers),
}


def every_reader(folder: Path) -> dict[str, Reader]:
    """All readers by name, with the whole files that they look at beside the damaged one."""
    results(folder / "whole.json", A)
    (folder / "cpu-torch2.13").mkdir()
    text = _baseline_text(folder)
    (folder / "cpu-torch2.13" / "test_b.json").write_bytes(text)
    beside = origins_path(folder / "test_a.json").read_bytes()
    return {
        "results": RESULTS,
        "baselines": baselines(text),
        "origins": origins(beside),
        "traces": TRACES,
        "snapshots": SNAPSHOTS,
        **TYPED,
        **ASKED,
    }


READERS = ("results", "baselines", "origins", "traces", "snapshots", *TYPED, *ASKED)


# --- the rules ----------------------------------------------------------------------------------


class Hung(BaseException):
    """A reader took far more processor time than any input deserves."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Hung` in what takes longer, in processor time: a busy machine is no slow reader."""

    def stop(_: int, where: FrameType | None) -> None:
        raise Hung(f"at {where}")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@dataclasses.dataclass
class Outcomes:
    values: int = 0
    refused: int = 0


def fuzz(reader: Reader, folder: Path, seeds: range) -> Outcomes:
    """Ask a reader for damaged inputs; anything but a value or our own error comes out."""
    outcomes = Outcomes()
    for seed in seeds:
        damaged = reader.damaged(random.Random(seed))
        try:
            with at_most(5.0):
                reader.read(folder, damaged)
            outcomes.values += 1
        except TorchmemError:
            outcomes.refused += 1
        except BaseException as error:
            if hasattr(error, "add_note"):
                error.add_note(f"the input of seed {seed}")
            raise
    return outcomes
