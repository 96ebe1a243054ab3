"""One rank of a job, run with ``torchmem simulate --gpu H100x2 -- pytest``."""

import sys

import pytest

from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.world import World, parse_world
from pytest_torchmem.values.errors import SimulationError

PROGRAM = """
import os
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""


def run_rank(pytester, code, *command):
    """Return the lines that a program prints as one rank of a world."""
    path = pytester.makepyfile(program=PROGRAM + code)
    command = ("simulate", "--gpu", "H100x8", *command, "--", "python", path)
    run = pytester.run(sys.executable, "-m", "pytest_torchmem", *command)
    assert run.ret == 0, run.stderr.str()
    return run.outlines


def test_a_rank_has_the_environment_that_torchrun_would_give_it():
    said = World(20, 13).variables(parse_gpu("H100x8"))
    numbers = {name: said[name] for name in said if name.startswith(("RANK", "LOCAL", "GROUP"))}
    assert numbers == {
        "RANK": "13",
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
    }


def test_no_world_is_asked_for_by_default():
    assert parse_world("", "") is None
    assert parse_world("8", "") == World(8, 0)


@pytest.mark.parametrize(
    ("size", "rank", "told"),
    [
        ("8", "8", "a world of 8 ranks has no rank 8; they count from 0"),
        ("0", "", "a world of 0 ranks is not one of 1 to"),
        ("", "3", "rank 3 of how many"),
        ("many", "", "world 'many' is not a number"),
        ("8", "-1", "rank '-1' is not a number"),
    ],
)
def test_a_world_that_cannot_be_is_refused(size, rank, told):
    with pytest.raises(SimulationError, match=told):
        parse_world(size, rank)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rank", [0, 13])
def test_collectives_return_what_equal_ranks_would_make(pytester, rank):
    code = """
    x = torch.tensor([3, 4], device="cuda")
    dist.all_reduce(x)
    print(x.tolist(), world)
    told = [None] * world
    dist.all_gather_object(told, {"rank": rank})
    print(told == [{"rank": rank}] * world)
    counts = torch.full((world,), 2, device="cuda")
    got = torch.empty_like(counts)
    dist.all_to_all_single(got, counts)
    print(got.tolist() == [2] * world)
    most = torch.tensor([7.0], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    print(most.item())
    on_host = [None] * world
    dist.all_gather_object(on_host, rank, group=dist.new_group(backend="gloo"))
    print(on_host == [rank] * world)
    dist.barrier()
    dist.destroy_process_group()
    """
    lines = run_rank(pytester, _dedented(code), "--world", "20", "--rank", str(rank))
    assert lines[-5:] == ["[60, 80] 20", "True", "True", "7.0", "True"]


@pytest.mark.usefixtures("gpu")
def test_a_shard_is_a_rank_th_of_the_model(pytester):
    code = """
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, device="cuda") for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.zeros(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.empty(1, device="cuda")
    print(torch.cuda.memory_stats()["requested_bytes.all.current"])
    """
    (held,) = run_rank(pytester, _dedented(code), "--world", "64")[-1:]
    shards = 4 * 1024 * 1024 // 64 * 4 * 3
    assert shards <= int(held) < shards * 1.01


@pytest.mark.usefixtures("gpu")
def test_ddp_of_unchanged_code_checks_its_parameters_and_trains(pytester):
    code = """
    model = nn.parallel.DistributedDataParallel(nn.Linear(256, 256).cuda())
    model(torch.zeros(8, 256, device="cuda")).sum().backward()
    print(sum(p.grad.numel() for p in model.parameters()))
    """
    assert run_rank(pytester, _dedented(code), "--world", "8")[-1] == str(256 * 257)


@pytest.mark.usefixtures("gpu")
def test_the_other_ranks_set_what_this_one_sets_and_nothing_else(pytester):
    code = """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"address/{rank}", "here")
    print(store.get("address/5").decode(), store.add("arrived", 1))
    try:
        store.get("never")
    except dist.DistStoreError as error:
        print(error)
    """
    lines = run_rank(pytester, _dedented(code), "--world", "8", "--rank", "3")
    assert lines[-2] == "here 8"
    assert "rank 3 of 8 waits for" in lines[-1]


@pytest.mark.usefixtures("gpu")
def test_a_rank_that_fails_ends(pytester):
    path = pytester.makepyfile(
        program=PROGRAM + "dist.all_reduce(torch.ones(3, device='cuda'))\nraise SystemExit(7)"
    )
    command = ("simulate", "--world", "4", "--", "python", path)
    assert pytester.run(sys.executable, "-m", "pytest_torchmem", *command, timeout=120).ret == 7


@pytest.mark.usefixtures("gpu")
def test_pytest_runs_as_a_rank_and_says_so(pytester):
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist

        @pytest.mark.memory_budget("4MiB", device="cuda")
        def test_too_large():
            dist.init_process_group("nccl")
            part = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
            whole = torch.empty(dist.get_world_size(), 1 << 20, dtype=torch.uint8, device="cuda")
            dist.all_gather_into_tensor(whole, part)
            dist.destroy_process_group()
        """
    )
    plain = ("-p", "no:asyncio", "-p", "no:cacheprovider", "--torchmem-simulate=L4")
    run = pytester.runpytest_subprocess(*plain, "--torchmem-world=16")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*torchmem, rank 0 of 16, simulated L4*", "*1 failed*"])
    assert "17.0 MiB" in run.stdout.str()


def _dedented(code):
    return "\n".join(line[4:] for line in code.splitlines())
