"""What a signal's handler raises reaches the body, as it does without us."""

from __future__ import annotations

import pkgutil
import signal
import sys
import time
from types import FrameType

import pytest
import torch
from torch import nn

from pytest_torchmem import measure
from pytest_torchmem.measuring.body_measurement import running
from pytest_torchmem.record.recorder import Recorder

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


@pytest.mark.parametrize("handler", [ring, signal.default_int_handler])
def test_what_a_handler_raises_while_a_tensor_dies_reaches_the_body(
    handler: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what is raised in the callbacks of weak references: there are none of ours."""
    with measure(device="cpu"):
        """From now on each allocation is known."""
    kept, dropped = [torch.ones(8)], list[object]()
    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    ours = list[str]()

    def tracer(frame: FrameType, *_: object) -> None:
        ours.append(frame.f_code.co_filename)

    try:
        with measure(device="cpu"):
            sys.setprofile(tracer)
            kept.clear()
            sys.setprofile(None)
            with pytest.raises((TooLateError, KeyboardInterrupt)):
                signal.raise_signal(signal.SIGUSR1)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGUSR1, before)
    assert not dropped
    assert set(ours) <= {__file__}


def test_what_a_body_raises_where_python_drops_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dropped = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(str(what.exc_value)))
    with measure(device="cpu"):
        Broken()
        spend(0.01)
    assert dropped == ["mine"]


class RungWhileItIsAsked(nn.Linear):
    """A signal comes while a measurement asks for the buffers."""

    @property
    def _buffers(self):
        if self.rings:
            signal.raise_signal(signal.SIGUSR1)
        return self.own

    @_buffers.setter
    def _buffers(self, own):
        self.__dict__.update(own=own, rings=False)


class TensorRungWhileItIsAsked(torch.Tensor):
    rings = False

    @property
    def itemsize(self):
        if self.rings:
            signal.raise_signal(signal.SIGUSR1)
        return super().itemsize


def module_and_loss():
    return RungWhileItIsAsked(2, 2), torch.ones(2, requires_grad=True).sum()


def tensor_that_is_the_loss():
    loss = torch.ones(2, requires_grad=True).sum().as_subclass(TensorRungWhileItIsAsked)
    return loss, loss


@pytest.mark.parametrize("make", [module_and_loss, tensor_that_is_the_loss])
def test_what_a_handler_raises_while_a_class_of_the_user_is_asked_reaches_the_body(make):
    """What such a class raises itself is no reason to fail; a signal's error is the program's."""
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with measure(device="cpu"):
            rung, loss = make()
            rung.__dict__["rings"] = True
            with pytest.raises(TooLateError):
                loss.backward()
            rung.__dict__["rings"] = False
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pytest_torchmem.contexts._leave_modules", 1),  # the recorder has begun
        ("pytest_torchmem.contexts._put_numpy_back", 2),  # it is about to end
        ("pytest_torchmem.contexts.pause_gc", 4),
        ("pytest_torchmem.record.owners.ownership.OwnershipWatch.forget_storages", 1),
    ],
)
def test_what_a_handler_raises_while_a_measurement_begins_or_ends_leaves_none(
    name: str, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with measure(device="cpu"):
        """What stays in place is there."""
    owner, _, attribute = name.rpartition(".")
    original, calls = pkgutil.resolve_name(name), list[None]()

    def rings(*arguments: object) -> object:
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGUSR1)
        return original(*arguments)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(pkgutil.resolve_name(owner), attribute, rings)
            with pytest.raises(TooLateError), measure(device="cpu"):
                torch.ones(8)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (Recorder.now, running()) == (None, None)
    with measure(device="cpu") as block:
        torch.ones(1000)
    assert block.peak.total == 4000
    assert len(calls) >= call


RUNG = """
import signal

import pytest
import torch

import pytest_torchmem.contexts
from pytest_torchmem.measuring.body_measurement import running


class TooLateError(Exception):
    pass


def ring(number, frame):
    raise TooLateError


@pytest.mark.parametrize("call", [1, 2, 3])  # as it begins, before and while it ends
@pytest.mark.memory_budget("1MiB", device="cpu")
def test_rung(rings): torch.ones(100)


@pytest.mark.memory_budget("1MiB", device="cpu")
def test_next(): torch.ones(1000)


@pytest.fixture
def rings(call, monkeypatch):
    before, calls = signal.signal(signal.SIGUSR1, ring), []
    original = pytest_torchmem.contexts._put_numpy_back

    def put_back():
        calls.append(None)
        if len(calls) == call:
            signal.raise_signal(signal.SIGUSR1)
        return original()

    monkeypatch.setattr(pytest_torchmem.contexts, "_put_numpy_back", put_back)
    yield
    signal.signal(signal.SIGUSR1, before)
    assert running() is None
"""


def test_a_test_that_a_signal_ends_fails_by_it_and_the_next_one_is_measured(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(RUNG)
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--torchmem-summary=all")
    run.assert_outcomes(passed=1, failed=3)
    raised = [line for line in run.outlines if line.startswith("E ") and "TooLateError" in line]
    assert len(raised) == 3
    (measured,) = [line for line in run.outlines if "::test_next " in line]
    assert "3.9 KiB" in measured
