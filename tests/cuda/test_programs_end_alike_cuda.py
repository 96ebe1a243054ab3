"""A program on a GPU ends as it does without a measurement: what it reads, and what it leaves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import MiB
from tests.measured import measured
from tests.record.undisturbed.state import ended, state

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROGRAMS: dict[str, Callable[[], Callable[[], object]]] = {}
#: These stand for all in a run that is not nightly.
BY_DAY = ("a_captured_graph", "a_history_of_its_own", "its_own_peaks", "no_room", "random_numbers")


def program(function: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[function.__name__] = lambda: function
    return function


def ones(count: int = MiB) -> torch.Tensor:
    return torch.ones(count, device="cuda")


@program
def a_captured_graph() -> object:
    static, side = ones(256), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        static * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = static * 2 + 1
        inside = torch.cuda.is_current_stream_capturing()
    static.fill_(3)
    graph.replay()
    return inside, torch.cuda.is_current_stream_capturing(), result.sum()


@program
def two_graphs_in_one_pool() -> object:
    pool, results = torch.cuda.graph_pool_handle(), []
    before = torch.cuda.memory_reserved()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            results.append(ones(1000) + 1)
    for graph in graphs:
        graph.replay()
    return torch.cuda.memory_reserved() - before, [r.sum() for r in results]


@program
def a_graphed_module() -> object:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
    x = torch.randn(4, 16, device="cuda", requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    graphed(x).sum().backward()
    return [p.grad is not None for p in model.parameters()]


@program
def a_pool_of_its_own() -> object:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = ones(3 * MiB)
    segments = pool.snapshot()
    return [(s["total_size"], [b["state"] for b in s["blocks"]]) for s in segments], kept.numel()


@program
def streams_and_events() -> object:
    side, begin, end = torch.cuda.Stream(), torch.cuda.Event(True), torch.cuda.Event(True)
    begin.record()
    with torch.cuda.stream(side):
        within = torch.cuda.current_stream() == side
        x = ones() * 2
        x.record_stream(torch.cuda.default_stream())
    end.record(side)
    end.synchronize()
    return within, end.query(), begin.elapsed_time(end) >= 0, side.query()


@program
def a_history_of_its_own() -> object:
    """What it asked for, in order: none of it is anybody else's."""
    torch.cuda.memory._record_memory_history(max_entries=10_000)
    try:
        kept = [ones(1000 * n) for n in range(1, 5)]
        del kept[1]
        kept[0].mul(2).sum().item()
        found = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return [(e["action"], e["size"], bool(e.get("frames"))) for e in found]


@program
def its_own_peaks() -> object:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = ones(5 * MiB)
    y = x * 2
    del x
    stats = torch.cuda.memory_stats()
    return (
        torch.cuda.max_memory_allocated() - before,
        torch.cuda.memory_allocated() - before,
        stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"],
        y.sum(),
    )


@program
def counts_of_its_allocations() -> object:
    before = torch.cuda.memory_stats()
    for n in range(5):
        ones(n + 1)
    after = torch.cuda.memory_stats()
    keys = ("allocation.all.allocated", "allocation.all.freed", "num_alloc_retries", "num_ooms")
    return [after[key] - before[key] for key in keys]


@program
def no_room() -> object:
    kept = ones()
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        # The text has the bytes that are in use by now.
        return type(error), str(error).partition("GPU ")[0], kept.sum()
    return None


@program
def no_room_within_a_fraction() -> object:
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        return "out of memory" in str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return None


@program
def random_numbers() -> object:
    torch.cuda.manual_seed(7)
    first = torch.randn(100, device="cuda")
    kept = torch.cuda.get_rng_state()
    second = torch.randn(100, device="cuda")
    torch.cuda.set_rng_state(kept)
    again = torch.randn(100, device="cuda")
    return first, second, torch.equal(second, again), nn.functional.dropout(ones(64)).sum()


@program
def random_numbers_in_a_graph() -> object:
    torch.cuda.manual_seed(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = torch.randn(8, device="cuda")
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append(x.cpu())
    return drawn


@program
def another_device() -> object:
    if torch.cuda.device_count() < 2:
        return None
    with torch.cuda.device(1):
        x = torch.ones(1000, device="cuda")
        y = x.to("cuda:0")
    torch.cuda.set_device(1)
    try:
        z = ones(10)
    finally:
        torch.cuda.set_device(0)
    return x.device.index, y.device.index, z.device.index, torch.cuda.can_device_access_peer(0, 1)


@program
def what_is_given_back() -> object:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    x = ones(20 * MiB)
    within = torch.cuda.memory_reserved() - before
    del x
    kept = torch.cuda.memory_reserved() - before
    torch.cuda.empty_cache()
    return within, kept, torch.cuda.memory_reserved() - before


@program
def pinned_memory() -> object:
    host = torch.randn(1000).pin_memory()
    there = host.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return host.is_pinned(), torch.equal(there.cpu(), host)


@program
def raw_memory() -> object:
    before = torch.cuda.memory_allocated()
    pointer = torch.cuda.caching_allocator_alloc(4096)
    within = torch.cuda.memory_allocated() - before
    torch.cuda.caching_allocator_delete(pointer)
    return within, torch.cuda.memory_allocated() - before


@program
def frozen_objects() -> object:
    kept = [ones(10) for _ in range(3)]
    gc.freeze()
    try:
        kept.append(ones(20))
        return [t.sum() for t in kept], gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@program
def when_tensors_die() -> object:
    died: list[str] = []
    x = ones(10)
    weakref.finalize(x, died.append, "x")
    y = x * 2
    weakref.finalize(y, died.append, "y")
    cycle: list[Any] = [y]
    cycle.append(cycle)
    del x
    seen = [*died]
    del y, cycle
    seen += ["|", *died]
    gc.collect()
    return seen, died


@program
def its_own_profiler() -> object:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        (ones(100) * 2).sum()
    return sorted(
        (event.name, event.device_memory_usage)
        for event in profile.events()
        if event.name.startswith("aten::")
    )


@program
def half_precision() -> object:
    model = nn.Linear(16, 4, device="cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(ones(16).expand(2, 16)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss, scaler.get_scale(), torch.is_autocast_enabled("cuda")


@program
def checkpointed_with_dropout() -> object:
    block = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)).cuda()
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    return x.grad


@program
def saved_on_the_host() -> object:
    x = torch.randn(64, device="cuda", requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x).sin().sum()
    y.backward()
    return x.grad


@program
def an_optimizer_that_is_captured() -> object:
    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    graph.replay()
    return [(before[k] - v).abs().sum() > 0 for k, v in model.state_dict().items()]


@program
def an_error_in_backward() -> object:
    x = ones(8).requires_grad_()
    y = x * 2
    y.register_hook(lambda _: 1 / 0)
    y.sum().backward()
    return None


@program
def a_measurement_within() -> object:
    import pytest_torchmem

    with pytest_torchmem.measure("cuda") as inner:
        ones(1000)
    return inner.peak.total


def gpu_state() -> dict[str, object]:
    """What is the same on the GPU before a program and after it."""
    return {
        "device": torch.cuda.current_device(),
        "stream": torch.cuda.current_stream() == torch.cuda.default_stream(),
        "captures": torch.cuda.is_current_stream_capturing(),
        "history": torch._C._cuda_isHistoryEnabled(),
        "settings": torch.cuda.memory._snapshot()["allocator_settings"],
        "fraction": torch.cuda.get_per_process_memory_fraction(),
        "modes": (
            torch.is_autocast_enabled("cuda"),
            torch.get_autocast_dtype("cuda"),
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark,
            torch.cuda.get_sync_debug_mode(),
        ),
        "random numbers": torch.cuda.get_rng_state().tolist(),
        "allocated": torch.cuda.memory_allocated(),
    }


def end_of(
    name: str, run: Callable[[Callable[[], object]], object]
) -> tuple[object, dict[str, object]]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.manual_seed_all(0)
    result, left = ended(name, run, PROGRAMS)
    gc.collect()
    return result, {**left, **gpu_state()}


def named(name: str) -> Any:
    return name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", map(named, PROGRAMS))
def test_a_program_on_a_gpu_ends_as_without_a_measurement(name: str) -> None:
    on_gpu = lambda body: measured(body, "cuda")  # noqa: E731
    # The first runs import, and make workspaces and what else stays.
    end_of(name, lambda body: body())
    on_gpu(lambda: None)
    alone, expected = end_of(name, lambda body: body())
    within, found = end_of(name, on_gpu)
    assert within == alone
    assert {key: value for key, value in found.items() if value != expected[key]} == {}


@pytest.mark.usefixtures("cuda")
def test_a_state_that_stays_changed_would_be_noticed() -> None:
    before = {**state(), **gpu_state()}
    kept = ones(1000)
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        after = {**state(), **gpu_state()}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    changed = [key for key, value in after.items() if value != before[key]]
    assert changed == ["fraction", "allocated"]
    del kept
