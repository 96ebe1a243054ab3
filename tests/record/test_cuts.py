"""A recording without marks is cut while the body runs; nobody can tell from its result."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record import devices, recorder, recording_size, safe_points
from pytest_torchmem.record.safe_points import SafePoints
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.record.tree import growing_tables
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.packed import PackedTable
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.trace import Trace
from tests.record import cut_programs

PACKAGE = str(Path(recorder.__file__).parents[1])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class WithSites(ast.NodeTransformer):
    """Puts a call of ``SITES[n]`` before each statement of a function; lines stay as they are."""

    count = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(
            node,
            (
                *_DEFINITIONS[:2],
                ast.For,
                ast.AsyncFor,
                ast.While,
                ast.With,
                ast.If,
                ast.Try,
                ast.ExceptHandler,
            ),
        ):
            for name in ("body", "orelse", "finalbody"):
                if statements := getattr(node, name, None):
                    setattr(node, name, [*self._with_sites(statements)])
        return node

    def _with_sites(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            (call,) = ast.parse(f"SITES[{self.count}]()").body
            self.count += 1
            for part in ast.walk(call):
                ast.copy_location(part, statement)
            yield from (call, statement)


class WithSitesInExpressions(ast.NodeTransformer):
    """Looks up ``SITES[n]`` before each expression; a tracer is told of no call in that.

    What is asked for there is done where Python makes pending calls next: after a call of a
    function of C, when a Python function begins, or when a loop turns.
    """

    count = 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.JoinedStr, ast.arguments)):
            return node
        if isinstance(node, (ast.Module, ast.ClassDef)):
            node.body = [
                self.visit(part) if isinstance(part, _DEFINITIONS) else part for part in node.body
            ]
            return node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # Neither decorators nor annotations.
            node.body = [self.visit(statement) for statement in node.body]
            return node
        self.generic_visit(node)
        if not isinstance(node, ast.expr) or isinstance(node, (ast.Starred, ast.Slice)):
            return node
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return node
        with_site = ast.parse(f"(SITES[{self.count}], 0)[1]", mode="eval").body
        self.count += 1
        for part in ast.walk(with_site):
            ast.copy_location(part, node)
        assert isinstance(with_site, ast.Subscript)
        assert isinstance(with_site.value, ast.Tuple)
        with_site.value.elts[1] = node
        return with_site


@cache
def code(*, in_expressions: bool) -> CodeType:
    file = str(cut_programs.__file__)
    with_sites = WithSitesInExpressions() if in_expressions else WithSites()
    tree = with_sites.visit(ast.parse(Path(file).read_text()))
    return compile(tree, file, "exec")


@cache
def programs(*, in_expressions: bool) -> dict[str, Any]:
    """Return what `cut_programs` defines, with sites.

    It is made once: classes that refer to torch's, made anew for each recording, would have each
    look at everything that is alive.
    """
    names = {"__name__": cut_programs.__name__}
    exec(code(in_expressions=in_expressions), names)
    return names


class Sites(dict[int, Any]):
    """At every ``nth`` site of a program a pending call, at others nothing: functions of C all."""

    def __init__(self, nth: int) -> None:
        super().__init__((site, partial(int)) for site in range(2000))
        self.nth = nth

    def fill(self) -> None:
        """From now on ``self[n]()`` asks for a cut, and so does ``self[n]`` of `Requests`."""
        for site in range(0, len(self) if self.nth else 0, self.nth or 1):
            self.ask_at(site, safe_points._request())

    def ask_at(self, site: int, ask: Callable[..., object]) -> None:
        self[site] = ask


class Requests(Sites):
    """A cut is asked for where an ``nth`` site is looked up: functions of C do all of it."""

    def ask_at(self, site: int, ask: Callable[..., object]) -> None:
        setattr(type(self), "__missing__", staticmethod(ask))  # noqa: B010
        del self[site]


def measured(
    name: str, nth: int, monkeypatch: pytest.MonkeyPatch, *, in_expressions: bool = False
) -> tuple[Result, list[str], int]:
    """Return what a program's recording says of it and of each storage, and how often it was cut.

    The tables of one that is cut are packed.
    """
    cuts, pause = [], recorder.Recorder._pause

    def pausing(self: recorder.Recorder, *, is_cut: bool = False) -> object:
        cuts.extend([is_cut] * is_cut)
        return pause(self, is_cut=is_cut)

    sites = Requests(nth) if in_expressions else Sites(nth)
    names = programs(in_expressions=in_expressions)
    names["SITES"] = sites
    names["KEPT"].clear()
    with monkeypatch.context() as patched:
        patched.setattr(SafePoints, "after", lambda *_: None)
        patched.setattr(recorder.Recorder, "_pause", pausing)
        for constant in ("_SOONEST_CUT_S", "_FIRST_CUT_S", "_LATEST_CUT_S"):
            patched.setattr(recorder, constant, 0.0)
        for constant in ("_LARGE_BYTES", "_MUCH_BYTES") if nth else ():
            patched.setattr(growing_tables, constant, 1)
        measurement = BodyMeasurement("cpu")
        measurement.start()
        sites.fill()
        try:
            names[name]()
            result = measurement.stop()
        except BaseException:
            measurement.cancel()
            raise
    # When it was is another matter.
    result = replace(result, peak=replace(result.peak, time_ns=0))
    profile = measurement.profile_so_far()
    trace = profile.tree.trace
    assert isinstance(trace.events, PackedTable if nth else np.ndarray)
    # The row of the operator is another matter, too.
    made = [e for e in profile.explain() if e.born_ns is not None]
    labels = [f"{replace(e.storage, order=0)} {e.decided_by} {e.reason}" for e in made]
    return result, [*told(trace), *labels], len(cuts)


def told(trace: Trace) -> list[str]:
    """Each operator, allocation and call of a module, below the calls that led to it."""
    # Packed columns would be unpacked for each event.
    events, shown, found = np.asarray(trace.events), [""] * len(trace.events), []
    sizes = dict(zip(trace.allocations["event"], trace.allocations["size_bytes"], strict=True))
    modules = set(trace.module_calls["event"].tolist())
    for row, event in enumerate(events):
        text = trace.strings[event["name"]]
        if match := re.match("pytest-torchmem (mark|operator)", text):
            text = match[0]
        # Modules are named and numbered in each session, by the first one at an address.
        text = re.sub(r"(nn.Module): \w+_\d+", r"\1", text)
        # So are methods of C, by the type of the object on which the first one is called.
        text = re.sub(r"(<built-in method \w+) of \w+ object", r"\1", text)
        own = trace.strings[event["file"]].startswith(PACKAGE) if event["file"] >= 0 else False
        above = shown[event["parent"]] if event["parent"] >= 0 else ""
        assert event["parent"] < 0 or event["end"] <= events["end"][event["parent"]]
        name = f"{text}:{event['line']}" if not own else "own"
        # Above it is what called the test.
        shown[row] = f"{above} > {name} {sizes.get(row, '')}" if text != "measured" else ""
        if row in sizes or row in modules or event["is_operator"]:
            found.append(shown[row])
    return found


@pytest.mark.parametrize(
    "name",
    [
        *(program.__name__ for program in cut_programs.PROGRAMS),
        *(pytest.param(p.__name__, marks=pytest.mark.slow) for p in cut_programs.LONG_PROGRAMS),
    ],
)
@pytest.mark.parametrize("in_expressions", [False, True], ids=["statements", "expressions"])
def test_nobody_can_tell_where_a_body_was_cut(
    name: str, in_expressions: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    look = partial(measured, name, monkeypatch=monkeypatch, in_expressions=in_expressions)
    look(0)
    whole, whole_told, count = look(0)
    assert not count
    more = request.config.getoption("nightly", False)
    # Of expressions every second: some sessions have one operator, and some have several.
    few, many = ((2,), (1, 2, 5)) if in_expressions else ((1,), (1, 3))
    for nth in many if more else few:
        cut, cut_told, count = look(nth)
        assert count > (2 if nth == 1 else 0)
        assert cut_told == whole_told
        assert cut == whole


def test_a_body_below_a_function_of_torch_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls the body's code there from Python: no operator of it is open."""
    called = programs(in_expressions=False)
    x, softened = torch.ones(4), called["softened"]
    monkeypatch.setitem(called, "only_below", lambda: torch.autograd.functional.vjp(softened, x, x))
    _, _, count = measured("only_below", 1, monkeypatch)
    assert count > 2


def test_a_dataset_below_a_loader_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader's range is opened for a profiler of the body's alone."""
    called = programs(in_expressions=False)
    x, softened = torch.ones(4), called["softened"]

    class Softened(torch.utils.data.Dataset[torch.Tensor]):
        def __getitem__(self, index: int) -> torch.Tensor:
            return softened(x)

        def __len__(self) -> int:
            return 2

    def names() -> set[str]:
        return {event.name for event in own.function_events or ()}

    loader = torch.utils.data.DataLoader(Softened(), batch_size=None)
    monkeypatch.setitem(called, "only_below", lambda: list(loader))
    _, _, count = measured("only_below", 1, monkeypatch)
    assert count > 2
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with torch.autograd.profiler.profile() as own:
        list(loader)
    measurement.cancel()
    assert any(name.startswith("enumerate(DataLoader)") for name in names())


def test_a_body_below_an_annotation_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed before a cut, and opened again after it."""
    called = programs(in_expressions=False)
    x, softened, annotation = torch.ones(4), called["softened"], torch.profiler.record_function
    monkeypatch.setitem(called, "only_below", lambda: annotation("part")(softened)(x))
    _, _, count = measured("only_below", 1, monkeypatch)
    assert count > 2


def other_threads_range(x: torch.Tensor, cut: Callable[[], object]) -> None:
    opened = torch.profiler.record_function("part")
    other = threading.Thread(target=opened.__enter__)
    other.start()
    other.join()
    cut()
    x + 1


def test_a_body_below_a_label_of_another_thread_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    called, x = programs(in_expressions=False), torch.ones(4)
    monkeypatch.setitem(called, "only_here", lambda: other_threads_range(x, called["SITES"][0]))
    _, _, count = measured("only_here", 1, monkeypatch)
    assert count == 0


def test_a_call_from_an_extension_is_no_safe_moment() -> None:
    """An extension may have opened a range of its own, which no hook of ours sees."""
    safe: list[bool] = []
    points = SafePoints(lambda: safe.append(not points.in_the_way()))
    points.begin()
    try:
        sites = Sites(1)
        sites.fill()

        def between(value: object) -> object:
            sites[0]()
            return len(str(value))

        between(1)
        np.frompyfunc(between, 1, 1)(1)
    finally:
        points.end()
    assert safe == [True, False]


def failing(*_: object, **__: object) -> None:
    raise ZeroDivisionError


def test_a_body_that_cannot_be_cut_may_replace_what_we_look_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, look = list[str](), recording_size.RecordingSize.look

    def looking(self: recording_size.RecordingSize, reason: str) -> None:
        looks.append(reason)
        look(self, reason)

    def between(value: object) -> object:
        sites[0]()
        return len(str(value))

    monkeypatch.setattr(recording_size.RecordingSize, "look", looking)
    monkeypatch.setattr(recorder, "_FIRST_CUT_S", 0.0)
    measurement, sites = BodyMeasurement("cpu"), Sites(1)
    measurement.start()
    sites.fill()
    with monkeypatch.context() as of_the_body:
        for name in ("io.open", "os.fspath", "pathlib.Path.read_text"):
            of_the_body.setattr(name, failing)
        np.frompyfunc(between, 1, 1)(1)
    measurement.stop()
    assert looks


def test_a_body_may_replace_what_we_read_generated_code_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = dict[str, Any]()
    exec(compile("def add(x): return x + 1", "<made>", "exec"), names)
    measurement, x = BodyMeasurement("cpu"), torch.ones(4)
    measurement.start()
    names["add"](x)
    with monkeypatch.context() as of_the_body:
        of_the_body.setattr("linecache.getlines", failing)
        assert measurement.stop().peak.input == x.nbytes


def test_no_session_begins_or_ends_while_the_timers_thread_may_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's tracer goes through Python's threads, and ends the process at a half-made one."""
    held = list[bool]()

    def held_at(call: Callable[..., object]) -> Callable[..., object]:
        def checked(session: profiler.Profiler) -> object:
            held.append(not safe_points._ASKED)
            return call(session)

        return checked

    for name in ("start", "stop"):
        monkeypatch.setattr(profiler.Profiler, name, held_at(getattr(profiler.Profiler, name)))
    for constant in ("_SOONEST_CUT_S", "_FIRST_CUT_S", "_LATEST_CUT_S"):
        monkeypatch.setattr(recorder, constant, 1e-4)
    for ending in (BodyMeasurement.stop, BodyMeasurement.cancel):
        measurement = BodyMeasurement("cpu")
        measurement.start()
        for n in measurement.steps(3, 0):
            for _ in range(20 * n):
                torch.ones(3)
        held.append(bool(safe_points._ASKED))
        ending(measurement)
    assert len(held) > 4
    assert all(held)


def test_a_call_that_is_on_its_way_is_waited_for() -> None:
    """At two at once Python 3.11 goes round in circles; a late one reaches the next body."""
    reached = list[int]()
    points = SafePoints(lambda: reached.append(1))
    for count in range(1, 20):
        points.begin()
        points.after(1e-6)
        begin_s = time.thread_time()
        while time.thread_time() < begin_s + 0.03 * (count % 2):
            pass
        points.end()
        assert not safe_points._LISTENING
        assert not safe_points._ASKED
        seen = len(reached)
        len(list(range(10_000)))
        assert len(reached) == seen <= count
    assert reached


def test_a_call_is_waited_for_though_the_machine_stands_still_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points, waited = SafePoints(lambda: None), list[float]()

    def is_coming() -> bool:
        return len(waited) < 5

    # A clock on which an hour is over each time.
    clock = itertools.count(0, 3600).__next__
    monkeypatch.setattr(safe_points, "monotonic", clock, raising=False)
    monkeypatch.setattr(safe_points, "sleep", waited.append)
    monkeypatch.setattr(safe_points, "_is_coming", is_coming)
    points.hold()
    assert len(waited) == 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_leaves_the_recording_alone() -> None:
    reached = list[int]()
    points = SafePoints(lambda: reached.append(1))
    points.begin()
    try:
        process = os.fork()
        if not process:
            safe_points._request()()
            len(list(range(10_000)))
            os._exit(len(reached))
        assert os.waitpid(process, 0)[1] == 0
    finally:
        points.end()


@pytest.mark.parametrize("use_kineto", [True, False])
def test_a_profiler_of_the_bodys_own_is_not_ended_by_a_cut(
    use_kineto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_FIRST_CUT_S", 0.0)
    measurement, sites, x = BodyMeasurement("cpu"), Sites(1), torch.ones(3)
    measurement.start()
    sites.fill()
    with torch.autograd.profiler.profile(use_kineto=use_kineto) as own:
        for site in range(3):
            sites[site]()
            x + 1
    sites[0]()
    assert [event.name for event in own.function_events].count("aten::add") == 3
    with pytest.raises(RecordingError, match="a torch profiler of its own"):
        measurement.stop()


def test_a_long_body_is_cut_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = []
    pause = recorder.Recorder._pause

    def pausing(self: recorder.Recorder, *, is_cut: bool = False) -> object:
        cuts.extend([is_cut] * is_cut)
        return pause(self, is_cut=is_cut)

    monkeypatch.setattr(recorder.Recorder, "_pause", pausing)
    monkeypatch.setattr(recorder, "_FIRST_CUT_S", recorder._SOONEST_CUT_S)
    measurement = BodyMeasurement("cpu")
    measurement.start()
    x, total = torch.ones(3), 8_000
    for _ in range(total):
        x = x + 1
    result = measurement.stop()
    assert cuts
    assert not safe_points._LISTENING
    trace = measurement.profile_so_far().tree.trace
    names = [trace.strings[name] for name in trace.events["name"].tolist()]
    assert names.count("aten::add") == total
    assert result.retained.total == 12


def test_a_body_that_becomes_long_is_said_to_be_so_once_while_it_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, said = torch.ones(3), list[str]()
    for much_bytes, most, expected in ((10**5, 50_000, 1), (10**9, 2_000, 0)):
        said.clear()
        monkeypatch.setattr(recording_size, "_MUCH_BYTES", much_bytes)
        measurement = BodyMeasurement("cpu", say=said.append)
        measurement.start()
        more = most
        while more and not said:
            x = x + 1
            more -= 1
        for _ in range(2_000):
            x = x + 1
        notes = measurement.stop().notes
        assert len(said) == expected
        assert notes == tuple(said)
        assert all(re.search(r"[\d,]+ events and holds .* \[long-body\]$", text) for text in said)


def add_ones(x: torch.Tensor) -> torch.Tensor:
    for _ in range(10_000):
        x = x + 1
    return x


class AddsOnes(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return add_ones(gradients[0])


def below_many(count: int) -> None:
    below_many(count - 1) if count else add_ones(torch.ones(3))


def in_an_import(folder: Path) -> None:
    """Import a module that runs operators: what grows there may as well be the module's."""
    name = "made_to_grow"
    source = inspect.getsource(add_ones)
    (folder / f"{name}.py").write_text(f"import torch\n{source}\nadd_ones(torch.ones(3))\n")
    try:
        importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            lambda _: AddsOnes.apply(torch.ones(3, requires_grad=True)).sum().backward(),
            "add_ones .*torch or an extension called that",
        ),
        (
            lambda _: torch.func.grad(lambda x: add_ones(x).sum())(torch.ones(3)),
            "add_ones .*a transform of torch.func is around",
        ),
        (lambda _: sum(add_ones(torch.ones(3)).sum() for _ in range(1)), "a function of C called"),
        (lambda _: below_many(150), "add_ones .*more than 120 functions are open"),
        (lambda _: add_ones(torch.ones(3)), ""),
        (in_an_import, ""),
    ],
    ids=["backward", "transform", "generator", "recursion", "cuttable", "import"],
)
def test_a_body_that_cannot_be_cut_is_said_to_grow_while_it_runs(
    body: Callable[[Path], object],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    said = list[tuple[int, str]]()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(recording_size, "_MUCH_UNCUT_BYTES", 3 * 2**20)
    # What earlier tests have freed would be taken again, and the process would not grow.
    resident = itertools.count(2**30, 3 * 2**20)
    monkeypatch.setattr(devices, "_private_bytes", lambda: next(resident))
    measurement = BodyMeasurement(
        "cpu", say=lambda text: said.append((profiler.Profiler.over_count, text))
    )
    measurement.start()
    before = profiler.Profiler.over_count
    body(tmp_path)
    notes = measurement.stop().notes
    assert len(said) == bool(expected)
    for count, text in said:
        assert count == before  # no session has ended since
        assert notes == (text,)
        assert re.search(rf"cannot be cut in .*{expected}.* MiB beside its .*\[long-body\]$", text)


def test_the_tables_of_all_sessions_are_given_back_when_they_are_joined_last() -> None:
    x, found = torch.ones(3), recorder.Recorder(torch.device("cpu"))
    found.start()
    for _ in range(3):
        x + 1
        assert len(found.trace().events)
        assert all(len(part.events) for part in found._segments)
    assert len(found.stop().allocations)
    assert not found._segments


def test_nothing_is_written_where_a_session_ends(capfd: pytest.CaptureFixture[str]) -> None:
    """The library of torch's profiler writes notes of its own to standard error."""
    measurement = BodyMeasurement("cpu")
    measurement.start()
    torch.ones(3) + 1
    measurement.profile_so_far()
    os.write(2, b"the body's\n")
    measurement.stop()
    assert capfd.readouterr().err == "the body's\n"
