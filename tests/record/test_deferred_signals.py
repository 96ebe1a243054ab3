"""A signal that comes while a session begins or ends is handled after that, as the program says."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import get_ident
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import nn

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record import deferred_signals, recorder
from pytest_torchmem.record.owners import ownership
from pytest_torchmem.record.patches import Installed, python_tracing
from pytest_torchmem.record.patches.python_tracing import (
    TracingPause,
    handlers_wait,
    quiet,
    unheard,
)
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import modules, profiler
from tests.measured import measured
from tests.record.undisturbed.state import hears_calls


class TooLateError(Exception):
    """Raised by a handler, as the limit of a test's time is."""


pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGUSR1"), reason="a process of Windows has no signals of its own"
)


@pytest.fixture
def seen() -> Iterator[list[str]]:
    """Of each signal, the function that its handler was told of; the handler raises."""
    functions: list[str] = []

    def ring(number: int, frame: FrameType | None) -> None:
        functions.append("" if frame is None else frame.f_code.co_name)
        raise TooLateError

    before = signal.signal(signal.SIGUSR1, ring)
    yield functions
    assert signal.getsignal(signal.SIGUSR1) is ring
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[profiler.Profiler]]:
    """Have the next call of a method of the profiler's end with a signal; list all calls."""

    def prepare(name: str) -> list[profiler.Profiler]:
        method, called = getattr(profiler.Profiler, name), list[profiler.Profiler]()

        def counted(self: profiler.Profiler) -> object:
            called.append(self)
            result = method(self)
            if len(called) == 1:
                signal.raise_signal(signal.SIGUSR1)
            return result

        monkeypatch.setattr(profiler.Profiler, name, counted)
        return called

    return prepare


def begun() -> BodyMeasurement:
    measurement = BodyMeasurement("cpu")
    measurement.start()
    return measurement


def nothing_is_left() -> bool:
    return (
        not profiler.profiler_is_active()
        and sys.getprofile() is None
        and Recorder.now is None
        and measured(lambda: torch.ones(1024)).peak.total == 4096
    )


def test_what_is_raised_at_the_beginning_leaves_nothing(seen, rings):
    rings("start")
    with pytest.raises(TooLateError):
        measured(lambda: None)
    assert nothing_is_left()


@pytest.mark.parametrize("which", ["start", "stop"])
def test_what_is_raised_at_a_mark_leaves_the_recording_whole(seen, rings, which):
    measurement = begun()
    rings(which)
    kept = torch.ones(1024)

    def within() -> None:
        with measurement.region("half"):
            pass

    with pytest.raises(TooLateError):
        within()
    assert seen == ["within"]
    kept = torch.cat([kept, kept])
    assert measurement.stop().peak.total == 3 * 4096
    assert nothing_is_left()


@pytest.mark.parametrize("which", ["start", "stop"])
def test_what_is_raised_in_a_cut_leaves_the_recording_whole(seen, rings, which, monkeypatch):
    if sys.platform != "linux":
        pytest.skip("nothing is cut here")
    monkeypatch.setattr(recorder, "_FIRST_CUT_S", 0.001)
    monkeypatch.setattr(recorder, "_SOONEST_CUT_S", 0.001)
    measurement = begun()
    cuts = rings(which)
    kept = torch.ones(1024)

    def loop() -> None:
        for _ in range(2_000_000):
            torch.neg(kept)

    with pytest.raises(TooLateError):
        loop()
    assert seen == ["loop"]
    # The recording is cut again.
    for _ in range(100_000):
        torch.neg(kept)
        if len(cuts) > 1:
            break
    assert len(cuts) > 1
    kept = torch.cat([kept, kept])
    assert measurement.stop().peak.total == 3 * 4096
    assert nothing_is_left()


@pytest.mark.parametrize("which", ["start", "stop"])
def test_what_is_raised_beside_a_pause_leaves_the_recording_whole(seen, rings, which):
    measurement = begun()
    rings(which)
    kept = torch.ones(1024)
    with pytest.raises(TooLateError), measurement.paused():
        pass
    norm = nn.BatchNorm1d(100)
    kept = torch.ones(5000)
    del norm
    peak = measurement.stop().peak
    assert peak.total == kept.nbytes + 1608 + 4096
    assert (peak.by_category.parameter, peak.by_category.buffer) == (800, 808)
    assert nothing_is_left()


@pytest.mark.parametrize("which", ["start", "stop"])
def test_what_is_raised_while_numbers_are_read_leaves_the_recording_whole(seen, rings, which):
    measurement = begun()
    rings(which)
    kept = torch.ones(1024)
    with pytest.raises(TooLateError):
        measurement.profile_so_far()
    kept = torch.cat([kept, kept])
    assert measurement.stop().peak.total == 3 * 4096
    assert nothing_is_left()


@pytest.mark.parametrize("which", ["start", "stop"])
def test_what_is_raised_at_the_end_leaves_nothing(seen, rings, which):
    measurement = begun()
    kept = torch.ones(1024).to_sparse()
    rings(which)
    with pytest.raises(TooLateError):
        measurement.stop()
    del kept
    assert nothing_is_left()


@pytest.mark.parametrize("end", [BodyMeasurement.stop, BodyMeasurement.cancel])
def test_what_is_raised_while_everything_is_restored_leaves_nothing(seen, monkeypatch, end):
    replaced, remove = sys.unraisablehook, Installed.remove

    def rung(self: Installed) -> None:
        signal.raise_signal(signal.SIGUSR1)
        remove(self)

    measurement = begun()
    assert sys.unraisablehook is not replaced
    monkeypatch.setattr(Installed, "remove", rung)
    with pytest.raises(TooLateError):
        end(measurement)
    monkeypatch.undo()
    assert sys.unraisablehook is replaced
    assert nothing_is_left()


def test_handlers_run_in_the_order_of_their_signals_though_one_raises(seen):
    before = signal.signal(signal.SIGUSR2, lambda *_: seen.append("second"))
    told_within = []

    def ring_both() -> None:
        with handlers_wait(), handlers_wait():
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            told_within.extend(seen)

    with pytest.raises(TooLateError):
        ring_both()
    signal.signal(signal.SIGUSR2, before)
    assert not told_within
    assert seen == ["ring_both", "second"]


def test_a_handler_that_the_block_sets_stays(seen):
    ours = signal.getsignal(signal.SIGUSR1)
    with handlers_wait():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, ours)


def test_what_is_raised_while_we_ask_an_object_is_not_taken_for_its_answer(seen, monkeypatch):
    """Many of those that are alive may raise anything where they are asked."""
    measurement = begun()
    module, asked = nn.Linear(32, 31), modules.parameters_of

    def rung(found: nn.Module) -> object:
        with suppress(TooLateError):
            signal.raise_signal(signal.SIGUSR1)
        return asked(found)

    with monkeypatch.context() as asking:
        asking.setattr(ownership, "parameters_of", rung)
        loss = module(torch.ones(1, 32)).sum()
        with pytest.raises(TooLateError):
            loss.backward()
    measurement.cancel()
    assert nothing_is_left()


def test_a_module_that_is_moved_is_recorded_on(seen, rings, monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    measurement = begun()
    module = nn.Linear(32, 32)
    rings("stop")
    # Torch hands it on in an error of its own.
    with pytest.raises(RuntimeError, match="swap"):
        module.double()
    kept = torch.ones(1 << 16)
    assert measurement.stop().peak.total >= kept.nbytes
    assert nothing_is_left()


def ringing_after(function: Callable[..., object]) -> Callable[..., object]:
    """Call a function; a signal comes when the first call has been made."""
    calls = []

    def rung(*arguments: object) -> object:
        calls.append(function(*arguments))
        if len(calls) == 1:
            signal.raise_signal(signal.SIGUSR1)
        return calls[-1]

    return rung


def pause() -> None:
    tracing = TracingPause()
    try:
        tracing.suspend()
    finally:
        tracing.resume()


@pytest.mark.parametrize("name", ["_enter", "_leave"])
@pytest.mark.parametrize("by", [quiet, unheard, lambda _: pause], ids=["hook", "call", "pause"])
def test_calls_are_heard_after_a_handler_has_raised(seen, monkeypatch, name, by):
    with monkeypatch.context() as ringing:
        ringing.setattr(python_tracing, name, ringing_after(getattr(python_tracing, name)))
        with pytest.raises(TooLateError):
            by(lambda: None)()
    assert hears_calls()


def test_calls_are_heard_after_a_handler_has_raised_at_the_end_of_a_rest(seen, monkeypatch):
    resume, calls = TracingPause.resume, []

    def rung(self: TracingPause) -> None:
        # Called by `suspend`, too.
        calls.append(self.is_suspended)
        if sum(calls) == 1 and calls[-1]:
            signal.raise_signal(signal.SIGUSR1)
        resume(self)

    with monkeypatch.context() as ringing:
        ringing.setattr(TracingPause, "resume", rung)
        with pytest.raises(TooLateError):
            python_tracing._resting_on(get_ident())(lambda: None)()
    assert hears_calls()


def test_each_handler_is_back_though_one_raises_while_others_are_put_back(seen, monkeypatch):
    another = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    waiting = deferred_signals.DeferredSignals()
    waiting.begin()
    put_back = signal.signal

    def rung(number: int, handler: signal.Handlers) -> None:
        put_back(number, handler)
        if number == signal.SIGUSR1:
            signal.raise_signal(number)

    functions = SimpleNamespace(getsignal=signal.getsignal, signal=rung)
    monkeypatch.setattr(deferred_signals, "_signal", functions)
    with pytest.raises(TooLateError):
        waiting.end()
    assert signal.signal(signal.SIGUSR2, another) is signal.default_int_handler
