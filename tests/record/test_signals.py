"""What a signal's handler raises reaches the body, as it does without us."""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from pytest_torchmem import measure
from pytest_torchmem.record import recorder
from pytest_torchmem.record.collector_count import KeptCount

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the timer is Linux's")


class TooLateError(Exception):
    pass


def ring(number: int, frame: FrameType | None) -> None:
    raise TooLateError


def spend(seconds: float) -> None:
    begin_s = time.thread_time()
    while time.thread_time() < begin_s + seconds:
        pass


class Broken:
    def __del__(self) -> None:
        raise ValueError("mine")


def free(kept: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the signal come in the callback of a weak reference."""
    clock = time.time_ns

    def ringing() -> int:
        monkeypatch.setattr(recorder, "time_ns", clock)
        signal.raise_signal(signal.SIGUSR1)
        return clock()

    monkeypatch.setattr(recorder, "time_ns", ringing)
    kept.clear()


def collect(_: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the signal come in the callback of the collector."""
    move_back = KeptCount._move_back

    def ringing(count: KeptCount) -> None:
        monkeypatch.setattr(KeptCount, "_move_back", move_back)
        signal.raise_signal(signal.SIGUSR1)
        move_back(count)

    monkeypatch.setattr(KeptCount, "_move_back", ringing)
    gc.collect()


def collect_for_others_too(kept: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a callback of somebody else's run when the exception is handed on."""

    def slow(*_: object) -> None:
        spend(0.05)

    gc.callbacks.append(slow)
    try:
        collect(kept, monkeypatch)
    finally:
        gc.callbacks.remove(slow)


@pytest.mark.parametrize("handler", [ring, signal.default_int_handler])
@pytest.mark.parametrize("call", [free, collect, collect_for_others_too])
def test_what_a_handler_raises_while_python_calls_us_reaches_the_body(
    call: Callable[[list[torch.Tensor], pytest.MonkeyPatch], None],
    handler: signal.Handlers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python drops what is raised in the callbacks of weak references and of the collector."""
    kept, dropped = [torch.ones(8)], list[object]()
    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)

    def call_and_wait() -> None:
        call(kept, monkeypatch)
        spend(5)

    try:
        with measure(device="cpu"), pytest.raises((TooLateError, KeyboardInterrupt)):
            call_and_wait()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not dropped


def test_what_a_body_raises_where_python_drops_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(str(what.exc_value)))
    with measure(device="cpu"):
        Broken()
        spend(0.01)
    assert dropped == ["mine"]
