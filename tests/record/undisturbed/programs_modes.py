"""Programs that change how torch works, look at it, or measure it."""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import flop_counter

from pytest_torchmem import measure
from tests.record.undisturbed.state import nightly, prepared, program


@program
def changes_the_default_type():
    torch.set_default_dtype(torch.float64)
    try:
        return torch.ones(2), nn.Linear(2, 2).weight.dtype
    finally:
        torch.set_default_dtype(torch.float32)


@program
def changes_the_default_device():
    with torch.device("meta"):
        x = torch.ones(2)
    torch.set_default_device("cpu")
    try:
        return x.device, torch.ones(2).device
    finally:
        torch.set_default_device(None)


@program
def is_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        x = torch.zeros(4).index_add_(0, torch.tensor([1, 1]), torch.ones(2))
        return x, torch.empty(3)
    finally:
        torch.use_deterministic_algorithms(False)


@program
def changes_precision_and_threads():
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(2)
    try:
        return torch.ones(64, 64) @ torch.ones(64, 64), torch.get_num_threads()
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.set_num_threads(before[1])


@program
def flushes_tiny_numbers():
    torch.set_flush_denormal(True)
    try:
        return torch.tensor([1e-323], dtype=torch.float64)
    finally:
        torch.set_flush_denormal(False)


@program
def counts_operations():
    with flop_counter.FlopCounterMode(display=False) as mode:
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    return mode.get_total_flops()


@program
def annotates():
    with torch.profiler.record_function("outer"), torch.autograd.profiler.record_function("in"):
        x = torch.ones(3, requires_grad=True)
        (x * 2).sum().backward()
    return x.grad


@prepared
def leaves_an_annotation_of_before():
    annotation = torch.profiler.record_function("before")

    def run():
        with annotation:
            return torch.ones(3) * 2

    return run


@program
def annotates_by_the_fast_way():
    with torch._C._profiler._RecordFunctionFast("mine"):
        return torch.ones(3) * 2


@program
def measures_within():
    """Within a measurement it is a region; numbers of torch's are the same."""
    with measure("inner", device="cpu") as inner:
        x = torch.ones(100) * 2
    return x, inner.peak.total


@program
def measures_twice_within():
    @measure(device="cpu")
    def step():
        return torch.ones(10).sum()

    step()
    step()
    return [result.retained.total for result in step.results]


@program
def asks_whether_it_is_profiled():
    return torch.autograd.profiler._is_profiler_enabled


@contextmanager
def group_of_one():
    """A process group with one rank; it replaces the hook for exceptions that nobody catches."""
    hook = sys.excepthook
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/x", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook


@program
def works_with_a_group_of_one():
    with group_of_one():
        x = torch.ones(3)
        dist.all_reduce(x)
        work = dist.broadcast(x, 0, async_op=True)
        work.wait()
        gathered = [torch.zeros(3)]
        dist.all_gather(gathered, x)
        return x, gathered, work.is_completed()


@nightly
@program
def trains_in_parallel():
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model.state_dict(), [p.grad for p in model.parameters()]


@nightly
@program
def shards_a_model():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    with group_of_one():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        model(torch.randn(3, 4)).sum().backward()
        gradients = [p.grad.to_local() for p in model.parameters()]
    # Torch leaves the group in a cycle, with its files, until the collector runs.
    del model
    gc.collect()
    return gradients


@nightly
@program
def distributes_tensors():
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

    with group_of_one():
        mesh = DeviceMesh("cpu", [0])
        x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
        model = distribute_module(nn.Linear(4, 2), mesh)
        y = model(x).redistribute(mesh, [Replicate()])
        y.sum().backward()
        return y.to_local(), [p.grad.to_local() for p in model.parameters()], str(y.placements)


@program
def packages_what_it_made():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        torch.save(nn.Linear(2, 2).state_dict(), path)
        return sorted(torch.load(path)), path.stat().st_size > 0


@program
def reads_settings():
    return torch.__config__.parallel_info().count("\n") > 3, torch.backends.mkldnn.is_available()
