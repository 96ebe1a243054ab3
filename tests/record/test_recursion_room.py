"""A body whose recursion reaches Python's limit is measured as another one."""

from __future__ import annotations

import signal
import sys
from threading import Thread

import pytest
import torch

from pytest_torchmem.contexts import Around
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record import recorder, recursion_room
from pytest_torchmem.record.deferred_signals import DeferredSignals
from pytest_torchmem.record.patches.python_tracing import handlers_wait
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.recursion_room import RecursionRoom
from pytest_torchmem.record.safe_points import SafePoints, _PendingCall
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.errors import RecordingError
from tests.measured import measured
from tests.record.undisturbed.programs_odd import depth_left

cuts = pytest.mark.skipif(sys.platform != "linux", reason="nothing is cut here")


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[profiler.Profiler]:
    """All sessions that begin; each may be cut at once."""
    for constant in ("_SOONEST_CUT_S", "_FIRST_CUT_S", "_LATEST_CUT_S"):
        monkeypatch.setattr(recorder, constant, 0.0)
    begun, start = list[profiler.Profiler](), profiler.Profiler.start

    def counted(self: profiler.Profiler) -> None:
        begun.append(self)
        start(self)

    monkeypatch.setattr(profiler.Profiler, "start", counted)
    return begun


def lowest_limit() -> int:
    """Count the calls that are open above the caller, as the limit counts them."""
    before = sys.getrecursionlimit()
    for limit in range(1, before):
        try:
            sys.setrecursionlimit(limit)
        except RecursionError:
            continue
        sys.setrecursionlimit(before)
        return limit - 2
    return before


@cuts
def test_a_session_is_cut_however_few_calls_are_left(sessions, monkeypatch):
    moment, kept, cut = _PendingCall(), [], []
    # No more than one may be on its way.
    monkeypatch.setattr(SafePoints, "after", lambda *_: None)

    def body() -> None:
        kept.append(torch.ones(1024))
        before = sys.getrecursionlimit()
        lowest = lowest_limit()
        for left in range(1, 80):
            sys.setrecursionlimit(lowest + left)
            # What a timer would have Python ask.
            not moment  # noqa: B018
            sys.setrecursionlimit(before)
            cut.append(len(sessions))
        kept.append(torch.ones(2048))

    before = sys.getrecursionlimit()
    assert measured(body).peak.total == 3 * 4096
    assert sys.getrecursionlimit() == before
    assert not profiler.profiler_is_active()
    # Where two are left, none of ours can be made.
    assert cut == [1, 1, *range(2, 79)]


@cuts
def test_a_recursion_ends_as_deep_as_without_a_measurement(sessions):
    def deepest() -> int:
        depth, one = 0, torch.ones(1)

        def deeper() -> None:
            nonlocal depth
            depth += 1
            for _ in range(100):
                one.neg()
            deeper()

        with pytest.raises(RecursionError), depth_left(90):
            deeper()
        return depth

    alone, found = deepest(), []
    for _ in range(5):
        measured(lambda: found.append(deepest()))
        assert not profiler.profiler_is_active()
    assert found == [alone] * 5
    assert len(sessions) > 10


def test_a_recording_that_could_not_go_on_says_so(monkeypatch):
    measurement = Recorder(torch.device("cpu"))
    measurement.start()
    with monkeypatch.context() as failing:
        failing.setattr(Recorder, "_resume", lambda _: None)
        measurement.trace()
    with pytest.raises(RecordingError, match="could not go on"):
        measurement.stop()
    assert not profiler.profiler_is_active()
    assert Recorder.now is None


def test_a_pause_that_cannot_begin_leaves_the_recording_whole(monkeypatch):
    def too_deep() -> Around[DeferredSignals]:
        failing.undo()
        raise RecursionError

    measurement = BodyMeasurement("cpu")
    measurement.start()
    kept = torch.ones(1024)
    with monkeypatch.context() as failing:
        failing.setattr(recorder, "handlers_wait", too_deep)
        with pytest.raises(RecursionError), measurement.paused():
            pass
    kept = torch.cat([kept, kept])
    assert measurement.stop().peak.total == 3 * 4096
    assert kept.nbytes == 2 * 4096


def test_the_limit_is_put_back():
    limit, outer, inner = sys.getrecursionlimit(), RecursionRoom(), RecursionRoom()
    outer.begin()
    inner.begin()
    raised = sys.getrecursionlimit()
    inner.end()
    assert sys.getrecursionlimit() == raised > limit
    outer.end()
    assert sys.getrecursionlimit() == limit


def test_a_limit_that_another_thread_sets_stays():
    limit, room = sys.getrecursionlimit(), RecursionRoom()
    room.begin()
    thread = Thread(target=sys.setrecursionlimit, args=(limit + 1000,))
    thread.start()
    thread.join()
    room.end()
    assert sys.getrecursionlimit() == limit + 1000
    sys.setrecursionlimit(limit)


def test_another_thread_leaves_the_limit_alone():
    def wait() -> None:
        with handlers_wait():
            within.append(sys.getrecursionlimit())

    within = [sys.getrecursionlimit()]
    thread = Thread(target=wait)
    thread.start()
    thread.join()
    wait()
    assert within[0] == within[1] < within[2]


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="Windows has no signals of its own")
def test_the_limit_is_put_back_where_a_handler_raises(monkeypatch):
    def ring(*_: object) -> None:
        raise TimeoutError

    def rung(limit: int) -> None:
        sys.setrecursionlimit(limit)
        if limit != before:
            signal.raise_signal(signal.SIGUSR1)

    before, handler = sys.getrecursionlimit(), signal.signal(signal.SIGUSR1, ring)
    monkeypatch.setattr(recursion_room, "setrecursionlimit", rung)
    with pytest.raises(TimeoutError):
        RecursionRoom().begin()
    signal.signal(signal.SIGUSR1, handler)
    assert sys.getrecursionlimit() == before
