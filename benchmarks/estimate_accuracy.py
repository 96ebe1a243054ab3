"""Estimated against measured memory: the same code, run on the CPU and only looked at.

    python benchmarks/estimate_accuracy.py [case ...] [--json results.json]

Measured is the second, warm run under torch's profiler: the parameters, buffers and inputs that
the program touches, plus the running sum of its allocation events. A second table holds torch's
own static estimators (``torch/_inductor/fx_passes/memory_estimator.py``) beside ours, on the same
traced graphs: what a graph needs that is run node by node, not what the eager program needs.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType, _ExtraFields_Allocation
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.fx_passes import memory_estimator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import estimate
from pytest_torchmem.analysis.estimated.static import memory_profile, pair_peak_bytes
from pytest_torchmem.record.fake.fx_graphs import read_graph, read_pair

GOAL = 0.005


@dataclass(frozen=True)
class OnGraphs:
    """Peaks in bytes that static rules give for traced graphs; torch's may be an error's name."""

    torch_cpu: str = "-"
    torch_cuda: str = "-"
    ours: str = "-"


@dataclass(frozen=True)
class Row:
    """One line of the table; sizes in bytes."""

    case: str
    mode: str
    measured: int
    estimated: int
    error: float
    hidden: str
    graphs: OnGraphs
    seconds: float


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.1)
        self.embed = nn.Embedding(1000, 128)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.reentrant:
            x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    layers = [nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)]
    return nn.Sequential(*layers), {"input": torch.randn(128, 256)}


def transformer() -> tuple[nn.Module, dict[str, Any]]:
    return Transformer(), {"tokens": torch.randint(0, 1000, (4, 64))}


def conv_net() -> tuple[nn.Module, dict[str, Any]]:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(3, 32), *block(32, 64), *head), {"input": torch.randn(8, 3, 64, 64)}


def checkpointing() -> tuple[nn.Module, dict[str, Any]]:
    return Checkpointed(reentrant=False), {"x": torch.randn(128, 256)}


def checkpointing_reentrant() -> tuple[nn.Module, dict[str, Any]]:
    return Checkpointed(reentrant=True), {"x": torch.randn(128, 256)}


_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 1000,
}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=3, n_head=4, n_embd=128, vocab_size=1000, n_positions=128)
    config.bos_token_id = config.eos_token_id = 0
    return GPT2LMHeadModel(config), _tokens_and_labels()


def llama() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_SIZES, num_key_value_heads=2)
    return LlamaForCausalLM(config), _tokens_and_labels()


def bert() -> tuple[nn.Module, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SIZES)), _tokens_and_labels()


def _tokens_and_labels() -> dict[str, Any]:
    tokens = torch.randint(0, 1000, (4, 64))
    return {"input_ids": tokens, "labels": tokens.clone()}


CASES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": mlp,
    "transformer": transformer,
    "conv_net": conv_net,
    "checkpointing": checkpointing,
    "checkpointing_reentrant": checkpointing_reentrant,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
}


# Measured.


def loss_of(output: Any) -> torch.Tensor:
    return output.loss if hasattr(output, "loss") else output.sum()


def forward(model: nn.Module, inputs: dict[str, Any]) -> Any:
    return model(**inputs)


def train(model: nn.Module, inputs: dict[str, Any]) -> None:
    loss_of(model(**inputs)).backward()


def inference(model: nn.Module, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**inputs)


def training_step(model: nn.Module, inputs: dict[str, Any], optimizer: Any) -> None:
    train(model, inputs)
    optimizer.step()


def measure(step: Callable[[], Any], model: nn.Module, optimizer: Any) -> tuple[int, str]:
    """Peak of the second run in bytes, and what operators took and gave back inside themselves."""
    with torch.profiler.profile(profile_memory=True):
        step()
        model.zero_grad()
    given = _touched(step, model, optimizer)
    with torch.profiler.profile(profile_memory=True) as profiler:
        held = step()
    del held
    events = sorted(_allocations(profiler), key=lambda event: event.start_time_ns)
    live = peak = given
    at_peak = None
    for event in events:
        live += event.typed[1].alloc_size
        if live > peak:
            peak, at_peak = live, event
    return peak, _hidden(events, at_peak)


class _Inputs(TorchDispatchMode):
    """Collects the storages that operators are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self.seen.add(leaf.untyped_storage()._cdata)
        return func(*args, **(kwargs or {}))


def _touched(step: Callable[[], Any], model: nn.Module, optimizer: Any) -> int:
    """Bytes from before the run that an operator reads or writes."""
    inputs = step.args[1]  # type: ignore[attr-defined]
    given = [*model.parameters(), *model.buffers(), *inputs.values()]
    if optimizer is not None:
        given += tree_leaves(list(optimizer.state.values()))
    with _Inputs() as used, torch.profiler.profile(profile_memory=True):
        held = step()
        model.zero_grad()
    del held
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in given}
    return sum(size for key, size in sizes.items() if key in used.seen)


def _allocations(profiler: Any) -> Iterator[Any]:
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.typed[0] == _EventType.Allocation:
            assert isinstance(event.typed[1], _ExtraFields_Allocation)
            yield event


def _hidden(events: list[Any], at_peak: Any) -> str:
    """Scratch that was live at the peak: allocated and freed within one operator."""
    scratch: dict[int, tuple[int, str]] = {}
    found: collections.Counter[str] = collections.Counter()
    open_at_peak: dict[int, tuple[int, str]] = {}
    for event in events:
        fields = event.typed[1]
        operator = _leaf_operator(event)
        if fields.alloc_size > 0:
            scratch[fields.ptr] = (fields.alloc_size, operator)
        else:
            size, maker = scratch.pop(fields.ptr, (0, ""))
            if fields.ptr in open_at_peak:
                open_at_peak.pop(fields.ptr)
                if maker and maker == operator:
                    found[maker] += size
        if event is at_peak:
            open_at_peak = dict(scratch)
    return ", ".join(f"{name} {size}" for name, size in found.most_common(3) if size >= 1024)


def _leaf_operator(event: Any) -> str:
    """The outermost operator below autograd's own frames, with its address to tell calls apart."""
    chain = []
    while event.parent is not None:
        event = event.parent
        if event.name.startswith("aten::"):
            chain.append(event)
    return chain[-1].name if chain else ""


# torch's functions, and ours on the same graphs.


def on_graphs(model: nn.Module, inputs: dict[str, Any], mode: str) -> OnGraphs:
    """``build_memory_profile`` of the inference graph, ``get_peak_memory`` of the training pair."""
    if mode == "inference":
        traced = _trace_inference(model, inputs)
        ours = max(memory_profile(read_graph(traced)))

        def torchs() -> int:
            return max(memory_estimator.build_memory_profile(traced, lambda n: n.op in _MADE))

        graphs = [traced]
    elif mode == "train":
        pair = _trace_pair(model, inputs)
        ours = pair_peak_bytes(*read_pair(*pair))

        def torchs() -> int:
            return memory_estimator.get_peak_memory(*pair)

        graphs = list(pair)
    else:
        return OnGraphs()
    on_cpu = _answer(torchs)
    _say_cuda(graphs)
    return OnGraphs(on_cpu, _answer(torchs), f"{ours:,}")


_MADE = ("call_function", "call_module", "call_method")


def _answer(function: Callable[[], int]) -> str:
    try:
        return f"{function():,}"
    except Exception as error:  # whatever torch answers is its answer
        return type(error).__name__


def _fakes(
    mode: Any, model: nn.Module, inputs: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    owned = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return (
        {name: mode.from_tensor(tensor) for name, tensor in owned.items()},
        {name: mode.from_tensor(tensor) for name, tensor in inputs.items()},
    )


def _trace_inference(model: nn.Module, inputs: dict[str, Any]) -> torch.fx.Graph:
    def call(owned: Any, given: Any) -> list[torch.Tensor]:
        output = torch.func.functional_call(model, owned, (), given)
        return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]

    mode = FakeTensorMode()
    owned, given = _fakes(mode, model, inputs)
    with mode, torch.no_grad():
        return make_fx(call)(owned, given).graph


def _trace_pair(model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    graphs = []

    def keep(module: Any, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def call(owned: Any, given: Any) -> torch.Tensor:
        return loss_of(torch.func.functional_call(model, owned, (), given))

    mode = FakeTensorMode()
    owned, given = _fakes(mode, model, inputs)
    with mode:
        compiled = aot_function(
            call, fw_compiler=keep, bw_compiler=keep, partition_fn=default_partition
        )
        compiled(owned, given).backward()
    return graphs[0], graphs[1]


def _say_cuda(graphs: list[torch.fx.Graph]) -> None:
    """Say of every fake tensor that it is on CUDA: torch's functions skip those on the CPU."""
    for graph in graphs:
        for node in graph.nodes:
            for leaf in tree_leaves(node.meta.get("val")):
                if isinstance(leaf, torch.Tensor):
                    leaf.fake_device = torch.device("cuda:0")


# The table.


MODES = {
    "inference": inference,
    "forward": forward,
    "train": train,
    "train+AdamW": training_step,
}


def row_of(case: str, mode: str) -> Row:
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    optimizer = torch.optim.AdamW(model.parameters()) if mode == "train+AdamW" else None
    step = functools.partial(MODES[mode], model, inputs, *([optimizer] if optimizer else []))
    started = time.perf_counter()
    with torch.set_grad_enabled(mode != "inference"):
        result = estimate(
            model,
            **inputs,
            backward=mode.startswith("train"),
            optimizer=torch.optim.AdamW if optimizer else None,
        )
    seconds = time.perf_counter() - started
    measured, hidden = measure(step, model, optimizer)
    error = result.peak.total / measured - 1
    graphs = on_graphs(model, inputs, mode)
    return Row(case, mode, measured, result.peak.total, error, hidden, graphs, seconds)


def show(rows: list[Row]) -> None:
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        f"`python benchmarks/estimate_accuracy.py`, torch {torch.__version__}, {today}, on the CPU."
    )
    print(
        "Sizes are bytes: measured under torch's profiler, estimated without data. The simulated\n"
        "caching allocator is compared with recordings by tests/cuda, which takes a GPU: none was "
        "here.\n"
    )
    head = ("case", "mode", "measured", "estimated", "error", "s", "inside operators at the peak")
    _show_line(head)
    _show_line(["---"] * len(head))
    for row in rows:
        error = f"{row.error:+.3%}" + ("" if abs(row.error) <= GOAL else " (!)")
        sizes = (f"{row.measured:,}", f"{row.estimated:,}")
        _show_line((row.case, row.mode, *sizes, error, f"{row.seconds:.2f}", row.hidden))
    print("\nThe static rules on traced graphs:\n")
    head = ("case", "graphs", "torch, CPU", "torch, said to be CUDA", "ours, any device")
    _show_line(head)
    _show_line(["---"] * len(head))
    for row in rows:
        if row.graphs.ours != "-":
            _show_line(
                (row.case, row.mode, row.graphs.torch_cpu, row.graphs.torch_cuda, row.graphs.ours)
            )


def _show_line(cells: Iterable[str]) -> None:
    print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    options = parser.parse_args()
    rows = [row_of(case, mode) for case in options.cases for mode in MODES]
    show(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
