"""An exception in the middle of a cut leaves no session behind, and no number is wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.record.tree.kineto import TreeReader
from pytest_torchmem.values.errors import RecordingError
from tests.measured import measured

DESCRIPTORS = Path("/proc/self/fd")
linux = pytest.mark.skipif(sys.platform != "linux", reason="its descriptors are looked at")


def raising_once(monkeypatch: pytest.MonkeyPatch, where: object, name: str, *, late: bool) -> None:
    """Have a function raise at its next call, before or after what it does."""
    original: Callable[..., object] = getattr(where, name)

    def fail(*args: object, **kwargs: object) -> object:
        monkeypatch.setattr(where, name, original)
        if late:
            original(*args, **kwargs)
        raise MemoryError

    monkeypatch.setattr(where, name, fail)


def test_a_session_that_begins_and_raises_is_ended(monkeypatch):
    def body() -> None:
        assert Recorder.now is not None
        raising_once(monkeypatch, profiler, "_enable_profiler", late=True)
        Recorder.now.trace()

    with pytest.raises(MemoryError):
        measured(body)
    assert not profiler.profiler_is_active()
    assert Recorder.now is None
    assert measured(lambda: torch.ones(1024)).peak.total == 4096


def test_a_session_that_raises_before_it_ends_is_ended_later(monkeypatch):
    kept = []

    def body() -> None:
        assert Recorder.now is not None
        kept.append(torch.ones(1024))
        raising_once(monkeypatch, profiler, "_without_own_log", late=False)
        with pytest.raises(MemoryError):
            Recorder.now.trace()
        kept.append(torch.ones(2048))

    assert measured(body).peak.total == 3 * 4096
    assert not profiler.profiler_is_active()


@pytest.mark.parametrize("name", ["_read", "_end"])
def test_a_session_that_is_lost_is_said(monkeypatch, name):
    def body() -> None:
        recorder = Recorder.now
        assert recorder is not None
        kept = torch.ones(1024)
        if name == "_read":
            raising_once(monkeypatch, TreeReader, "read", late=False)
        else:
            raising_once(monkeypatch, torch._C._autograd, "_disable_profiler", late=True)
        with pytest.raises(MemoryError), recorder._between_sessions(()):
            pass
        del kept

    with pytest.raises(RecordingError, match="could not go on"):
        measured(body)
    assert not profiler.profiler_is_active()
    assert Recorder.now is None


@linux
def test_the_last_descriptor_is_given_back():
    import resource

    kept = []

    def body() -> None:
        assert Recorder.now is not None
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        held = [os.dup(0)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 2, limits[1]))
        try:
            kept.append(torch.ones(1024))
            Recorder.now.trace()
            kept.append(torch.ones(2048))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            os.close(held[0])

    measured(int)
    before = set(DESCRIPTORS.iterdir())
    assert measured(body).peak.total == 3 * 4096
    assert set(DESCRIPTORS.iterdir()) == before


@linux
def test_a_standard_error_that_nobody_reads_is_no_fault():
    def body() -> None:
        assert Recorder.now is not None
        original, (reading, writing) = os.dup(2), os.pipe()
        os.close(reading)
        os.dup2(writing, 2)
        try:
            with profiler._without_own_log():
                os.write(2, b"a line\n")
        finally:
            os.dup2(original, 2)
            os.close(writing)
            os.close(original)
        torch.ones(1024)

    assert measured(body).peak.total == 4096
