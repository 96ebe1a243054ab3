"""How long the analysis takes, beside torch's own on the same event trees.

    python -m benchmarks analysis_speed [--repeat 5] [--sizes 4] [--output FILE.md]

Each number is processor time, the median over at least ``--repeat`` rounds in one process; within a
round torch and we take turns on the same finished profile, so a noisy machine slows both alike.

* torch: ``MemoryProfile``, its timeline, and the coalesced sizes by category.
* labels="torch": the same data from ours, reading the tree included.
* our labels: reading the tree, every pass, the timeline.
* floor: what the analysis needs of each event read once through the bindings, and nothing done
  with it.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everybody knows
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import MemoryProfile, MemoryProfileTimeline

from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.torch_view.torch_timeline import TorchMemoryProfile
from pytest_torchmem.record.profiled.from_profiler import trace_of
from pytest_torchmem.record.torch_api import profiler

GOAL = 15.0
#: Layers of the model, and training steps: some 10,000 events, 19,000, 150,000 and a million.
SIZES = ((6, 1), (12, 1), (12, 8), (12, 53))
SMALL_TREE_ROUNDS = 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        attended = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int = 64, vocabulary: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def recorded(steps: int, layers: int = 12) -> Any:
    """A finished profile of ``steps`` training steps; shapes, memory and stacks on."""
    torch.manual_seed(0)
    model = GPT(layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, 100, (2, 16))

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    ) as finished:
        for _ in range(steps):
            step()
    return finished


def torchs(finished: Any) -> object:
    return MemoryProfileTimeline(
        MemoryProfile(finished.profiler.kineto_results)
    )._coalesce_timeline("cpu")


def ours_with_torchs_labels(finished: Any) -> object:
    return TorchMemoryProfile(build_op_tree(trace_of(finished))).coalesced("cpu")


def ours(finished: Any) -> object:
    return analyze_trace(trace_of(finished)).timeline


def floor(finished: Any) -> object:
    """Read what the analysis needs of each event, in the cheapest way known, and drop it."""
    stack = list(finished.profiler.kineto_results.experimental_event_tree())
    count = 0
    while stack:
        node = stack.pop()
        fields = profiler.fields_of(node)
        _TIMES(node)
        _READERS.get(type(fields), _nothing)(fields)
        if type(fields) is profiler.TorchOpFields:
            for value in fields.inputs:
                if type(value) is profiler.TensorMetadata:
                    _TENSOR(value)
        stack += node.children
        count += 1
    return count


def _nothing(fields: Any) -> None:
    """What events of other kinds have to read."""


_TIMES = attrgetter("start_time_ns", "end_time_ns", "start_tid")
_TENSOR = attrgetter("allocation_id")
_READERS: dict[Any, Callable[[Any], Any]] = {
    profiler.TorchOpFields: attrgetter("name", "sequence_number"),
    profiler.AllocationFields: attrgetter(
        "id", "allocation_id", "device", "ptr", "alloc_size", "total_allocated"
    ),
    profiler.PyCallFields: attrgetter("module", "optimizer", "caller.line_number"),
    profiler.PyCCallFields: attrgetter("caller.line_number"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Median seconds of processor time on one event tree."""

    events: int
    torch: float
    torch_labels: float
    our_labels: float
    floor: float


def events_in(finished: Any) -> int:
    stack = list(finished.profiler.kineto_results.experimental_event_tree())
    count = 0
    while stack:
        stack += stack.pop().children
        count += 1
    return count


def measured(layers: int, steps: int, repeat: int) -> Row:
    finished = recorded(steps, layers)
    candidates = (torchs, ours_with_torchs_labels, ours, floor)
    assert ours_with_torchs_labels(finished) == tuple(torchs(finished))
    seconds: dict[Any, list[float]] = {candidate: [] for candidate in candidates}
    # Small trees are over soon, and a moment's disturbance is more of their time.
    for _ in range(max(repeat, SMALL_TREE_ROUNDS // steps)):
        for candidate in candidates:
            gc.collect()
            begin = time.process_time()
            candidate(finished)
            seconds[candidate].append(time.process_time() - begin)
    return Row(events_in(finished), *(statistics.median(seconds[c]) for c in candidates))


def bytes_per_event(events: int = 1_000_000) -> float:
    """Bytes of a trace of a million events, made by repeating one step's."""
    import numpy as np

    one = trace_of(recorded(1))
    copies = -(-events // len(one.events))
    tracemalloc.start()
    tables = [
        np.concatenate([getattr(one, name)] * copies)
        for name in ("events", "tensors", "allocations", "module_calls")
    ]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return size / len(tables[0])


def report(rows: list[Row], per_event: float, repeat: int) -> str:
    table = [
        [
            f"{row.events:,}",
            f"{row.torch:.2f}",
            f"{row.torch_labels:.3f}",
            f"{row.torch / row.torch_labels:.1f}x",
            f"{row.our_labels:.3f}",
            f"{row.torch / row.our_labels:.1f}x",
            f"{row.floor:.3f}",
            f"{row.torch / row.floor:.1f}x",
            f"{row.torch_labels / row.events * 1e6:.1f}",
        ]
        for row in rows
    ]
    headers = [
        "events", "torch s", 'labels="torch" s', "faster", "our labels s", "faster", "floor s",
        "floor", "us/event",
    ]  # fmt: skip
    return (
        "# Speed of the analysis, beside torch's own\n\n"
        f"torch {torch.__version__}, CPU, {date.today()}; "
        f"processor time, medians of at least {repeat} rounds.\n"
        f"Command: `python -m benchmarks analysis_speed --repeat {repeat}`\n\n"
        f"{tabulate(table, headers, tablefmt='github')}\n\n"
        f"Goal: at least {GOAL:.0f}x. Floor: reading what is needed once, doing nothing with it.\n"
        f"A trace of a million events holds {per_event:.0f} bytes per event (goal: below 400).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [measured(*size, arguments.repeat) for size in SIZES[: arguments.sizes]]
    text = report(rows, bytes_per_event(), arguments.repeat)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
