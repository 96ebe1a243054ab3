"""torch's names for averages and for the time of events, beside torch's own on the same profile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pytest_torchmem.torch_names import utils
from pytest_torchmem.torch_names.profiler import profile, record_function, schedule
from pytest_torchmem.values.errors import DeviceError

pytestmark = pytest.mark.slow


def test_averages_are_torchs_under_torchs_names() -> None:
    with profile(profile_memory=True) as finished, record_function("label"):
        torch.ones(100).add(1)
    ours = {row.key: row for row in finished.key_averages()}
    theirs = {row.key: row for row in torch.profiler.profile.key_averages(finished)}
    assert ours.keys() == theirs.keys()
    for key, row in theirs.items():
        mine = ours[key]
        assert mine.count == row.count
        assert mine.self_cpu_memory_usage == row.self_cpu_memory_usage
        assert mine.cpu_time_total == pytest.approx(row.cpu_time_total, abs=0.01)
        assert mine.cpu_time == pytest.approx(row.cpu_time, abs=0.01)
        assert mine.device_time == pytest.approx(row.device_time, abs=0.01)
        assert mine.is_user_annotation == row.is_user_annotation
    with pytest.raises(AttributeError, match="a row of averages has no 'cpu_tme'"):
        _ = finished.key_averages()[0].cpu_tme
    first = finished.key_averages().table(sort_by="self_cpu_memory_usage", row_limit=1)
    assert len(first.splitlines()) < len(finished.key_averages().table(row_limit=-1).splitlines())


def test_averages_are_of_all_cycles_where_events_accumulate() -> None:
    def calls(accumulates: bool) -> int:
        with profile(
            schedule=schedule(wait=0, warmup=1, active=2, repeat=3), acc_events=accumulates
        ) as finished:
            for _ in range(9):
                torch.ones(1).add(1)
                finished.step()
        return sum(row.count for row in finished.key_averages() if row.key == "aten::add")

    assert calls(accumulates=True) == 6
    assert calls(accumulates=False) == 2


def test_the_timeline_of_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with profile(record_shapes=True, profile_memory=True, with_stack=True) as finished:
        torch.ones(100).add(1)
    with pytest.raises(DeviceError, match="no memory on 'cuda'; it has: cpu"):
        finished.export_memory_timeline(str(tmp_path / "t.json"), "cuda")
    finished.export_memory_timeline(str(tmp_path / "t.txt"), "CPU")
    assert (tmp_path / "t.txt").read_text().startswith("[[")


def test_an_evaluation_has_torchs_numbers() -> None:
    theirs = pytest.importorskip("torch.profiler._utils")
    if not hasattr(theirs, "BasicEvaluation"):
        pytest.skip("this torch has no BasicEvaluation")
    with profile(with_stack=True) as finished:
        torch.ones(4, 4) @ torch.ones(4, 4)
    inner = finished.profiler
    ours, expected = utils.BasicEvaluation(inner), theirs.BasicEvaluation(inner)
    assert {key.event.id: key.event.name for key in ours.event_keys} == {
        key.event.id: key.event.name for key in expected.event_keys
    }
    own = {key.event.id: row.self_time_ns for key, row in ours.metrics.items()}
    assert own == {key.event.id: row.self_time_ns for key, row in expected.metrics.items()}


def test_an_event_that_holds_a_gpu_up_is_printed_with_its_place(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Six kernels wait as the operator begins, and all have run before it ends."""
    call, operator = (
        SimpleNamespace(id=n, name=name, parent=None, children=[], start_time_ns=0, end_time_ns=end)
        for n, name, end in ((1, "train.py(12): step", 300), (2, "aten::item", 200))
    )
    call.children, operator.parent, operator.start_time_ns = [operator], call, 100
    launches = [("cudaLaunchKernel", "CPU", n, n, 1) for n in range(1, 7)]
    kernels = [("gemm", "CUDA", n, 100 + 10 * n, 10) for n in range(1, 7)]
    after = [("cudaLaunchKernel", "CPU", 7, 190, 1), ("gemm", "CUDA", 7, 195, 1)]
    device_events = [
        SimpleNamespace(
            name=lambda name=name: name,
            device_type=lambda kind=kind: getattr(torch.profiler.DeviceType, kind),
            linked_correlation_id=lambda number=number: number,
            start_ns=lambda start=start: start,
            duration_ns=lambda duration=duration: duration,
        )
        for name, kind, number, start, duration in (*launches, *kernels, *after)
    ]
    results = SimpleNamespace(experimental_event_tree=lambda: [call], events=lambda: device_events)
    evaluation = utils.BasicEvaluation(SimpleNamespace(kineto_results=results))
    assert [str(key) for key in evaluation.get_optimizable_events(1)] == ["aten::item"]
    assert [depth.queue_depth for depth in evaluation.queue_depth_list][:7] == [1, 2, 3, 4, 5, 6, 5]
    printed = capsys.readouterr().out
    assert "aten::item" in printed
    assert "train.py(12): step" in printed
