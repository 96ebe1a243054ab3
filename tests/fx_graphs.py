"""Graphs on fake tensors, and torch's own estimator on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

memory_estimator = pytest.importorskip(
    "torch._inductor.fx_passes.memory_estimator", reason="torch's estimator came with torch 2.10"
)
KEYED_ON_STORAGES = hasattr(memory_estimator, "GraphAliasTracker")
needs_torchs = pytest.mark.skipif(
    not KEYED_ON_STORAGES, reason="this torch has the older estimator, which counts by node"
)


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
    return memory_estimator.build_memory_profile(graph, releasable)


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
