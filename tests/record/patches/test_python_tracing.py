"""Suspending the Python tracer of a thread."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.patches import Installed, python_tracing
from pytest_torchmem.record.patches.python_tracing import (
    CompilationWatch,
    ImportWatch,
    TracingPause,
    pause_beside_others,
    quiet,
)
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import compiler, profiler
from pytest_torchmem.record.torch_api.profiler import profile_function as now
from pytest_torchmem.record.tree.growing_tables import Tables
from pytest_torchmem.record.tree.kineto import TreeReader
from pytest_torchmem.values.contributors import Contributor
from tests.record.patches.profiled import profiled
from tests.record.undisturbed.state import hears_calls


def first() -> None: ...


def second() -> None: ...


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Names of the functions of this file that a profiler in Python sees being called."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename == __file__:
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    yield names
    sys.setprofile(before)


def test_a_suspended_tracer_sees_nothing_and_then_sees_again(seen: list[str]) -> None:
    pause = TracingPause()
    pause.suspend()
    first()
    pause.resume()
    second()
    assert [name for name in seen if name in ("first", "second")] == ["second"]


def test_without_a_pause_all_is_seen(seen: list[str]) -> None:
    first()
    second()
    assert seen[-2:] == ["first", "second"]


def test_suspending_twice_is_undone_once(seen: list[str]) -> None:
    pause = TracingPause()
    pause.suspend()
    pause.suspend()
    pause.resume()
    pause.resume()
    first()
    assert seen[-1] == "first"


def test_nothing_is_suspended_where_dynamo_would_look_no_more(
    seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_HALTS", True)
    pause = TracingPause()
    before = compiler.set_frame_callback(False)
    try:
        pause.suspend()
        first()
    finally:
        compiler.set_frame_callback(before)
    pause.suspend()
    second()
    pause.resume()
    assert [name for name in seen if name in ("first", "second")] == ["first"]


def open_calls(body: Callable[[], object]) -> list[str]:
    """Return the functions of Python that a profiler saw being called, and not returning."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "return":
            calls.pop()

    profiled(note, body)
    return calls


def test_as_many_functions_return_as_were_called_around_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if nobody had called it yet.
    code = TracingPause.resume.__code__
    monkeypatch.setattr(TracingPause.resume, "__code__", code.replace())

    def body() -> None:
        pause = TracingPause()
        pause.suspend()
        first()
        pause.resume()

    assert open_calls(body) == []
    assert open_calls(quiet(second)) == []


def test_as_many_functions_return_as_were_called_around_a_compilation() -> None:
    torch._dynamo.reset()

    def body() -> None:
        with Installed() as patches:
            CompilationWatch(lambda: None).install(patches)
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

    assert open_calls(body) == []


def test_another_thread_may_resume(seen: list[str]) -> None:
    pause = TracingPause()
    pause.suspend()
    other = threading.Thread(target=pause.resume)
    other.start()
    other.join()
    first()
    assert seen[-1] == "first"


def test_what_is_imported_already_is_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_for_the_first_time.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    done: list[str] = []
    with Installed() as patches:
        ImportWatch(lambda: done.append("done")).install(patches)
        importlib.import_module("json")
        assert done == []
        importlib.import_module("imported_for_the_first_time")
        assert done == ["done"]


@pytest.mark.parametrize(
    ("owner", "name"), [(profiler, "others_listen"), (TracingPause, "suspend")]
)
def test_an_import_that_cannot_be_watched_fails_alone(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deep in a recursion each call may be one too many."""
    module = f"imported_without_{name}"
    (tmp_path / f"{module}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    def fails(*_: object) -> bool:
        raise RecursionError

    watch = ImportWatch(lambda: None)
    with Installed() as patches:
        watch.install(patches)
        with monkeypatch.context() as deep:
            deep.setattr(owner, name, fails)
            with pytest.raises(RecursionError):
                importlib.import_module(module)
        assert not watch.importing
        importlib.import_module(module)


def recorded_import(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, after: Callable[[], object]
) -> tuple[int, list[Contributor]]:
    """Import a module in a recorded body; return how many events that had, and what it made."""
    name = f"imported_beside_{folder.name}"
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    counts: list[int] = []
    read = TreeReader.read

    def counting(*args: Any, **options: Any) -> Tables:
        tables = read(*args, **options)
        counts.append(tables.read_count)
        return tables

    monkeypatch.setattr(TreeReader, "read", counting)
    measurement = BodyMeasurement("cpu")
    measurement.start()
    importlib.import_module(name)
    after()
    measurement.stop()
    return sum(counts), [explained.storage for explained in measurement.profile_so_far().explain()]


CALLS = """
def call():
    return len("")
for _ in range(3000):
    call()
"""


def kept_tensors() -> None:
    torch.nn.Linear(64, 32)(torch.ones(16, 64)).sum().backward()


#: On Python 3.12 torch's tracer is a tool of `sys.monitoring`, for all threads at once.
profiles_threads = pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="no thread's own")


@profiles_threads
@pytest.mark.parametrize("listening", [True, False])
def test_an_import_rests_beside_a_trace_function_that_sees_it_all(
    listening: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def trace(frame: FrameType, *_: object) -> None:
        if frame.f_code.co_filename.startswith(str(tmp_path)):
            seen.append(frame.f_code.co_name)

    before = sys.gettrace()
    sys.settrace(trace if listening else None)
    try:
        count, made = recorded_import(tmp_path, monkeypatch, CALLS, kept_tensors)
    finally:
        sys.settrace(before)
    assert seen.count("call") == 3000 * listening
    assert count < 3000
    # It follows what comes after that as it did before.
    assert {one.module for one in made} >= {"Linear", "Linear.weight"}
    assert {one.source.function for one in made if one.source} == {"kept_tensors"}


@pytest.fixture
def traced() -> Iterator[None]:
    """A trace function that sees nothing, and then the trace and profile functions of before."""
    before = sys.gettrace(), sys.getprofile()
    sys.settrace(lambda *_: None)
    yield
    sys.settrace(before[0])
    sys.setprofile(before[1])


@pytest.mark.usefixtures("traced")
def test_what_a_module_sets_while_the_tracer_rests_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    sets = "import sys; sys.setprofile(lambda *_: None)"
    recorded_import(tmp_path, monkeypatch, sets, lambda: found.append(now()))
    assert str(found[0]).startswith("<function <lambda>")


@profiles_threads
@pytest.mark.usefixtures("traced")
def test_a_threads_tracer_does_not_come_to_another_thread() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    pause = pause_beside_others()
    pause.suspend()
    there: list[object] = []

    def resume() -> None:
        sys.setprofile(None)
        pause.resume()
        there.append(now())
        sys.setprofile(None)

    other = threading.Thread(target=resume)
    other.start()
    other.join()
    recorder.stop()
    assert there == [None]


@profiles_threads
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("ends", [True, False])
def test_a_tracer_whose_session_is_over_does_not_come_back(ends: bool) -> None:
    """Torch has freed what it would write to."""
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    pause = pause_beside_others()
    pause.suspend()
    assert now() is None
    if ends:
        recorder.stop()
    pause.resume()
    comes_back = profiler.is_tracer(now())
    if not ends:
        recorder.stop()
    assert comes_back is not ends


def test_what_is_done_after_an_import_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_of_this_test.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    done: list[str] = []
    seen: list[str] = []

    def listen() -> None:
        done.append("listened")

    with Installed() as patches:
        ImportWatch(listen).install(patches)
        sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name))
        try:
            importlib.import_module("a_module_of_this_test")
        finally:
            sys.setprofile(None)
    assert done == ["listened"]
    assert "import_module" in seen
    assert "listen" not in seen


def test_a_pause_that_cannot_begin_leaves_nothing_to_undo(monkeypatch):
    def fails(_state):
        raise RecursionError

    pause = TracingPause()
    with monkeypatch.context() as deep:
        deep.setattr(python_tracing, "_enter", fails)
        with pytest.raises(RecursionError):
            pause.suspend()
    pause.resume()
    assert hears_calls()


def test_what_is_called_at_a_bodys_end_and_in_our_hooks_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch takes its time for each recorded call: these were half of those of a small test."""
    below: dict[str, list[str]] = {}
    read = TreeReader.read

    def noted(reader: TreeReader, result: profiler.ProfilerResult, **options: bool) -> Tables:
        waiting = [*result.experimental_event_tree()]
        while waiting:
            event = waiting.pop()
            waiting += event.children
            name = profiler.name_of(event).rpartition(": ")[2]
            below.setdefault(name, []).extend(map(profiler.name_of, event.children))
        return read(reader, result, **options)

    monkeypatch.setattr(TreeReader, "read", noted)
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    torch.nn.BatchNorm1d(3)
    recorder.stop()
    assert len(below["quietly"]) == 0
    names = [name.rpartition(": ")[2] for name in below["_stop"] if "mark" not in name]
    assert names == ["suspend"]
