"""Programs whose recording is cut between their statements; see `test_cuts`."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

KEPT: list[object] = []


class Cell(nn.Module):
    """A module whose operators are Python's own, between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        h = h * self.scale
        h = h + x
        h = torch.tanh(h)
        return h - x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        context.save_for_backward(y)
        return y

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (y,) = context.saved_tensors
        g = gradients[0] * 2
        return g + 0 * y


def operators_between_calls() -> None:
    x = torch.ones(64)
    y = x + 1
    y = y * 2
    for _ in range(4):
        y = y - x
        z = torch.cat([y, y])
        y = z[:64] + x
    KEPT.append(y)


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Cell(), nn.ReLU(), Cell())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        KEPT.append(loss.detach())


def recompute() -> None:
    model = Cell()
    x = torch.ones(8, 16, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    y = Doubled.apply(y)
    y = y + x
    y.sum().backward()
    KEPT.append(x.grad)


def hooks_and_cycles() -> None:
    x = torch.ones(32, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t * 1):
        y = x.exp()
    cycle: list[object] = [y * 3]
    cycle.append(cycle)
    y = y + 1
    del cycle
    gc.collect()
    y.sum().backward()


def helper(x: torch.Tensor, depth: int) -> torch.Tensor:
    y = x + depth
    if depth:
        y = helper(y, depth - 1)
    return y * 2


def recursion_and_generators() -> None:
    def pieces(x: torch.Tensor) -> Any:
        for n in range(3):
            y = x + n
            yield y * 2

    x = helper(torch.ones(16), 3)
    for piece in pieces(x):
        x = x + piece
    x = x + torch.cat([p * 2 for p in pieces(x)]).sum()
    KEPT.append([helper(x, n) for n in range(2)])


def transforms() -> None:
    x = torch.ones(4, 4)
    y = torch.func.vmap(lambda row: row * 2 + 1)(x)
    z = torch.func.grad(lambda t: (t * y).sum())(x)
    KEPT.append(z + 1)


def annotated() -> None:
    x = torch.ones(16)
    with torch.profiler.record_function("part"):
        y = x + 1
        y = y * 2
    z = y - x
    with torch.no_grad():
        z = z * z
    KEPT.append(z)


def raising() -> None:
    x = torch.ones(16)
    try:
        y = x + 1
        raise ValueError(y)
    except ValueError:
        x = x * 2
    finally:
        x = x - 1


PROGRAMS = [
    operators_between_calls,
    hooks_and_cycles,
    recursion_and_generators,
    transforms,
    annotated,
    raising,
]
LONG_PROGRAMS = [train, recompute]
