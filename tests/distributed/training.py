"""A job of two ranks on the CPU: the same model under DDP and under FSDP2, measured and saved.

    python training.py FOLDER                  starts its ranks with mp.spawn
    torchrun --nproc-per-node 2 training.py FOLDER

Each rank leaves ``ddp-rankN.json``, ``fsdp-rankN.json`` and ``exchange-rankN.json`` in the folder.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pytest_torchmem import MiB, Ranks, measure

LAYERS = 4
WIDTH = 256
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
BATCH = 128
RANKS = 2


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def replicated() -> torch.nn.Module:
    return DistributedDataParallel(layers())


def sharded() -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = layers()
    parts: Iterable[torch.nn.Module] = model
    for layer in parts:
        fully_shard(layer)
    fully_shard(model)
    return model


def train(model: torch.nn.Module, folder: Path, name: str, batch: int) -> None:
    """Measure the third step: buckets are rebuilt after the first."""
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.ones(batch, WIDTH)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with measure(name, device="cpu", output=folder / f"{name}.json") as block:
        step()
    Ranks.gather(block).check(parameter=PARAMETER_BYTES)


def exchange(folder: Path) -> None:
    """Note how many allocations an exchange of results leaves in a measurement around it."""
    with measure("around", device="cpu") as gathered:
        with gathered.region("part") as part:
            torch.ones(MiB // 4)
        peaks = [one.result.peak.total for one in Ranks.gather(part)]
    with measure("around", device="cpu") as recorded:
        torch.ones(MiB // 4)
        dist.all_gather_object([None] * RANKS, "anything")
    rows = [len(block.allocator_requests) for block in (gathered, recorded)]
    path = folder / f"exchange-rank{dist.get_rank()}.json"
    path.write_text(json.dumps({"peaks": peaks, "gathered": rows[0], "recorded": rows[1]}))


def job(folder: Path) -> None:
    exchange(folder)
    train(replicated(), folder, "ddp", BATCH)
    # A stage of its own: the second rank works on twice as much.
    train(sharded(), folder, "fsdp", BATCH * (1 + dist.get_rank()))
    dist.destroy_process_group()


def spawned(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    job(folder)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        job(place)
    else:
        torch.multiprocessing.spawn(spawned, (place,), nprocs=RANKS)
