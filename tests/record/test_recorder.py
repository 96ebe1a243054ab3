"""What a recording promises: nothing is left behind, and marks and identities hold."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.measuring.block import measure
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.devices import CounterReader
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd, profiler
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.trace import MarkKind, Trace
from tests.measured import measured

pytestmark = pytest.mark.slow

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


def test_everything_is_restored_where_the_end_itself_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = installed()
    recorder = Recorder(CPU)
    recorder.start()
    torch.ones(10)

    def fail(_: CounterReader) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(CounterReader, "stop", fail)
    with pytest.raises(ZeroDivisionError):
        recorder.stop()
    assert installed() == before


def doubled() -> torch.Tensor:
    return torch.ones(1000) * 2


@pytest.mark.parametrize("options", [{}, {"profile_memory": True, "with_stack": True}])
def test_a_profiler_around_the_body_and_we_see_what_each_sees_alone(
    options: dict[str, Any],
) -> None:
    alone = measured(doubled)
    with torch.profiler.profile(**options) as outer:
        within = measured(doubled)
    assert within.peak.at_peak == alone.peak.at_peak
    assert within.retained.total == alone.retained.total == 0
    assert {"aten::ones", "aten::mul"} <= {event.key for event in outer.key_averages()}


@pytest.mark.parametrize("options", [{}, {"profile_memory": True, "with_stack": True}])
def test_a_profiler_of_the_bodys_own_and_we_see_what_each_sees_alone(
    options: dict[str, Any],
) -> None:
    seen: list[str] = []

    def profiled() -> torch.Tensor:
        with torch.profiler.profile(**options) as inner:
            result = doubled()
        seen.extend(event.key for event in inner.key_averages())
        return result

    # The two tensors, and the number 2: as it comes, and in the tensor's type.
    assert measured(profiled).peak.total == measured(doubled).peak.total == 2 * 4000 + 8 + 4
    assert {"aten::ones", "aten::mul"} <= set(seen)


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
