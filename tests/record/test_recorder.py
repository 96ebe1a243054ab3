"""What a recording promises: nothing is left behind, and marks and identities hold."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.measuring.block import measure
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record import safe_points
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.safe_points import SafePoints
from pytest_torchmem.record.torch_api import autograd, profiler
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import RecordingError, TraceError
from pytest_torchmem.values.trace import MarkKind, Trace

CPU = torch.device("cpu")


def recorded(body: Callable[[], object]) -> Trace:
    recorder = Recorder(CPU)
    recorder.start()
    body()
    return recorder.stop()


def installed() -> tuple[object, ...]:
    """Everything in torch and Python that a recorder puts something in the place of."""
    return (
        autograd.engine(),
        torch.nn.Module.__setstate__,
        tuple(sys.meta_path),
        tuple(torch.nn.modules.module._global_parameter_registration_hooks),
        profiler.profiler_is_active(),
    )


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_everything_is_restored_at_the_end(end: str) -> None:
    before = installed()
    recorder = Recorder(CPU)
    recorder.start()
    assert installed() != before
    torch.ones(10)
    getattr(recorder, end)()
    assert installed() == before


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_everything_is_restored_where_the_end_itself_fails(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that goes on ends the process when that exits."""
    calls: list[str] = []

    def failing_once(method: Callable[[SafePoints], None]) -> Callable[[SafePoints], None]:
        def fail(points: SafePoints) -> None:
            calls.append(method.__name__)
            if len(calls) == 1:
                raise ZeroDivisionError
            method(points)

        return fail

    before = installed()
    recorder = Recorder(CPU)
    recorder.start()
    torch.ones(10)
    for name in ("hold", "end"):
        monkeypatch.setattr(SafePoints, name, failing_once(getattr(SafePoints, name)))
    with pytest.raises(ZeroDivisionError):
        getattr(recorder, end)()
    assert installed() == before
    assert not safe_points._LISTENING


def test_a_profiler_around_the_body_is_said_in_one_sentence_and_left_alone() -> None:
    with torch.profiler.profile() as outer:
        with pytest.raises(RecordingError, match="another torch profiler session is active"):
            Recorder(CPU).start()
        torch.ones(10)
    assert any(event.key == "aten::ones" for event in outer.key_averages())


def test_a_profiler_of_the_bodys_own_makes_it_unmeasured_not_zero() -> None:
    measurement = BodyMeasurement("cpu")
    before = installed()
    measurement.start()
    with torch.profiler.profile():
        torch.ones(1000)
    with pytest.raises(RecordingError, match="a torch profiler of its own"):
        measurement.stop()
    assert installed() == before


def test_a_profiler_that_fails_makes_it_unmeasured_and_the_next_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = torch._C._autograd._disable_profiler

    def fail() -> None:
        end()
        raise RuntimeError("!stack.empty() INTERNAL ASSERT FAILED\nC++ frames")

    before = installed()
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with monkeypatch.context() as patched:
        patched.setattr(torch._C._autograd, "_disable_profiler", fail)
        with pytest.raises(
            RecordingError, match=r"profiler failed: !stack.empty\(\) INT.* FAILED \["
        ):
            measurement.stop()
    assert installed() == before
    again = BodyMeasurement("cpu")
    again.start()
    torch.ones(1000)
    assert again.stop().peak.total == 4000


def test_freeing_what_was_there_before_is_seen() -> None:
    kept = [torch.ones(1000)]

    def body() -> None:
        kept[0].sum()
        kept.clear()
        torch.ones(1000)

    # Without the free the two would count together: 8000 bytes and the sum's 4.
    assert analyze_trace(recorded(body)).peak.total == 4004


def test_reading_a_region_in_the_middle_of_a_body_loses_nothing() -> None:
    def numbers(read: bool) -> tuple[int, int]:
        measurement = BodyMeasurement("cpu")
        measurement.start()
        first = torch.ones(1000)
        with measurement.region("second") as region:
            second = first.neg()
        if read:
            assert region.retained.total == 4000
        first + second
        return measurement.stop().peak.total, region.peak.total

    assert numbers(read=True) == numbers(read=False) == (12000, 8000)


def test_marks_stand_where_they_happened() -> None:
    recorder = Recorder(CPU)
    recorder.start()
    torch.ones(10)
    mark = recorder.mark(MarkKind.REGION_BEGIN, "here")
    torch.zeros(10)
    trace = recorder.stop()
    row = int(trace.marks["event"][mark])
    names = [trace.strings[name] for name in trace.events["name"].tolist()]
    assert names.index("aten::ones") < row < names.index("aten::zeros")
    assert trace.strings[trace.marks["text"][mark]] == "here"


def test_a_trace_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    trace = recorded(lambda: torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward())
    trace.save(tmp_path / "trace.npz")
    again = load_trace(tmp_path / "trace.npz")
    assert analyze_trace(again).result() == analyze_trace(trace).result()
    assert again.strings == trace.strings


def test_a_damaged_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    recorded(lambda: torch.ones(1)).save(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TraceError, match=r"trace\.npz"):
        load_trace(path)


def test_results_are_the_same_bits_with_and_without_us() -> None:
    def gradient() -> torch.Tensor:
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 32)
        layer(torch.randn(8, 32)).tanh().sum().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad

    alone = gradient()
    kept: list[torch.Tensor] = []
    recorded(lambda: kept.append(gradient()))
    assert torch.equal(kept[0], alone)


def test_looking_at_a_graph_unpacks_nothing() -> None:
    unpacked: list[str] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append("unpacked")
        return tensor

    def body() -> None:
        x = torch.ones(100, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            y = (x * x).sum()
        assert not unpacked
        y.backward()
        unpacked.append("end of backward")

    recorded(body)
    # x * x keeps x twice: two, and both by backward itself.
    assert unpacked == ["unpacked", "unpacked", "end of backward"]


def test_the_profilers_notes_stay_off_standard_error_without_pythons_own(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    measurement = BodyMeasurement("cpu")
    measurement.start()
    torch.ones(16)
    measurement.stop()
    assert capfd.readouterr().err == ""


def test_what_torch_calls_is_recorded_without_a_warning_of_the_profilers():
    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            recorder = Recorder(CPU)
            recorder.start()
            y = x + 1
            traces.append(recorder.stop())
            return y

    traces: list[Trace] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Recorded.apply(torch.ones(2, requires_grad=True))
    assert len(traces[0].allocations)


@pytest.mark.skipif(sys.platform != "linux", reason="torch's library has another name")
def test_torch_prints_nothing_where_a_body_frees_what_was_there_before(
    capfd: pytest.CaptureFixture[str],
) -> None:
    held = [torch.ones(3) for _ in range(1200)]
    for _ in range(2):
        with measure(device="cpu"):
            torch.ones(3)
            del held[:600]
    assert (held, capfd.readouterr().err) == ([], "")
