"""One rank of a job, run with ``torchmem simulate --gpu H100x2 -- pytest``."""

import sys

import pytest

from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import World, parse_world
from pytest_torchmem.values.errors import SimulationError

pytestmark = pytest.mark.nightly

PROGRAM = """
import os
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
"""


def run_rank(pytester, code, *command, start=PROGRAM):
    """Return the lines that a program prints as one rank of a world."""
    path = pytester.makepyfile(program=start + code)
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


PIPELINE = """
import itertools
from torch.distributed import pipelining

width, rows, depth, held = 256, 64, 3, []
layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
model = nn.Sequential(*layers).cuda()
model.register_forward_hook(lambda *_: held.append(torch.cuda.memory_allocated()))
shape = torch.empty(rows, width, device="meta", requires_grad=True)
device = torch.device("cuda", torch.cuda.current_device())
stage = pipelining.PipelineStage(model, rank, world, device, input_args=shape, output_args=shape)
schedule = pipelining.SCHEDULE(stage, 8, loss_fn=lambda out, target: out.sum() - target.sum())
batch = torch.zeros(8 * rows, width, device="cuda")
schedule.step(*[batch][rank:], target=batch if rank == world - 1 else None)
steps = [after - before for before, after in zip(held, held[1:])]
kept = depth * rows * width * 4
# In torch 2.15 a microbatch takes its place for what it receives when it comes, and not before all.
print(1 + len(list(itertools.takewhile(lambda step: kept <= step < 2 * kept, steps))))
"""


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("schedule", "rank", "in_flight"),
    [
        ("ScheduleGPipe", 2, 8),
        ("Schedule1F1B", 0, 4),
        ("Schedule1F1B", 2, 2),
        ("Schedule1F1B", 3, 1),
    ],
)
def test_a_stage_keeps_the_activations_of_what_is_in_flight(pytester, schedule, rank, in_flight):
    code = PIPELINE.replace("SCHEDULE", schedule)
    lines = run_rank(pytester, code, "--world", "4", "--rank", str(rank))
    assert lines[-1] == str(in_flight)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("eager", [False, True], ids=["made", "split"])
def test_a_part_of_the_ranks_has_as_many_as_were_asked_for(pytester, eager):
    # With a device, the communicators of new groups are split from that of all.
    bound = PROGRAM.replace('"nccl"', '"nccl", device_id=torch.device("cuda", 3)')
    code = """
    from torch.distributed.device_mesh import init_device_mesh
    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
    groups = [dist.new_group([2, 3, 5]), mesh.get_group("replicate"), mesh.get_group("shard")]
    for group in groups:
        x = torch.ones(1, device="cuda")
        dist.all_reduce(x, group=group)
        parts = torch.full((8,), 9.0, device="cuda")
        dist.all_gather_into_tensor(parts[:dist.get_world_size(group)], x, group=group)
        print(x.item(), parts[0].item())
    """
    lines = run_rank(
        pytester, _dedented(code), "--world", "8", "--rank", "3", start=bound if eager else PROGRAM
    )
    assert lines[-3:] == ["3.0 3.0", "2.0 2.0", "4.0 4.0"]


@pytest.mark.usefixtures("gpu")
def test_objects_are_gathered_and_those_of_others_are_refused(pytester):
    code = """
    told = [None] * world
    dist.all_gather_object(told, "x" * 100_000)
    print(len(told[-1]))
    at_root = [None] * world
    dist.gather_object("mine", at_root)
    print(at_root[-1])
    try:
        dist.broadcast_object_list([None], src=5)
    except dist.DistBackendError as error:
        print(error)
    ring = [torch.full((1,), rank + 7.0, device="cuda"), torch.zeros(1, device="cuda")]
    calls = [dist.P2POp(dist.isend, ring[0], 1), dist.P2POp(dist.irecv, ring[1], world - 1)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    dist.monitored_barrier(dist.new_group(backend="gloo"))
    print(ring[1].item())
    """
    lines = run_rank(pytester, _dedented(code), "--world", "64")[-4:]
    assert lines[:2] == ["100000", "mine"]
    assert lines[2].startswith("rank 0 of 64 waits for an object that another rank would send")
    assert lines[3] == "7.0"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            """
    import torch.distributed.rpc as rpc
    rpc.init_rpc("mine", rank=rank, world_size=world)
    """,
            "init_rpc is for calls between ranks; only one rank of the world is run",
        ),
        (
            """
    from torch.distributed.optim import ZeroRedundancyOptimizer
    weights = [torch.ones(8, device="cuda", requires_grad=True) for _ in range(world)]
    optimizer = ZeroRedundancyOptimizer(weights, torch.optim.SGD, lr=0.1)
    optimizer.consolidate_state_dict()
    """,
            "rank 0 of 4 waits for an object that another rank would send; only this rank is run",
        ),
        (
            """
    from torch.distributed.fsdp import FullyShardedDataParallel
    torch.cuda.set_device(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]
    model = FullyShardedDataParallel(torch.nn.Sequential(*layers).cuda(), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    FullyShardedDataParallel.optim_state_dict(model, optimizer)
    """,
            "rank 0 of 4 waits for an object that another rank would send; only this rank is run",
        ),
        (
            """
    import torch.distributed._symmetric_memory as symmetric
    symmetric.rendezvous(symmetric.empty(16, device="cuda"), dist.group.WORLD)
    """,
            "rank 0 of 4 maps symmetric memory of other ranks; only this rank is run",
        ),
    ],
    ids=["calls", "states", "states of parts", "symmetric memory"],
)
def test_what_needs_the_other_ranks_is_refused_at_once(pytester, code, told):
    caught = f"""
try:
{code}
except Exception as error:
    print(error)
"""
    (line,) = run_rank(pytester, caught, "--world", "4")[-1:]
    assert line == told + " [not-simulated]"


@pytest.mark.usefixtures("gpu")
def test_a_distributed_checkpoint_has_the_parts_of_the_rank_that_is_run(pytester):
    code = """
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    mesh = init_device_mesh("cuda", (world,))
    weight = distribute_tensor(torch.arange(64.0, device="cuda"), mesh, [Shard(0)])
    checkpoint.save({"weight": weight, "step": 7}, checkpoint_id="saved")
    loaded = {"weight": torch.zeros_like(weight), "step": 0}
    checkpoint.load(loaded, checkpoint_id="saved")
    print(loaded["step"], loaded["weight"].to_local().tolist() == list(range(8)))
    import os
    print([name for name in sorted(os.listdir("saved")) if name.endswith("distcp")])
    """
    lines = run_rank(pytester, _dedented(code), "--world", "8")[-2:]
    assert lines == ["7 True", "['__0_0.distcp']"]


@pytest.mark.usefixtures("gpu")
def test_no_thread_of_torchs_asks_the_store_when_python_may_have_ended(pytester, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_COORD_CHECK_MILSEC", "20")
    start = """
    import threading, time
    import torch
    from pytest_torchmem.record.mirrored_ranks import MirroredStore

    check, askers = MirroredStore.check, set()
    MirroredStore.check = lambda *asked: askers.add(threading.get_ident()) or check(*asked)
    """
    code = """
    dist.all_reduce(torch.ones(4, device="cuda"))
    time.sleep(0.3)
    print(askers <= {threading.get_ident()})
    """
    start = _dedented(start) + PROGRAM
    assert run_rank(pytester, _dedented(code), "--world", "8", start=start)[-1:] == ["True"]


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
def test_a_collective_is_in_time_whatever_the_host_does_meanwhile(pytester):
    start = """
import datetime, time
import torch, torch.distributed as dist
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=1))
"""
    code = """
    work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
    time.sleep(4)  # torch 2.15 looks once in a second
    work.wait()
    print("in time")
    """
    assert run_rank(pytester, _dedented(code), "--world", "4", start=start)[-1] == "in time"


@pytest.mark.usefixtures("gpu")
def test_tensors_are_gathered_at_one_rank_and_at_all(pytester):
    code = """
    x = torch.tensor([3, rank], device="cuda")
    for gather in (dist.all_gather, lambda told, x: dist.gather(x, told)):
        told = [torch.zeros_like(x) for _ in range(world)]
        gather(told, x)
        print([each.tolist() for each in told])
    """
    assert run_rank(pytester, _dedented(code), "--world", "4")[-2:] == [str([[3, 0]] * 4)] * 2


@pytest.mark.usefixtures("gpu")
def test_a_rank_that_fails_ends(pytester):
    path = pytester.makepyfile(
        program=PROGRAM + "dist.all_reduce(torch.ones(3, device='cuda'))\nraise SystemExit(7)"
    )
    command = ("simulate", "--world", "4", "--", "python", path)
    assert pytester.run(sys.executable, "-m", "pytest_torchmem", *command, timeout=120).ret == 7


@pytest.mark.usefixtures("gpu")
def test_a_short_step_keeps_what_a_long_one_keeps_of_ddps_buckets(pytester):
    # What `DDP` waits for is a future, and NCCL's watchdog, which wakes each 100 ms, lets go.
    code = """
    import sys, time
    for pause_s in map(float, sys.argv[1:]):
        model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024, device="cuda"))
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
            model.zero_grad()
            time.sleep(pause_s)
        print(torch.cuda.max_memory_allocated())
        del model
    """
    path = pytester.makepyfile(program=PROGRAM + _dedented(code))
    command = ("simulate", "--gpu", "H100x8", "--world", "8", "--", "python", path)
    run = pytester.run(sys.executable, "-m", "pytest_torchmem", *command, *["0"] * 4, "0.3")
    assert run.ret == 0, run.stderr.str()
    assert len(run.outlines) == 5
    assert len(set(run.outlines)) == 1


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
    run = pytester.runpytest_subprocess(*plain, "-otorchmem_world=16")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(["*torchmem, rank 0 of 16, simulated L4*", "*1 failed*"])
    assert "17.0 MiB" in run.stdout.str()


def _dedented(code):
    return "\n".join(line[4:] for line in code.splitlines())
