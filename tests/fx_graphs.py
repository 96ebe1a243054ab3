"""Graphs on fake tensors, and torch's own estimator and partitioners on them.

Torch's parts are imported by the first test that asks for them: with torch's compiler in memory
each look at everything that is alive takes twice as long.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

_ESTIMATOR: Final = Path(torch.__file__).with_name("_inductor") / "fx_passes/memory_estimator.py"
needs_torchs = pytest.mark.skipif(
    not _ESTIMATOR.exists() or "class GraphAliasTracker" not in _ESTIMATOR.read_text("utf-8"),
    reason="torch's estimator came with torch 2.10, and at first counted by node",
)
PARTITIONS: Final = ("default_partition", "min_cut_rematerialization_partition")


@functools.cache
def memory_estimator() -> Any:
    return importlib.import_module("torch._inductor.fx_passes.memory_estimator")


def partition_by(name: str) -> Callable[..., Any]:
    """One of the `PARTITIONS`."""
    found: Callable[..., Any] = getattr(
        importlib.import_module("torch._functorch.partitioners"), name
    )
    return found


def not_cpu(device: str) -> bool:
    return device != "cpu"


def trace(function: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cuda:0"):
    """A graph over fake tensors that are said to be on a device once it is traced."""
    mode = FakeTensorMode()
    with mode, torch.no_grad():
        module = make_fx(function)(*(torch.empty(s) for s in shapes))
    say_device(module, device)
    return module


def say_device(module: torch.fx.GraphModule, device: str) -> None:
    for node in module.graph.nodes:
        for leaf in tree_leaves(node.meta.get("val")):
            if isinstance(leaf, torch.Tensor):
                leaf.fake_device = torch.device(device)  # type: ignore[attr-defined]


def torchs_profile(graph: torch.fx.Graph, releasable: Callable[[Any], bool]) -> list[int]:
    return memory_estimator().build_memory_profile(graph, releasable)


STEPS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a @ b,
    lambda a, b: torch.relu(a),
    lambda a, b: a.t(),
    lambda a, b: a + b.t(),
    lambda a, b: a.clone().add_(b),
    lambda a, b: torch.cat([a[:2], b[2:]]),
    lambda a, b: torch.sort(a)[0],
    lambda a, b: torch.stack(torch.split(a, 2)).view(4, 4),
    lambda a, b: torch.native_layer_norm(a, [4], None, None, 1e-5)[0],
    lambda a, b: a.expand(2, 4, 4)[1],
]


class Repaired:
    """A graph whose nodes, reversed, begin with a list: what torch 2.13's ``[-1]`` expects."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph

    @property
    def nodes(self) -> Any:
        nodes = list(self._graph.nodes)

        class Nodes(list):
            def __reversed__(self):
                return iter([[nodes[-1]], *nodes[-2::-1]])

        return Nodes(nodes)

    def find_nodes(self, **wanted: Any) -> Any:
        return self._graph.find_nodes(**wanted)
