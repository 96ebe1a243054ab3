"""Measuring on a GPU: against the caching allocator's own counters. Skipped without one."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from pytest_torchmem import MiB, Result
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.devices import workspace_bytes
from pytest_torchmem.values.contributors import Phase
from tests.cuda.bodies import settle


def measured(device: torch.device, body: Callable[[], object]) -> Result:
    measurement = BodyMeasurement(str(device))
    measurement.start()
    body()
    return measurement.stop()


def training(device: torch.device) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(300, 300, device=device) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(1000, 300, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


def test_sizes_are_those_requested_not_those_of_blocks(cuda: torch.device) -> None:
    result = measured(cuda, lambda: torch.ones(MiB + 1, dtype=torch.uint8, device=cuda))
    assert result.peak.total == MiB + 1
    assert result.counters is not None
    assert result.counters.allocated >= MiB + 512
    assert result.notes == ()


ASKING = """
import torch
from pytest_torchmem.record.devices import find_device
find_device()
print(torch.cuda.memory_reserved())
torch.empty(24 * 2**20, dtype=torch.uint8, device="cuda")
find_device()
print(torch.cuda.memory_reserved() >= 24 * 2**20)
"""


@pytest.mark.usefixtures("cuda")
def test_asking_for_the_device_reserves_nothing_and_frees_nothing_of_the_program() -> None:
    asked = subprocess.run(
        [sys.executable, "-c", ASKING], capture_output=True, text=True, check=True, timeout=60
    )
    assert asked.stdout.split() == ["0", "True"]


def test_the_footprint_is_the_allocators_requested_bytes_above_what_was_there(
    cuda: torch.device,
) -> None:
    step = training(cuda)
    torch._C._cuda_clearCublasWorkspaces()
    base = torch.cuda.memory_stats(cuda)["requested_bytes.all.current"]
    result = measured(cuda, step)
    assert result.counters is not None
    # All that was there before is touched by the step, so the two count the same storages.
    assert result.peak.total == result.counters.requested
    assert result.peak.total > base


def test_the_running_total_of_events_is_the_allocators_own(cuda: torch.device) -> None:
    assert measured(cuda, training(cuda)).unexplained_bytes == 0


def test_the_same_step_needs_the_same_bytes_whatever_ran_before(cuda: torch.device) -> None:
    step = training(cuda)
    first = measured(cuda, step)
    torch.ones(50 * MiB, device=cuda) @ torch.ones(50 * MiB, device=cuda)
    assert measured(cuda, step).peak.total == first.peak.total


def test_workspaces_of_cublas_have_a_category_of_their_own(cuda: torch.device) -> None:
    a = torch.ones(512, 512, device=cuda)
    result = measured(cuda, lambda: a @ a)
    gemm, matmul = workspace_bytes(cuda)
    assert result.peak.workspace in {n * gemm + m * matmul for n in (0, 1, 2) for m in (0, 1)}
    assert result.peak.unknown == 0
    assert result.peak.temporary == 512 * 512 * 4


def test_what_a_layer_keeps_is_an_activation(cuda: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).to(cuda)
    batch = torch.randn(64, 256, device=cuda)
    result = measured(cuda, lambda: model(batch).sum().backward())
    assert result.peak.activation == 64 * 256 * 4
    assert result.peak.parameter == (256 * 256 + 256) * 4


def test_a_block_that_another_stream_still_uses_counts_until_the_program_frees_it(
    cuda: torch.device,
) -> None:
    side = torch.cuda.Stream(cuda)

    def body() -> None:
        a = torch.ones(4 * MiB, device=cuda)
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000_000)
        a.record_stream(side)
        del a
        torch.ones(4 * MiB, device=cuda)

    settle()
    before = torch.cuda.memory_allocated(cuda)
    result = measured(cuda, body)
    assert result.peak.total == 16 * MiB
    assert result.counters is not None
    # The allocator's own figures have both, for as long as the stream is busy.
    assert result.counters.active == before + 32 * MiB
    assert result.unexplained_bytes == 0


def test_running_out_of_memory_is_an_event_that_says_what_was_live(cuda: torch.device) -> None:
    measurement = BodyMeasurement(str(cuda))
    measurement.start()
    kept = torch.ones(10 * MiB, dtype=torch.uint8, device=cuda)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=cuda)
    measurement.stop()
    (live,) = measurement.profile_so_far().out_of_memory
    assert live[0].size_bytes == kept.nbytes


class Circle:
    """Garbage as soon as nobody else refers to it, until the collector finds it."""

    def __init__(self, thing: object) -> None:
        self.itself, self.thing = self, thing


@pytest.mark.parametrize("on_the_gpu", [False, True])
def test_garbage_goes_before_a_body_where_it_may_hold_memory_of_the_gpu(
    cuda: torch.device, on_the_gpu: bool
) -> None:
    device = cuda if on_the_gpu else "cpu"
    torch.ones(64, 64, device=cuda) @ torch.ones(64, 64, device=cuda)
    gc.collect()
    measured(cuda, lambda: torch.ones(3, device=cuda))
    with gc_paused():
        garbage = weakref.ref(Circle(torch.ones(MiB, device=device)))
        result = measured(cuda, lambda: torch.ones(3, device=cuda))
        assert (garbage() is None) == on_the_gpu
    assert result.counters is not None
    assert result.counters.requested == 12
    gc.collect()


def test_what_a_backward_pass_within_a_transform_makes_has_the_line_of_its_call(
    cuda: torch.device,
) -> None:
    x = torch.randn(256, 256, device=cuda)
    result = measured(
        cuda,
        lambda: torch.func.grad(lambda y: torch.tanh(y @ y).sum())(x),  # the call
    )
    lines = Path(__file__).read_text().splitlines()
    call = next(n for n, text in enumerate(lines, 1) if text.endswith(",  # the call"))
    made = [found for found in result.peak.live if found.phase is Phase.BACKWARD]
    assert made
    assert {found.source and found.source.line for found in made} == {call}


Run = Callable[[Callable[[], None]], object]


@contextmanager
def _thread() -> Iterator[Run]:
    def run(work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    yield run


@contextmanager
def _pool_from_before() -> Iterator[Run]:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        yield lambda work: pool.submit(work).result()


@pytest.mark.parametrize("begin", [_thread, _pool_from_before])
def test_what_another_thread_makes_has_its_line(
    cuda: torch.device, begin: Callable[[], AbstractContextManager[Run]]
) -> None:
    kept = [torch.ones(MiB, device=cuda)]

    def work() -> None:
        kept.append(torch.ones(MiB, device=cuda))

    def body() -> None:
        kept.append(torch.ones(MiB, device=cuda))
        run(work)

    with begin() as run:
        result = measured(cuda, body)
    sources = (found.source for found in result.peak.live)
    places = {(source.function, source.line) for source in sources if source}
    assert places == {(f.__name__, f.__code__.co_firstlineno + 1) for f in (body, work)}
    assert result.peak.total == 8 * MiB
    assert result.notes == ()


def test_each_segment_is_told_by_the_line_that_torchs_history_has(cuda: torch.device) -> None:
    def body() -> None:
        kept = [torch.ones(3 * MiB, dtype=torch.uint8, device=cuda) for _ in range(9)]
        kept[::2] = [torch.empty(0, device=cuda)] * 5
        large = torch.ones(30 * MiB, dtype=torch.uint8, device=cuda)
        del large
        torch.zeros(200, device=cuda).add(1)
        torch.ones(25 * MiB, dtype=torch.uint8, device=cuda).mul(2)

    gc.collect()
    measurement = BodyMeasurement(str(cuda))
    measurement.start(empties_cache=True)
    torch.cuda.memory._record_memory_history(stacks="python")
    try:
        body()
        torch.cuda.synchronize()
        traces = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    measurement.stop()
    expected = {
        entry["addr"]: (entry["size"], entry["frames"][0]["line"])
        for entry in traces
        if entry["action"] == "segment_alloc"
    }
    told = {
        segment.address: (segment.size_bytes, made.source.line if made.source else 0)
        for segment, made in measurement.reserved()
    }
    assert len(expected) >= 3
    assert told == expected
