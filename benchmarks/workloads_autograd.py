"""More shared workloads: checkpoints, custom Functions, shared and frozen parameters, hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads import Body, Declarations, Workload, batch, mlp, train_step


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(128, 4)[:-1] for _ in range(3))
        self.head = nn.Linear(128, 10)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            recomputed = checkpoint(block, x, use_reentrant=self.use_reentrant)
            assert isinstance(recomputed, torch.Tensor)
            x = recomputed
        out: torch.Tensor = self.head(x)
        return out


def _checkpointed(see: Declarations, use_reentrant: bool) -> Body:
    torch.manual_seed(0)
    model = see.model(Checkpointed(use_reentrant))
    optimizer = see.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    # Only the reentrant kind needs an input that wants a gradient.
    x = see.input(torch.randn(256, 128, requires_grad=use_reentrant))
    y = see.input(torch.randint(0, 10, (256,)))
    return lambda: train_step(model, optimizer, x, y)


def checkpoint_reentrant(see: Declarations) -> Body:
    return _checkpointed(see, use_reentrant=True)


def checkpoint_non_reentrant(see: Declarations) -> Body:
    return _checkpointed(see, use_reentrant=False)


def nested_checkpoint(see: Declarations) -> Body:
    """A checkpoint within the recomputation of another one."""
    torch.manual_seed(0)
    inner = mlp(128, 2)[:-1]
    outer = see.model(nn.Sequential(inner, nn.Linear(128, 128)))
    x, _ = batch(see, 256, 128)

    def layers(x: torch.Tensor) -> Any:
        return outer[1](checkpoint(inner, x, use_reentrant=False))

    def body() -> None:
        result: Any = checkpoint(layers, x, use_reentrant=False)
        result.sum().backward()

    return body


def written_slices(see: Declarations) -> Body:
    """Results written into one tensor: the backward of a copy runs within that of the slice."""
    torch.manual_seed(0)
    model = see.model(nn.Linear(128, 128))
    x, _ = batch(see, 64, 128)

    def body() -> None:
        out = torch.empty(4, 64, 128)
        for i in range(4):
            out[i] = model(x)
        out.square().sum().backward()

    return body


def autocast_backward(see: Declarations) -> Body:
    """Autocast with its peak in the backward pass, while the weights' copies are live."""
    torch.manual_seed(0)
    model = see.model(mlp(256, 4))
    x, y = batch(see, 512, 256)

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()

    return body


def autocast_bf16(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(mlp())
    optimizer = see.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    x, y = batch(see, 64, 128)

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return body


class NestedGradient(torch.autograd.Function):
    """Differentiates in its forward pass, with an operation in place: the gradient is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            energy = (inner * 2.0).tanh_().square().sum()
            (gradient,) = torch.autograd.grad(energy, inner)
        ctx.save_for_backward(gradient)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = ctx.saved_tensors
        return gradients[0] * gradient


class WithNestedGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = NestedGradient.apply(layer(x))
        return x


def nested_autograd(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(WithNestedGradient())
    optimizer = see.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(see, 256, 128)
    return lambda: train_step(model, optimizer, x, y)


class Square(torch.autograd.Function):
    """Keeps its input as an attribute of the context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2.0 * ctx.x * gradients[0]


def context_attribute(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(nn.Linear(128, 128))
    x, _ = batch(see, 256, 128)

    def body() -> None:
        h = model(x)
        for _ in range(4):
            h = Square.apply(h)
        h.mean().backward()

    return body


def deep_copy(see: Declarations) -> Body:
    """As an exponential moving average or a target network does."""
    torch.manual_seed(0)
    model = see.model(mlp())
    x, _ = batch(see, 64, 128)

    def body() -> None:
        target = see.model(copy.deepcopy(model))
        with torch.no_grad():
            wanted = target(x)
        functional.mse_loss(model(x), wanted).backward()

    return body


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(500, 64)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.hidden(self.embedding(tokens))))
        return out


def tied_weights(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(TiedLanguageModel())
    optimizer = see.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    tokens = see.input(torch.randint(0, 500, (4, 32)))

    def body() -> None:
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()

    return body


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def lora(see: Declarations) -> Body:
    torch.manual_seed(0)
    adapted = (LoraLinear(nn.Linear(128, 128)) for _ in range(3))
    model = see.model(nn.Sequential(*(layer for a in adapted for layer in (a, nn.GELU()))))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = see.optimizer(torch.optim.AdamW(trained, foreach=False))
    x, y = batch(see, 64, 128)
    return lambda: train_step(model, optimizer, x, y)


def sparse_embedding(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(nn.Embedding(2000, 64, sparse=True))
    optimizer = see.optimizer(torch.optim.SparseAdam(list(model.parameters())))
    tokens = see.input(torch.randint(0, 2000, (32, 64)))

    def body() -> None:
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    return body


def gradient_penalty(see: Declarations) -> Body:
    """Double backward: the gradient of the input is part of the loss."""
    torch.manual_seed(0)
    model = see.model(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)))
    optimizer = see.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = see.input(torch.randn(64, 128, requires_grad=True))

    def body() -> None:
        score = model(x).sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        # Its norm keeps it for the backward pass of the whole loss.
        see.kept(gradient)
        (score + (gradient.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    return body


def fused_backward_optimizer(see: Declarations) -> Body:
    """Each gradient is used and dropped inside the backward pass, by a hook on its parameter."""
    torch.manual_seed(0)
    model = see.model(mlp())
    x, y = batch(see, 64, 128)

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-0.1)
            parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return lambda: train_step(model, None, x, y)


AUTOGRAD: tuple[Workload, ...] = (
    checkpoint_reentrant,
    checkpoint_non_reentrant,
    nested_checkpoint,
    written_slices,
    autocast_backward,
    autocast_bf16,
    nested_autograd,
    context_attribute,
    deep_copy,
    tied_weights,
    lora,
    sparse_embedding,
    gradient_penalty,
    fused_backward_optimizer,
)
