"""Work on streams: what it takes, when it is done, and what a graph has of it."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"


def square(size=64):
    return torch.ones(size, size, device=CUDA)


def picture():
    return torch.ones(1, 4, 8, 8, device=CUDA), torch.ones(4, 4, 3, 3, device=CUDA)


WORK = {
    "a kernel": lambda: square().add_(1),
    "a product": lambda: square() @ square(),
    "a convolution": lambda: functional.conv2d(*picture()),
    "a transform": lambda: torch.fft.fft(torch.ones(64, dtype=torch.complex64, device=CUDA)),
    "a factorization": lambda: torch.linalg.cholesky(torch.eye(4, device=CUDA)),
}


def elapsed_ms(work):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.parametrize("name", WORK)
def test_each_piece_of_work_takes_time_and_the_same_in_each_run(name):
    work = WORK[name]
    work()
    nothing = elapsed_ms(lambda: None)
    first, second = elapsed_ms(work), elapsed_ms(work)
    assert 0 < nothing < first == pytest.approx(second, rel=1e-3)


def test_work_that_the_host_gives_after_it_has_waited_is_later_on_each_stream():
    busy = torch.cuda.Stream()
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(busy):
        for _ in range(100):
            square()
    first.record(busy)
    first.synchronize()
    square()
    second.record()
    second.synchronize()
    assert first.elapsed_time(second) > 0


def test_memory_that_a_product_on_another_stream_reads_is_not_used_again_meanwhile():
    side = torch.cuda.Stream()
    weight = square(256)
    with torch.cuda.stream(side):
        weight @ weight  # the workspace of that stream
    for work in (lambda x: x + weight, lambda x: x @ weight):
        given = square(256)
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            out = work(given)
        given.record_stream(side)
        address = given.data_ptr()
        del given
        assert square(256).data_ptr() != address
        torch.cuda.synchronize()
        assert square(256).data_ptr() == address
        del out


@pytest.mark.parametrize("has_work", [False, True])
def test_a_graph_without_work_is_told_by_torch_and_one_of_a_product_is_not(has_work):
    given = square()
    given @ given
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            if has_work:
                given @ given
    assert ["empty" in str(each.message) for each in caught] == [True][has_work:]


def test_a_graph_computes_what_its_kernels_gave_a_size():
    given = torch.tensor([-1.0, 2.0], device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.maximum(given.mul_(0.5), given.abs(), out=torch.empty(0, device=CUDA))
    graph.replay()
    assert out.tolist() == [0.5, 1.0]
    given.fill_(-8)
    graph.replay()
    assert out.tolist() == [4.0, 4.0]


STARTS = """
import ctypes, torch

driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(-1)
assert driver.cuDeviceGetCount(ctypes.byref(count)) == 3  # CUDA_ERROR_NOT_INITIALIZED
has_context = torch._C._cuda_hasPrimaryContext
torch.cuda.init()
assert driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value == 2
assert [has_context(0), has_context(1)] == [False, False]
there = torch.ones(1, device="cuda:1")
torch.ones(3).pin_memory().copy_(there)
assert [has_context(0), has_context(1)] == [False, True]
torch.ones(1, device="cuda:0")
assert has_context(0)
"""


def test_a_program_begins_with_a_device_when_it_uses_it():
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100x2", "--")
    done = subprocess.run(
        [*simulate, sys.executable, "-c", STARTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.compiles
def test_inductor_pads_no_product_that_has_to_be_copied_for_it():
    from torch._dynamo.utils import counters
    from torch._inductor.fx_passes.pad_mm import get_pad_cache
    from torch._inductor.utils import fresh_cache

    left, right = (torch.ones(4095, 4095, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    counters.clear()
    get_pad_cache.cache_clear()
    with fresh_cache():  # with the choices that earlier runs kept in files nothing is timed
        torch.compile(lambda x, y: x @ y)(left, right)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = torch.compile(lambda x, y: x @ y)(left, right)
    assert counters["inductor"]["pad_mm_bench"] == 1
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(out.nbytes, abs=1 << 20)


def test_cudnn_keeps_its_first_plan_where_plans_are_timed():
    given = torch.ones(8, 64, 56, 56, device=CUDA)
    weight = torch.ones(64, 64, 3, 3, device=CUDA)

    def peak_bytes(is_timed: bool) -> int:
        with torch.backends.cudnn.flags(benchmark=is_timed):
            functional.conv2d(given, weight)
            torch.cuda.reset_peak_memory_stats()
            before_bytes = torch.cuda.memory_allocated()
            functional.conv2d(given, weight)
        return torch.cuda.max_memory_allocated() - before_bytes

    assert peak_bytes(True) == peak_bytes(False) > 0
