"""Programs that change how torch works, look at it, or measure it."""

from __future__ import annotations

import gc
import sys
import tempfile
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pytest_torchmem import measure
from tests.record.undisturbed.state import nightly, prepared, program


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
def measures_within():
    """Within a measurement it is a region; numbers of torch's are the same."""
    with measure("inner", device="cpu") as inner:
        x = torch.ones(100) * 2
    return x, inner.peak.total


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


@program
def asks_whether_it_is_profiled():
    return torch.autograd.profiler._is_profiler_enabled
