"""Memory of one rank of large jobs on simulated GPUs, beside the arithmetic of shards.

    python -m benchmarks simulated_world [--output FILE.md]

Each row is a process of its own: a language model with the dimensions of Llama 2 takes two training
steps as rank 0 of so many, by ``torchmem simulate --world``. *Shards* is what arithmetic lets the
rank hold between two steps: its part of the parameters, and of the two states of AdamW. Measured
there are the shards, the workspaces of cuBLAS, and whatever the method keeps beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

SEQUENCE = 4096
STAGE = "first stage of 8"


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    words: int = 32_000


SHAPES = {
    "1B": Shape(2048, 16, 32, 8, 8192),
    "7B": Shape(4096, 32, 32, 32, 11_008),
    "70B": Shape(8192, 80, 64, 8, 28_672),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.value = nn.Linear(shape.width, shape.kv_heads * self.head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [layer(x) for layer in (self.query, self.key, self.value)]
        query, key, value = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed_forward(self.second(x))


class Model(nn.Module):
    """Layers ``first`` to ``last``; the embedding and the head only where these are in them."""

    def __init__(self, shape: Shape, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = shape.layers if last is None else last
        self.embedding = nn.Embedding(shape.words, shape.width) if first == 0 else None
        self.blocks = nn.ModuleList(Block(shape) for _ in range(first, last))
        whole = last == shape.layers
        self.norm = nn.RMSNorm(shape.width) if whole else None
        self.head = nn.Linear(shape.width, shape.words, bias=False) if whole else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x if self.head is None else self.head(self.norm(x))


def shard(model: nn.Module, mesh: DeviceMesh | None) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    column, row = ColwiseParallel, RowwiseParallel
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                **{f"attention.{name}": column() for name in ("query", "key", "value")},
                **{f"feed_forward.{name}": column() for name in ("gate", "up")},
                "attention.out": row(),
                "feed_forward.down": row(),
            },
        )
    return model


def build(shape: Shape, plan: str, ranks: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = Model(shape, 0, shape.layers // 8 if plan == STAGE else None)
    if plan == "fully_shard":
        shard(model, None)
    elif plan == "tensor parallel":
        split(model, init_device_mesh("cuda", (ranks,)))
    elif plan == "tensor parallel x fully_shard":
        mesh = init_device_mesh("cuda", (ranks // 8, 8), mesh_dim_names=("data", "tensor"))
        shard(split(model, mesh["tensor"]), mesh["data"])
    elif plan == "FSDP1":
        return FullyShardedDataParallel(
            model,
            device_id=torch.cuda.current_device(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
            param_init_fn=lambda module: module.to_empty(device="cuda", recurse=False),
            use_orig_params=True,
        )
    model.to_empty(device="cuda")
    return nn.parallel.DistributedDataParallel(model) if plan == "DDP" else model


def train(model: nn.Module, shape: Shape, plan: str, ranks: int) -> torch.optim.Optimizer:
    # Plain tensors and sharded ones do not go into one call for many.
    many = None if plan != "tensor parallel" else False
    optimizer = torch.optim.AdamW(model.parameters(), foreach=many)
    words = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda")
    for _ in range(2):
        if plan == STAGE:
            micro = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda")
            sent = torch.zeros(1, SEQUENCE, shape.width, device="cuda", requires_grad=True)
            stage = PipelineStage(
                model, 0, ranks, torch.device("cuda"), input_args=micro, output_args=sent
            )
            schedule = Schedule1F1B(stage, n_microbatches=16, loss_fn=functional.cross_entropy)
            schedule.step(words.repeat(16, 1))
        else:
            logits = model(words)
            functional.cross_entropy(logits.flatten(0, 1).float(), words.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def rank(name: str, plan: str) -> None:
    """Be one rank of a job, on a simulated GPU, and print what it holds."""
    shape = SHAPES[name]
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ranks = dist.get_world_size()
    model = build(shape, plan, ranks)
    layers = shape.layers // 8 if plan == STAGE else None
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Model(shape, 0, layers).parameters())
    # A float32 parameter and its two states of AdamW.
    shards = 12 * parameters // (1 if plan in ("DDP", STAGE) else ranks)
    row = {"torch": torch.__version__, "shards": shards}
    try:
        optimizer = train(model, shape, plan, ranks)
    except torch.OutOfMemoryError:
        print(json.dumps(row))
        return
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator takes back what streams have done with
    stats = torch.cuda.memory_stats()
    between_steps = stats["requested_bytes.all.current"]
    torch._C._cuda_clearCublasWorkspaces()
    without = torch.cuda.memory_stats()["requested_bytes.all.current"]
    row["between_steps"] = between_steps
    row["workspaces"] = between_steps - without
    row["peak"] = stats["requested_bytes.all.peak"]
    print(json.dumps(row))
    del optimizer


ROWS = [
    ("7B", "fully_shard", 8),
    ("7B", "fully_shard", 64),
    ("7B", "fully_shard", 512),
    ("7B", "FSDP1", 64),
    ("7B", "tensor parallel", 8),
    ("7B", "tensor parallel x fully_shard", 64),
    ("7B", "first stage of 8", 8),
    ("1B", "DDP", 64),
    ("70B", "fully_shard", 8),
    ("70B", "fully_shard", 64),
    ("70B", "fully_shard", 512),
    ("70B", "tensor parallel x fully_shard", 512),
]
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    table = []
    release = ""
    for model, plan, ranks in ROWS:
        command = ["simulate", "--gpu", "H100x8", "--world", str(ranks), "--", "python", __file__]
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest_torchmem", *command, "--rank", model, plan],
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"{model} {plan} on {ranks}: {done.stderr[-3000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        release = row["torch"]
        table.append(
            [model, plan, ranks]
            + [_gib(row.get(key)) for key in ("shards", "between_steps", "workspaces", "peak")]
            + [f"{took_s:.0f}"]
        )
        print(*table[-1], flush=True)
    headers = ["model", "plan", "ranks", "shards", "between steps", "workspaces", "peak", "seconds"]
    text = tabulate(table, headers, tablefmt="pipe", disable_numparse=True)
    told = (
        f"# Rank 0 of N on simulated GPUs\n\ntorch {release}, {date.today()}, H100s, on "
        f"{os.cpu_count()} cores with a load of {os.getloadavg()[2]:.0f}; "
        "GiB of requested memory. `python -m benchmarks simulated_world` made the table and says "
        f"what its columns mean.\n\n{text}\n"
    )
    if options.output:
        options.output.write_text(told, encoding="utf-8")


def _gib(size_bytes: int | None) -> str:
    return "out of memory" if size_bytes is None else f"{size_bytes / GIB:.3f}"


if __name__ == "__main__":  # as one rank
    main()
