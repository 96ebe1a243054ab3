"""What programs see on a simulated GPU: run with ``torchmem simulate --gpu H100x2 -- pytest``."""

import ctypes
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import pytest_torchmem
from pytest_torchmem.record.environment import environment
from pytest_torchmem.values.units import GiB, KiB, MiB

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"


def sees(pytester, code, *command):
    """Return the lines that a program prints where another GPU is simulated."""
    path = pytester.makepyfile(program=code)
    run = pytester.run(*(sys.executable, "-m", "pytest_torchmem", "simulate"), *command, path)
    assert run.ret == 0, run.stderr.str()
    return run.outlines


def test_another_gpu_has_its_own_properties(pytester):
    code = """
        import torch
        found = torch.cuda.get_device_properties(0)
        print(torch.cuda.device_count(), found.name, found.major, found.minor, found.L2_cache_size)
        x = torch.ones(64, 64, device="cuda")
        y = x @ x
        print(torch.cuda.memory_stats()["requested_bytes.all.peak"] - x.nbytes - y.nbytes)
    """
    lines = sees(pytester, code, "--gpu", "A100-40GBx3", "--", "python")
    assert lines[-2] == f"3 simulated A100-40GB 8 0 {40 * MiB}"
    assert int(lines[-1]) == 8519680  # cuBLAS's workspace before Hopper


def from_nvml(function, *arguments, count=1, kind=ctypes.c_uint):
    out = (kind * count)()
    assert getattr(ctypes.CDLL("libnvidia-ml.so.1"), function)(*arguments, out) == 0
    return list(out)


def test_the_management_library_answers_as_for_an_idle_gpu():
    (handle,) = from_nvml("nvmlDeviceGetHandleByIndex_v2", 0, kind=ctypes.c_void_p)
    gpu = ctypes.c_void_p(handle)
    assert from_nvml("nvmlDeviceGetUtilizationRates", gpu, count=2) == [0, 0]
    assert 20 < from_nvml("nvmlDeviceGetTemperature", gpu, 0)[0] < 90
    assert from_nvml("nvmlDeviceGetPowerUsage", gpu)[0] > 10_000
    assert from_nvml("nvmlDeviceGetClockInfo", gpu, 1)[0] > 1_000
    total, free, used = from_nvml("nvmlDeviceGetMemoryInfo", gpu, count=3, kind=ctypes.c_ulonglong)
    assert (free, total) == torch.cuda.mem_get_info(0)
    assert used == total - free


def test_the_management_library_lists_this_process_with_its_memory():
    (handle,) = from_nvml("nvmlDeviceGetHandleByIndex_v2", 0, kind=ctypes.c_void_p)
    gpu, count = ctypes.c_void_p(handle), ctypes.c_uint(0)
    held = torch.ones(1024, device=CUDA)
    ask = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetComputeRunningProcesses_v3
    entries = (ctypes.c_ulonglong * 6)()
    assert ask(gpu, ctypes.byref(count), None) == 7  # no room for one
    assert count.value == 1
    count.value = 2
    assert ask(gpu, ctypes.byref(count), entries) == 0
    free, total = torch.cuda.mem_get_info(0)
    assert list(entries[:2]) == [os.getpid(), total - free]
    assert (count.value, entries[3:]) == (1, [0, 0, 0])
    assert held.nbytes <= entries[1]


@pytest.mark.nightly("1-1", "0,7,1-1", "-0")
@pytest.mark.parametrize(("visible", "count"), [("1,0", 2), ("1", 1), ("0,7,1", 1), ("", 0)])
def test_a_program_may_hide_devices_from_itself(pytester, visible, count):
    code = f"""
import os
os.environ["CUDA_VISIBLE_DEVICES"] = "{visible}"
import torch
held = [torch.ones(1 << 20, device=f"cuda:{{n}}") for n in range(torch._C._cuda_getDeviceCount())]
print(len(held), torch.cuda.device_count(), torch.cuda.is_available())
"""
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100x2", "--")
    run = pytester.run(*simulate, sys.executable, pytester.makepyfile(code))
    assert run.outlines == [f"{count} {count} {count > 0}"]


def test_a_batch_tells_the_host_that_its_arguments_were_right():
    info = ctypes.c_int(7)
    batched = ctypes.CDLL(None).cublasSgeqrfBatched
    assert batched(None, 2, 2, None, 2, None, ctypes.byref(info), 1) == info.value == 0


# torch is compiled for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0; the others run the code of the one below.
@pytest.mark.nightly("7.5", "8.6", "8.9", "10.3")
@pytest.mark.parametrize("capability", ["7.5", "8.6", "8.9", "10.3", "12.0"])
def test_what_sorts_and_searches_runs_on_each_generation(pytester, capability):
    code = """
        import torch
        x = torch.tensor([2, 0, 1], device="cuda")
        print(x.nonzero().tolist(), x.unique(), x.cumsum(0).tolist())
        torch.randperm(9, device="cuda")
    """
    gpu = f"capability={capability},memory=8GiB,processors=8"
    lines = sees(pytester, code, "--gpu", gpu, "--", "python")
    assert lines[-1] == "[[0], [2]] tensor([0, 1, 2], device='cuda:0') [2, 2, 3]"


@pytest.mark.nightly("xdist")
@pytest.mark.parametrize("arguments", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_pytest_starts_again_and_measures(pytester, arguments):
    pytester.makepyfile(
        """
        import os, pytest, torch

        @pytest.mark.memory_budget("4MiB", device="cuda")
        def test_too_large():
            assert torch.cuda.get_device_name() == "simulated L4"
            torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        """
    )
    plain = ("-p", "no:asyncio", "-p", "no:cacheprovider")
    run = pytester.runpytest_subprocess("--torchmem-simulate=L4", *plain, *arguments)
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*torchmem, simulated L4, torch *", "*1 failed*"])


def test_a_signal_ends_pytest_as_it_always_does(pytester):
    pytester.makepyfile(f"import os\n\ndef test_it(): os.kill(os.getpid(), {int(signal.SIGTERM)})")
    run = pytester.runpytest_subprocess("--torchmem-simulate=L4", "-p", "no:asyncio")
    assert run.ret == -signal.SIGTERM


def test_kernel_caches_of_real_gpus_are_left_alone():
    assert os.environ["USE_PYTORCH_KERNEL_CACHE"] == "0"
    assert "pytest-torchmem" in os.environ["TRITON_CACHE_DIR"]
    torch.special.bessel_j0(torch.ones(4, device=CUDA))  # a kernel that NVRTC would compile


def test_all_that_triton_links_with_is_there():
    triton = pytest.importorskip("triton")
    source = Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c"
    called = set(re.findall(r"\b(cu[A-Z]\w+)\(", source.read_text()))
    assert "cuModuleLoadData" in called
    runtime = ctypes.CDLL("libcuda.so.1")
    # Those for tensor maps it looks up itself, and only where they are used.
    called = {n for n in called if not n.startswith("cuTensorMap") and not n.endswith("Handle")}
    assert not [name for name in called if not hasattr(runtime, name)]


def test_memory_that_is_handed_out_again_reads_zero():
    first = torch.full((1000,), 7.0).to(CUDA)
    address = first.data_ptr()
    del first
    again = torch.empty(1000, device=CUDA)
    assert again.data_ptr() == address
    assert not again.cpu().any()


def test_what_was_copied_is_read_back():
    values = torch.arange(100_000)
    there = values.to(CUDA)
    assert torch.equal(there.clone().cpu(), values)
    assert torch.equal(there[500:90_000].cpu(), values[500:90_000])
    there[10:20].copy_(torch.zeros(10, dtype=torch.int64))
    assert there.cpu()[8:22].tolist() == [8, 9, *[0] * 10, 20, 21]


def test_a_copy_on_the_gpu_takes_the_place_of_what_was_there():
    source, target = torch.empty(MiB, device=CUDA), torch.ones(MiB).to(CUDA)
    source[: MiB // 2].copy_(torch.full((MiB // 2,), 2.0))
    target.copy_(source)
    assert target.cpu().sum() == 2 * (MiB // 2)


def test_addresses_rise():
    torch.cuda.empty_cache()
    blocks = [torch.empty(30 * MiB, dtype=torch.uint8, device=CUDA) for _ in range(4)]
    addresses = [block.data_ptr() for block in blocks]
    assert addresses == sorted(addresses)


def test_memory_of_the_size_of_the_gpu_costs_the_host_nothing():
    def resident_bytes():
        with Path("/proc/self/statm").open() as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    large = torch.zeros(20 * GiB, dtype=torch.uint8, device=CUDA)
    copied = large.clone()
    assert resident_bytes() - before < 100 * MiB
    del large, copied
    torch.cuda.empty_cache()


def test_the_pool_of_the_driver_counts_what_is_used_and_keeps_what_is_freed(pytester):
    pytester._monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    code = """
        import torch
        from torch import cuda

        def held():
            sizes = cuda.memory_allocated, cuda.memory_reserved
            peaks = cuda.max_memory_allocated, cuda.max_memory_reserved
            return [size() >> 20 for size in (*sizes, *peaks)]

        x, y = (torch.empty(10 << 20, dtype=torch.uint8, device="cuda") for _ in range(2))
        del x
        cuda.synchronize()
        print(*held())
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        print(*held())
    """
    lines = sees(pytester, code, "--gpu", "L4", "--", "python")
    assert lines[-2:] == ["10 20 20 20", "10 10 10 10"]


@pytest.mark.parametrize("freed_first", [0, 1])
def test_free_addresses_side_by_side_are_one(freed_first):
    torch.cuda.empty_cache()
    blocks = [torch.empty(3 * GiB, dtype=torch.uint8, device=CUDA) for _ in range(3)]
    first, second, third = (block.data_ptr() for block in blocks)
    assert (second, third) == (first + 3 * GiB, first + 6 * GiB)
    for number in (freed_first, 0):
        del blocks[number]
        torch.cuda.empty_cache()
    assert torch.empty(6 * GiB, dtype=torch.uint8, device=CUDA).data_ptr() == first


def test_memory_runs_out_at_the_size_of_the_gpu():
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError, match=f"total capacity of {total / GiB:.2f} GiB"):
        torch.empty(total + 1, dtype=torch.uint8, device=CUDA)


def test_memory_that_is_given_back_is_free_again():
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    for _ in range(2):
        large = torch.empty(total // 4 * 3, dtype=torch.uint8, device=CUDA)
        assert torch.cuda.mem_get_info()[0] < total // 4
        del large
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info() == (free, total)


def test_the_driver_gives_whole_pages_of_two_mebibytes():
    def driver(name, *arguments):
        assert getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments) == 0

    def taken_bytes():
        return total - torch.cuda.mem_get_info()[0]

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert (total - free) % (2 * MiB) == 0
    pieces = []
    # Small pieces share a page; a large one has its pages alone.
    for size_bytes, pages in ((1, 1), (MiB, 1), (MiB + 1, 2), (5 * MiB, 5), (2 * MiB, 6)):
        pieces.append(ctypes.c_uint64())
        driver("cuMemAlloc_v2", ctypes.byref(pieces[-1]), ctypes.c_size_t(size_bytes))
        assert taken_bytes() == total - free + pages * 2 * MiB
    for piece in pieces:
        driver("cuMemFree_v2", piece)
    assert torch.cuda.mem_get_info() == (free, total)
    granularity, on_the_device = ctypes.c_size_t(), (ctypes.c_int * 16)(1, 0, 1, 0)
    for minimum_or_recommended in (0, 1):
        arguments = ctypes.byref(granularity), on_the_device, minimum_or_recommended
        driver("cuMemGetAllocationGranularity", *arguments)
        assert granularity.value == 2 * MiB


def test_a_host_that_waits_for_a_stream_waits_for_what_that_one_waits_for():
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.ones(1000, device=CUDA)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert not event.query()
    torch.cuda.current_stream().synchronize()
    assert event.query()


@pytest.mark.parametrize("of_stream", [False, True])
def test_a_host_that_asks_again_and_again_waits(of_stream):
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.ones(1000, device=CUDA)
        event.record()
    asked = stream if of_stream else event
    answers = [asked.query() for _ in range(100)]
    assert answers == [False] * 99 + [True]
    assert event.query()


def test_what_another_stream_uses_stays_until_the_host_waits():
    side = torch.cuda.Stream()
    block = torch.empty(3 * MiB, dtype=torch.uint8, device=CUDA)
    address = block.data_ptr()
    with torch.cuda.stream(side):
        block.add_(1)
    block.record_stream(side)
    del block
    assert torch.empty(3 * MiB, dtype=torch.uint8, device=CUDA).data_ptr() != address
    torch.cuda.synchronize()
    torch.empty(1, device=CUDA)  # the allocator looks at its events
    assert torch.empty(3 * MiB, dtype=torch.uint8, device=CUDA).data_ptr() == address


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_run(dimensions):
    layer = getattr(nn, f"Conv{dimensions}d")(4, 8, 3, padding=1).to(CUDA)
    x = torch.zeros(2, 4, *[16] * dimensions, device=CUDA, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("kind", "gates"), [("RNN", 1), ("LSTM", 4), ("GRU", 3)])
def test_rnns_run_and_their_weights_have_their_size(kind, gates, bidirectional):
    torch.cuda.empty_cache()
    layer = getattr(nn, kind)(8, 16, 2, bidirectional=bidirectional).to(CUDA)
    count = sum(parameter.numel() for parameter in layer.parameters())
    assert layer.weight_ih_l0.untyped_storage().nbytes() == 4 * count
    assert layer.weight_ih_l0.shape[0] == 16 * gates
    out, _ = layer(torch.zeros(5, 2, 8, device=CUDA, requires_grad=True))
    out.sum().backward()


def test_attention_of_cudnn_runs():
    q = torch.zeros(2, 4, 128, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION):
        functional.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("name", ["qr", "svd", "eigh", "inv", "cholesky", "det", "eigvals"])
def test_linear_algebra_runs(name):
    getattr(torch.linalg, name)(torch.eye(8, device=CUDA))


def test_what_a_library_would_take_for_itself_makes_a_lower_bound():
    layer, x = nn.LSTM(8, 8).to(CUDA), torch.zeros(5, 2, 8, device=CUDA)
    with pytest_torchmem.measure(device=CUDA) as recurrent:
        layer(x)
    with pytest_torchmem.measure(device=CUDA) as product:
        x + x
    assert not product.result.blind_spots
    (said,) = recurrent.result.blind_spots
    assert said.startswith("the figures are a lower bound: the body called cuDNN")


def fourier(*shape, **options):
    return torch.fft.fftn(torch.zeros(shape, device=CUDA, **options), dim=(-2, -1))


def test_the_scratch_of_a_transform_has_an_upper_end_where_its_level_is_the_peak():
    """NVIDIA's guide: at most 8 complex elements for each, in the precision of the transform."""
    for dtype, element_bytes in ((torch.complex64, 8), (torch.complex128, 16)):
        for _ in range(2):  # torch keeps plans
            with pytest_torchmem.measure(device=CUDA) as step:
                fourier(3, 64, 100, dtype=dtype)
            result, elements = step.result, 3 * 64 * 100
            assert result.peak.total == 2 * elements * element_bytes
            assert result.at_most == 10 * elements * element_bytes
            (said,) = result.blind_spots
            assert said.startswith(result.interval)
    with pytest_torchmem.measure(device=CUDA) as step:
        fourier(3, 64, 100)
        torch.zeros(4 * MiB, device=CUDA)
        with step.region("again") as again:
            fourier(3, 64, 100)
    assert (step.result.at_most, step.result.blind_spots) == (16 * MiB, ())
    assert again.result.interval
    assert again.result.blind_spots


def test_a_limit_within_what_a_transform_may_take_is_not_judged(pytester):
    pytester.makepyfile(
        """
        import pytest, torch

        limits = [pytest.mark.memory_budget(f"{n}MiB", device="cuda") for n in (1, 2, 9, 11)]

        @pytest.mark.parametrize("n", [pytest.param(n, marks=m) for n, m in enumerate(limits)])
        def test_it(n):
            torch.fft.fft(torch.zeros(1024, 128, device="cuda", dtype=torch.complex64))
        """
    )
    run = pytester.runpytest_subprocess("-p", "no:xdist")
    run.assert_outcomes(passed=1, failed=3)
    run.stdout.fnmatch_lines_random(
        [
            "memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the limit of 1.0 MiB*",
            "the limit of 9.0 MiB on memory cannot be judged: *between 2.0 MiB and 10.0 MiB*",
        ]
    )


CONVOLUTIONS = """
import torch
from torch import nn
from pytest_torchmem.simulate.gaps import lower_bound_sentences, gaps_so_far

before = gaps_so_far()
for channels, size in ((30, 16), 256), ((16, 32), 128), ((32, 64), 64):
    layer = nn.Conv2d(*channels, 3, padding="same").cuda().requires_grad_(False)
    x = torch.zeros(1, channels[0], size, size, device="cuda", requires_grad=True)
    for run in (lambda: layer(x), lambda: torch.autograd.grad(out, x, torch.zeros_like(out))[0]):
        torch.cuda.memory._record_memory_history()
        out = run()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        in_plan = [
            event["size"]
            for event in events
            if event["action"] == "alloc"
            and any("convolution" in frame["name"] for frame in event["frames"])
            and event["size"] != out.nbytes
        ]
        print(*in_plan)
print(*lower_bound_sentences(before))
"""


def require_planner():
    if not os.environ.get("SIMULATED_CUDA_CUDNN"):
        pytest.skip("this torch's cuDNN cannot plan without a GPU")


def test_a_device_that_is_not_there_is_named_in_the_words_of_cuda():
    with pytest.raises(RuntimeError, match="CUDA error: invalid device ordinal"):
        torch.zeros(1, device=f"cuda:{torch.cuda.device_count()}")
    assert torch.zeros(1, device=CUDA).item() == 0


def test_a_convolution_has_the_workspace_that_cudnn_plans(pytester):
    """The numbers are those of a real GPU, from a snapshot in ``JasperSolt/EoR_NN``.

    cuDNN 9.10 ranks another plan first for the widest of them, which copies all that it takes and
    returns (30 and 16 channels of 256 x 256 pixels, weights of 3 x 3) into another layout.
    """
    require_planner()
    lines = sees(pytester, CONVOLUTIONS, "--gpu", "A100", "--", "python")
    widest, version = 82880, torch.backends.cudnn.version()
    if version is not None and version // 100 == 910:
        widest = 4 * ((30 + 16) * 256 * 256 + 30 * 16 * 3 * 3) + 16
    assert lines[:6] == [str(widest), "50168", "51328", "84032", "205056", "204928"]
    assert not lines[6]


@pytest.mark.nightly("A100-True")
@pytest.mark.parametrize(("model", "engine_takes"), [("H100", False), ("A100", True)])
def test_attention_of_cudnn_has_the_workspace_that_it_plans(pytester, model, engine_takes):
    """Its frontend adds sums of rows and 32-bit gradients of queries, and Ampere's engine more."""
    require_planner()
    code = """
        import torch
        from torch.nn import attention, functional
        from pytest_torchmem.simulate.gaps import lower_bound_sentences, gaps_so_far

        before = gaps_so_far()
        options = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
        q, k, v = (torch.zeros(2, 8, 512, 64, **options) for _ in range(3))
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.cuda.reset_peak_memory_stats()
        out.backward(torch.zeros_like(out))
        found = torch.cuda.memory_stats()
        held = found["requested_bytes.all.peak"] - found["requested_bytes.all.current"]
        print(held - out.nbytes, *lower_bound_sentences(before))
    """
    (workspace,) = sees(pytester, code, "--gpu", model, "--", "python")[-1].split()
    of_frontend = 2 * 8 * 512 * (64 + 1) * 4
    assert (int(workspace) - of_frontend > MiB) == engine_takes


def test_a_convolution_with_its_activation_is_planned_by_cudnn():
    require_planner()
    shapes = (8, 64, 56, 56), (64, 64, 3, 3), (64,)
    x, weight, bias = (torch.zeros(shape, device=CUDA, dtype=torch.float16) for shape in shapes)
    with pytest_torchmem.measure(device=CUDA) as fused:
        torch.cudnn_convolution_relu(x, weight, bias, (1, 1), (1, 1), (1, 1), 1)
    assert fused.result.peak.workspace > MiB
    assert not any("lower bound" in said for said in fused.result.blind_spots)


def test_without_cudnn_a_convolution_is_a_lower_bound(pytester):
    path = pytester.makepyfile(program=CONVOLUTIONS)
    pytester._monkeypatch.delenv("SIMULATED_CUDA_CUDNN", raising=False)
    run = pytester.run(sys.executable, path)
    assert run.outlines[:6] == 6 * [""]
    assert run.outlines[6].startswith(
        "the figures are a lower bound: the body called cuDNN 6 times"
    )


def test_batch_norm_takes_scratch_memory_only_where_channels_come_last():
    layer, x = nn.BatchNorm2d(16).to(CUDA), torch.zeros(2, 16, 28, 28, device=CUDA)
    spots = []
    for format_ in (torch.contiguous_format, torch.channels_last):
        with pytest_torchmem.measure(device=CUDA) as step:
            layer(x.contiguous(memory_format=format_)).sum().backward()
        spots.append(len(step.result.blind_spots))
    assert spots == [0, 1]


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_convolutions_of_each_kind_have_a_plan(dtype, last, groups):
    format_ = torch.channels_last if last else torch.contiguous_format
    for layer in (
        nn.Conv2d(16, 32, 3, padding=1, groups=groups),
        nn.Conv2d(16, 16, 1, groups=groups),
        nn.Conv2d(16, 16, 3, dilation=2, stride=2, groups=groups),
        nn.ConvTranspose2d(16, 32, 4, 2, 1, groups=groups),
    ):
        weight = layer.to(CUDA, dtype).weight
        weight.data = weight.to(memory_format=format_)
        x = torch.zeros(2, 16, 28, 28, device=CUDA, dtype=dtype).to(memory_format=format_)
        with pytest_torchmem.measure(device=CUDA) as step:
            layer(x.requires_grad_()).sum().backward()
        assert 64 * KiB < step.result.peak.total < 16 * MiB


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_a_tensor_of_one_value_holds_it(dtype):
    assert torch.full((1001,), 7, dtype=dtype, device=CUDA).cpu().eq(7).all()
    ones = torch.ones(1001, dtype=dtype, device=CUDA)
    assert ones.cpu().eq(1).all()
    assert ones.zero_().cpu().eq(0).all()


def test_the_scale_of_a_grad_scaler_is_what_it_was_given():
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    scaler.scale(torch.zeros(1, device=CUDA))
    assert scaler.get_scale() == 1024.0


def test_python_ends_after_autograd_has_dropped_what_it_kept(pytester):
    """On a single core autograd's thread is late nearly always, and Python ended it."""
    code = """
        import os
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        import torch
        torch.ones(8, device="cuda", requires_grad=True).sum().backward()
    """
    for _ in range(2):
        sees(pytester, code, "--gpu", "L4", "--", "python")


def test_strict_fails_a_lower_bound(pytester):
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.memory_budget("1GiB", device="cuda")
        def test_a_recurrent_layer():
            torch.nn.LSTM(8, 8, device="cuda")(torch.zeros(5, 2, 8, device="cuda"))
        """
    )
    plain = ("-p", "no:asyncio", "-p", "no:cacheprovider", "--torchmem-simulate=L4")
    run = pytester.runpytest_subprocess(*plain, "--torchmem-strict")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*lower bound: the body called cuDNN*"])


@pytest.mark.nightly("1")
@pytest.mark.parametrize("passes_before", [0, 1])
def test_a_backward_pass_is_of_the_modules_that_made_it_where_a_forward_runs_again(
    pytester, passes_before
):
    """The engine's thread counts its operators apart from the thread of the forward pass.

    The first backward pass of a process begins that thread.
    """
    code = """
        import torch
        from pytest_torchmem import analyze, measure
        from pytest_torchmem.store.traces import load_trace
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Sequential(nn.Linear(64, 64), nn.GELU())
                self.middle = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
                self.last = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())

            def forward(self, x):
                for part in (self.first, self.middle):
                    x = checkpoint(part, x, use_reentrant=False)
                return self.last(x).sum()

        model, x = Net().cuda(), torch.ones(32, 64, device="cuda")
        for _ in range(PASSES_BEFORE):
            model(x).backward()
        with measure(device="cuda") as block:
            loss = model(x)
            for _ in range(12):  # the engine's numbers come to those of the forward pass, and pass
                loss.backward(retain_graph=True)
        block.save_trace("step.npz")
        found = [e.storage for e in analyze(load_trace("step.npz")).explain()]
        for made in sorted({(m.operator, m.module) for m in found if "_backward" in m.operator}):
            print(*made)
        kept = {m.module for m in found if m.category.name == "ACTIVATION"}
        print(*sorted(kept))
    """.replace("PASSES_BEFORE", str(passes_before))
    lines = sees(pytester, code, "--gpu", "H100", "--", "python")
    modules = {"gelu": "Net.first.*", "sigmoid": "Net.last.*", "tanh": "Net.middle.*"}
    assert lines[-4:-1] == [f"aten::{name}_backward {modules[name]}" for name in modules]
    assert lines[-1].split() == sorted(modules.values())


def test_the_environment_names_the_release_of_cudnn():
    told = environment("cuda:0")
    assert told["device"].startswith("simulated ")
    major, minor = map(int, told["cudnn"].split("."))
    assert 100 * major + minor == torch.backends.cudnn.version() // 100


def test_a_baseline_keeps_what_was_reserved_and_fragmentation_fails_it(pytester):
    test = """
        import pytest, torch

        MiB = 1024**2

        @pytest.mark.memory_baseline
        def test_lengths():
            # %s
            for size in (%s):
                torch.empty(size * MiB, dtype=torch.uint8, device="cuda")
    """
    padded, ragged = ("padded", "30, 30, 30"), ("ragged", "12, 22, 30")
    arguments = ("--torchmem-simulate=H100", "-p", "no:cacheprovider")

    def run(text, *options):
        pytester.makepyfile(test_it=test % text)
        return pytester.runpytest_subprocess(*arguments, *options).stdout

    run(padded, "--torchmem-update-baseline")
    (file,) = pytester.path.glob("__torchmem__/*/test_it.json")
    assert '["test_lengths", "reserved", 31457280, 0],' in file.read_text().split("\n")
    run(padded).fnmatch_lines(["*1 passed*"])
    run(ragged).fnmatch_lines(
        [
            "the body reserved 64.0 MiB, +34.0 MiB (+113 %) over the baseline of 30.0 MiB: "
            "at least 34.0 MiB of that was free and kept by the cache; segments reserved from "
            "aten::empty at test_it.py:9 had 34.0 MiB that no tensor held*",
        ]
    )
