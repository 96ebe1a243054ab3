"""The operator table and the device's queue, beside torch's own evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import DeviceType, profile
from torch.profiler._utils import BasicEvaluation, EventKey

from pytest_torchmem import analyze
from pytest_torchmem.analysis.events.device_queue import find_device_queue
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.events.operators import self_times
from pytest_torchmem.record.tree.from_profiler import trace_of


def profiled(body: Any, **options: Any) -> Any:
    with profile(profile_memory=True, record_shapes=True, **options) as finished:
        body()
    return finished


def rows_of(finished: Any) -> dict[str, Any]:
    return {row.name: row for row in analyze(finished, "cpu").operators}


def test_calls_and_bytes_are_counted_for_an_operator_and_what_it_calls() -> None:
    x = torch.randn(64, 64)

    def body() -> None:
        x.double()
        torch.zeros(8).double()

    rows = rows_of(profiled(body))
    copy, cast = rows["aten::_to_copy"], rows["aten::to"]
    assert (copy.calls, cast.calls) == (2, 2)
    assert copy.self_allocated_bytes == 0
    assert rows["aten::empty_strided"].self_allocated_bytes == 64 * 64 * 8 + 8 * 8
    assert cast.total_allocated_bytes == copy.total_allocated_bytes == 64 * 64 * 8 + 8 * 8
    assert cast.largest_bytes == 64 * 64 * 8
    assert cast.total_time_ns >= copy.total_time_ns > 0


def test_an_operator_within_one_of_its_name_counts_once() -> None:
    x = torch.randn(1000)
    rows = rows_of(profiled(x.sum))
    # Tensor.sum() runs aten::sum, which runs aten::sum.dim_IntList of the same name.
    assert rows["aten::sum"].calls == 2
    assert rows["aten::sum"].total_allocated_bytes == 4


def test_what_ran_at_the_peak_is_named_from_the_outside_in() -> None:
    x = torch.randn(64, 64)

    def body() -> None:
        with torch.profiler.record_function("attention"):
            x.double()

    running = analyze(profiled(body), "cpu").running_at_peak
    assert running.names[:2] == ("attention", "aten::to")
    assert list(running.durations_ns) == sorted(running.durations_ns, reverse=True)


class KinetoEvent:
    """A stand-in for the profiler's flat event; torch's evaluation takes ``name`` as it is."""

    def __init__(self, name: str, device: Any, correlation: int, start: int, duration: int) -> None:
        self.name = name
        self.device_type = lambda: device
        self.linked_correlation_id = lambda: correlation
        self.start_ns = lambda: start
        self.duration_ns = lambda: duration


@pytest.fixture(scope="module")
def with_kernels() -> tuple[Any, Any]:
    """A profile of the CPU with launches and kernels written by hand into its stretch of time."""
    x = torch.randn(32, 32)
    finished = profiled(lambda: [x @ x for _ in range(6)])
    trace = trace_of(finished, "cpu")
    # Moments are starts of events, so that some event is sure to see each depth.
    starts = np.unique(trace.events["start_ns"])
    at = starts[np.linspace(0, len(starts) - 1, 20).astype(int)].tolist()
    flat = []
    for number, (launched, begun) in enumerate([(2, 6), (3, 8), (4, 10), (13, 14), (15, 17)]):
        flat.append(KinetoEvent("cudaLaunchKernel", DeviceType.CPU, number, at[launched], 1))
        duration = at[begun + 1] - at[begun]
        flat.append(KinetoEvent("gemm", DeviceType.CUDA, number, at[begun], duration))
    results = SimpleNamespace(
        experimental_event_tree=finished.profiler.kineto_results.experimental_event_tree,
        events=lambda: flat,
    )
    return finished, results


def ours_of(results: Any) -> Any:
    flat = [
        SimpleNamespace(**{**vars(event), "name": lambda name=event.name: name})
        for event in results.events()
    ]
    stand_in = SimpleNamespace(
        use_device="cuda",
        kineto_results=SimpleNamespace(
            experimental_event_tree=results.experimental_event_tree, events=lambda: flat
        ),
    )
    return build_op_tree(trace_of(stand_in, "cpu"))


def test_self_time_queue_depth_and_idle_time_are_those_of_torchs_evaluation(
    with_kernels: tuple[Any, Any],
) -> None:
    _, results = with_kernels
    evaluation = BasicEvaluation(SimpleNamespace(kineto_results=results))  # type: ignore[arg-type]
    tree = ours_of(results)
    queue, own_time = find_device_queue(tree), self_times(tree)
    theirs = {
        (key.event.name, key.event.start_time_ns): metrics
        for key, metrics in evaluation.metrics.items()
    }
    assert isinstance(next(iter(evaluation.metrics)), EventKey)
    events = tree.trace.events
    for row in range(len(events)):
        name = tree.trace.strings[events["name"][row]]
        metrics = theirs.get((name, int(events["start_ns"][row])))
        if metrics is None:
            continue
        assert own_time[row] == metrics.self_time_ns, name
        assert queue.depth[row] == metrics.queue_depth, name
        assert queue.idle_ns[row] == metrics.idle_time_ns, name
    assert queue.depth.max() == 3
    assert queue.idle_ns.max() > 0


def test_without_kernels_queue_and_idle_time_are_zero() -> None:
    x = torch.randn(4)
    queue = find_device_queue(build_op_tree(trace_of(profiled(lambda: x + x), "cpu")))
    assert not np.any(queue.depth)
    assert not np.any(queue.idle_ns)
