"""Programs for an estimate that turn on what was there before: held, resized, or used in part.

And optimizers and losses that people write by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from workloads_estimated import Program, Step, training


def layers(device: str) -> tuple[nn.Module, torch.Tensor]:
    parts = [part for _ in range(3) for part in (nn.Linear(128, 128), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(128, 10)).to(device), torch.randn(64, 128, device=device)


def unused_head(device: str) -> Step:
    """Two heads, one of which is not called."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(64, 64)
            self.of_words, self.of_classes = nn.Linear(64, 1000), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.of_classes(self.body(x))
            return made

    model, x = Heads().to(device), torch.randn(16, 64, device=device)
    return training(device, model, lambda: model(x).square().mean())


def part_of_data(device: str) -> Step:
    """A batch that looks into all of the data."""
    model = nn.Linear(64, 64).to(device)
    batch = torch.randn(4096, 64, device=device)[:32].detach()
    return training(device, model, lambda: model(batch).square().mean())


def sharded(device: str) -> Step:
    """Weights that are there while their layer runs, as FSDP has them."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4))).to(device)
    weights = list(model.parameters())
    shards = [weight.detach().clone() for weight in weights]
    x = torch.randn(32, 128, device=device)
    for weight in weights:
        weight.untyped_storage().resize_(0)

    def step() -> torch.Tensor:
        made = x
        with torch.no_grad():
            for layer, weight, shard in zip(model, weights, shards, strict=True):
                weight.untyped_storage().resize_(weight.numel() * weight.element_size())
                weight.copy_(shard)
                made = layer(made).relu()
                weight.untyped_storage().resize_(0)
        return made

    return step


def hessian_times_vector(device: str) -> Step:
    """A module that is called with other parameters than its own."""
    model, x = layers(device)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}

    def loss(some: Any) -> torch.Tensor:
        return torch.func.functional_call(model, some, (x,)).square().mean()

    return lambda: torch.func.jvp(torch.func.grad(loss), (parameters,), (direction,))[1]


class Lion(torch.optim.Optimizer):
    """The sign of a momentum."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-4, "decay": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["decay"])
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


def lion(device: str) -> Step:
    model, x = layers(device)
    optimizer = Lion(model.parameters())
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def learns_to_learn(device: str) -> Step:
    """MAML: two steps of descent, and the gradient through both."""
    model, x = layers(device)

    def loss_of() -> torch.Tensor:
        call, some = torch.func.functional_call, dict(model.named_parameters())
        for _ in range(2):
            inner = call(model, some, (x,)).square().mean()
            grads = torch.autograd.grad(inner, list(some.values()), create_graph=True)
            pairs = zip(some.items(), grads, strict=True)
            some = {name: p - 0.1 * grad for (name, p), grad in pairs}
        loss: torch.Tensor = call(model, some, (x,)).abs().mean()
        return loss

    return training(device, model, loss_of)


def codebook(device: str) -> Step:
    """A VQ-VAE: the nearest code, and a gradient straight through."""
    encode, decode = nn.Linear(64, 32).to(device), nn.Linear(32, 64).to(device)
    codes = nn.Embedding(128, 32).to(device)
    x = torch.randn(256, 64, device=device)

    def loss_of() -> torch.Tensor:
        z = encode(x)
        nearest = codes(torch.cdist(z, codes.weight).argmin(1))
        made = decode(z + (nearest - z).detach())
        return functional.mse_loss(made, x) + functional.mse_loss(nearest, z.detach())

    return training(device, nn.ModuleList([encode, decode, codes]), loss_of)


_ON_BOTH: dict[str, Callable[[str], Step]] = {
    "head that is not called": unused_head,
    "part of all data": part_of_data,
    "weights for one layer at a time": sharded,
    "Hessian times a vector": hessian_times_vector,
    "Lion": lion,
    "MAML": learns_to_learn,
    "VQ-VAE": codebook,
}

HELD = {
    **{name: Program(build) for name, build in _ON_BOTH.items()},
    **{f"{name}, for CUDA": Program(build, "cuda") for name, build in _ON_BOTH.items()},
}
