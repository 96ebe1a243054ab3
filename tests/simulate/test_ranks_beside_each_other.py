"""Ranks and processes beside each other; run with ``torchmem simulate --gpu H100x2 -- pytest``."""

import sys

import pytest

pytestmark = pytest.mark.nightly

PROGRAM = """
import os, sys
import torch, torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
x = torch.full((2,), rank + 1.0, device="cuda")

def tell(*words):  # a line in one piece, also where Python does not buffer
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def run_ranks(pytester, code, count=2):
    """Return the lines that the ranks of a job print, sorted; each is a process."""
    path = pytester.makepyfile(program=PROGRAM + "\n".join(line[4:] for line in code.splitlines()))
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", f"H100x{count}", "--")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(count))
    run = pytester.run(*simulate, sys.executable, "-m", *torchrun, path, timeout=120)
    assert run.ret == 0, run.stderr.str()
    return sorted(run.outlines)


@pytest.mark.usefixtures("gpu")
def test_ranks_exchange_their_values(pytester):
    code = """
    half, least, kept = x.half(), x.clone(), x.clone()
    dist.all_reduce(half)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.broadcast(kept, 1)
    told = [None, None]
    dist.all_gather_object(told, "a" * (1 + 9 * rank))
    sent, got = torch.arange(2, device="cuda") + 10 * rank, torch.zeros(2, device="cuda").long()
    dist.all_to_all_single(got, sent)
    ring = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x2 := x.clone(), 1 - rank)]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    numbers = [t.tolist() for t in (half, least, kept, got, x2)]
    tell(rank, *numbers, [len(text) for text in told])
    dist.destroy_process_group()
    """
    assert run_ranks(pytester, code) == [
        "0 [3.0, 3.0] [1.0, 1.0] [2.0, 2.0] [0, 10] [2.0, 2.0] [1, 10]",
        "1 [3.0, 3.0] [1.0, 1.0] [2.0, 2.0] [1, 11] [1.0, 1.0] [1, 10]",
    ]


@pytest.mark.usefixtures("gpu")
def test_an_object_may_be_larger_than_what_is_told_of_a_tensor(pytester):
    code = """
    told = [b"x" * 5_000_000 if rank == 0 else None]
    dist.broadcast_object_list(told)
    tell(rank, len(told[0]))
    dist.destroy_process_group()
    """
    assert run_ranks(pytester, code) == ["0 5000000", "1 5000000"]


@pytest.mark.usefixtures("gpu")
def test_a_split_group_has_the_ranks_of_its_part(pytester):
    code = """
    parts = [dist.new_group([0, 2]), dist.new_group([1])]
    dist.all_reduce(x, group=parts[rank % 2])
    tell(rank, x.tolist())
    dist.destroy_process_group()
    """
    assert run_ranks(pytester, code, 3) == ["0 [4.0, 4.0]", "1 [2.0, 2.0]", "2 [4.0, 4.0]"]


@pytest.mark.usefixtures("gpu")
def test_ddp_gives_each_rank_the_mean_of_the_gradients_that_all_have(pytester):
    code = """
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False).cuda())
    model(x).sum().backward()
    same = [None, None]
    dist.all_gather_object(same, model.module.weight.tolist())
    tell(rank, model.module.weight.grad.tolist(), same[0] == same[1])
    dist.destroy_process_group()
    """
    assert run_ranks(pytester, code) == ["0 [[1.5, 1.5]] True", "1 [[1.5, 1.5]] True"]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("second", "told"),
    [
        ("dist.broadcast(x, 1)", "rank 1 in a broadcast of 8 bytes; GPUs would wait"),
        ("os._exit(0)", "waits for rank 1, which has ended or has left the group"),
    ],
)
def test_a_rank_that_would_wait_without_end_is_told_why(pytester, second, told):
    code = f"""
    dist.barrier()
    if rank:
        {second}
        os._exit(0)
    try:
        dist.all_reduce(x)
    except RuntimeError as error:  # in torch 2.15 of no other class
        tell(error)
    os._exit(0)
    """
    assert told in "\n".join(run_ranks(pytester, code))


@pytest.mark.usefixtures("gpu")
def test_data_parallel_computes_what_one_gpu_computes(pytester):
    path = pytester.makepyfile(
        """
        import torch
        model = torch.nn.Linear(4, 3).cuda()
        x = torch.arange(24.0, device="cuda").view(6, 4)
        apart = torch.nn.DataParallel(model)(x) - model(x)
        print(apart.abs().max().item() < 1e-5)
        """
    )
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100x2", "--")
    assert pytester.run(*simulate, sys.executable, path).outlines == ["True"]


SHARING = """
import torch, torch.multiprocessing as mp
from pytest_torchmem.simulate.gaps import gaps_so_far

def add_one(given, taken):
    tensor = given.get()
    print(tensor.tolist(), torch.cuda.memory_allocated(), gaps_so_far().reads, flush=True)
    tensor.add_(1)
    del tensor
    taken.put(True)

if __name__ == "__main__":
    mp.set_start_method("spawn")
    given, taken = mp.Queue(), mp.Queue()
    process = mp.Process(target=add_one, args=(given, taken))
    process.start()
    tensor = torch.arange(3.0, device="cuda")
    given.put(tensor)
    taken.get(timeout=60)
    process.join()
    print(tensor.tolist(), torch.cuda.memory_allocated(), torch.zeros(2, device="cuda").tolist())
"""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("segments", ["expandable_segments:False", "expandable_segments:True"])
def test_a_tensor_in_a_queue_is_the_same_memory_for_both_processes(pytester, monkeypatch, segments):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", segments)
    path = pytester.makepyfile(SHARING)
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100", "--")
    run = pytester.run(*simulate, sys.executable, path, timeout=120)
    assert run.outlines == ["[0.0, 1.0, 2.0] 0 0", "[1.0, 2.0, 3.0] 512 [0.0, 0.0]"]


@pytest.mark.usefixtures("gpu")
def test_ranks_that_are_measured_end_as_they_do_bare(pytester):
    """Losses, weights, the allocator's own peak, what is left, and what they exchange later."""
    code = """
    import contextlib
    import pytest_torchmem
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.full((8, 64), rank + 1.0, device="cuda")
    losses = []
    with AROUND:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated()
    dist.all_reduce(x)
    weights = [p.double().sum().item() for p in model.parameters()]
    in_default = torch.cuda.current_stream() == torch.cuda.default_stream()
    tell(rank, losses, weights, peak, torch.cuda.memory_allocated(), in_default, x.tolist())
    dist.destroy_process_group()
    """
    bare, measured = (
        run_ranks(pytester, code.replace("AROUND", around))
        for around in ("contextlib.nullcontext()", 'pytest_torchmem.measure(device="cuda")')
    )
    assert len(bare) == 2
    assert measured == bare
