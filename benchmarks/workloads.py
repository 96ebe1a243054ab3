"""Workloads that benchmarks and tests share: training steps, small enough to run in a second.

A workload is a plain function. Calling it does what a fixture would do and returns the body to
measure; a workload that makes everything in the body has nothing to do before. It introduces what
it makes to ``see``, a `Declarations`, in the way of ``model = see.model(Net())``: that changes
nothing, and lets a benchmark know the truth about a tensor from the one who made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

T = TypeVar("T")
Body = Callable[[], None]
Workload = Callable[["Declarations"], Body]


class Declarations:
    """Hears what a workload says about its tensors, and does nothing with it."""

    def model(self, model: T) -> T:
        """Parameters, buffers and gradients are what this module says they are."""
        return model

    def optimizer(self, optimizer: T) -> T:
        """Its state is optimizer state."""
        return optimizer

    def input(self, tensor: T) -> T:
        """Data."""
        return tensor

    def parameter(self, tensor: T) -> T:
        """A tensor to be trained that no module holds."""
        return tensor

    def gradient(self, tensor: T) -> T:
        """What ``autograd.grad`` or ``func.grad`` gave, and the body holds."""
        return tensor

    def kept(self, tensor: T) -> T:
        """Made by the forward pass and kept for backward, where no hook can see it."""
        return tensor


def mlp(width: int = 128, depth: int = 3) -> nn.Sequential:
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    x: torch.Tensor,
    y: torch.Tensor,
    set_to_none: bool = True,
) -> None:
    loss = functional.cross_entropy(model(x), y)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=set_to_none)
    loss.backward()
    if optimizer is not None:
        optimizer.step()


def batch(see: Declarations, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return see.input(torch.randn(*shape)), see.input(torch.randint(0, 10, (shape[0],)))


def _trained(
    see: Declarations,
    make_optimizer: Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer],
    earlier_steps: int = 0,
    steps: int = 1,
    set_to_none: bool = True,
) -> Body:
    """An MLP from a fixture, after some steps that are not measured."""
    torch.manual_seed(0)
    model = see.model(mlp())
    optimizer = see.optimizer(make_optimizer(model.parameters()))
    x, y = batch(see, 64, 128)

    def body() -> None:
        for _ in range(steps):
            train_step(model, optimizer, x, y, set_to_none)

    for _ in range(earlier_steps):
        train_step(model, optimizer, x, y, set_to_none)
    return body


def mlp_adamw_first_step(see: Declarations) -> Body:
    return _trained(see, lambda p: torch.optim.AdamW(p, foreach=False))


def mlp_adamw_steady(see: Declarations) -> Body:
    return _trained(see, lambda p: torch.optim.AdamW(p, foreach=False), earlier_steps=1)


def mlp_adamw_foreach(see: Declarations) -> Body:
    """The scratch of a foreach optimizer is as large as the model: the peak is in its step."""
    return _trained(see, lambda p: torch.optim.AdamW(p, foreach=True), earlier_steps=1)


def mlp_adamw_fused(see: Declarations) -> Body:
    return _trained(see, lambda p: torch.optim.AdamW(p, fused=True))


def mlp_sgd_momentum(see: Declarations) -> Body:
    return _trained(see, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), steps=2)


def mlp_zero_in_place(see: Declarations) -> Body:
    """``zero_grad(set_to_none=False)``: the same gradients for ever."""
    return _trained(see, lambda p: torch.optim.SGD(p, lr=0.1), 1, 2, set_to_none=False)


def mlp_zero_to_none(see: Declarations) -> Body:
    """The gradients of the step before are live when the window begins."""
    return _trained(see, lambda p: torch.optim.SGD(p, lr=0.1), 1, 2, set_to_none=True)


def optimizer_scratch(see: Declarations) -> Body:
    """A rotation by a matrix of states, as in Shampoo or Muon: the largest scratch is in it."""
    torch.manual_seed(0)
    model = see.model(nn.Linear(256, 256, bias=False))
    x = see.input(torch.randn(4, 256))
    optimizer = see.optimizer(torch.optim.Muon(model.parameters(), lr=0.01))

    def body() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    return body


def made_in_body(see: Declarations) -> Body:
    """Model, data and optimizer are made by the test itself."""

    def body() -> None:
        _trained(see, lambda p: torch.optim.AdamW(p, foreach=False), steps=2)()

    return body


def gradient_accumulation(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(mlp())
    optimizer = see.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [batch(see, 64, 128) for _ in range(3)]

    def body() -> None:
        for x, y in batches:
            (functional.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def lbfgs(see: Declarations) -> Body:
    """Forward and backward run in a closure that the optimizer calls."""
    torch.manual_seed(0)
    model = see.model(mlp())
    optimizer = see.optimizer(torch.optim.LBFGS(model.parameters(), max_iter=3))
    x, y = batch(see, 64, 128)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    def body() -> None:
        optimizer.step(closure)

    return body


def preprocessing(see: Declarations) -> Body:
    """What the model reads is computed from data in the body."""
    torch.manual_seed(0)
    model = see.model(mlp())
    raw = see.input(torch.randint(0, 255, (64, 128)))

    def body() -> None:
        x = see.input(raw.float() / 255)
        model(x).sum().backward()

    return body


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(4),
        )
        self.head = nn.Linear(32 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.features(x)
        out: torch.Tensor = self.head(hidden.flatten(1))
        return out


def cnn_batch_norm(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(SmallCNN())
    optimizer = see.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x, y = batch(see, 8, 3, 32, 32)
    return lambda: train_step(model, optimizer, x, y)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(x)
        out: torch.Tensor = self.head(states[:, -1])
        return out


def lstm(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(Tagger())
    optimizer = see.optimizer(torch.optim.Adam(model.parameters(), foreach=False))
    x, y = batch(see, 16, 20, 32)
    return lambda: train_step(model, optimizer, x, y)


class Classifier(nn.Module):
    """A small transformer encoder with a classification head."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(x).mean(dim=1))
        return out


def transformer(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(Classifier())
    optimizer = see.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    x, y = batch(see, 8, 32, 64)
    return lambda: train_step(model, optimizer, x, y)


def forward_no_grad(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(mlp().eval())
    x, _ = batch(see, 64, 128)

    def body() -> None:
        with torch.no_grad():
            model(x)

    return body


def forward_with_grad(see: Declarations) -> Body:
    """The graph is built and never used: nothing is kept *for backward*."""
    torch.manual_seed(0)
    model = see.model(mlp().eval())
    x, _ = batch(see, 64, 128)
    return lambda: model(x).sum().item()


def plain_forward(see: Declarations) -> Body:
    """Tensors made by the body, no module anywhere."""

    def body() -> None:
        torch.manual_seed(0)
        x = see.input(torch.randn(64, 128))
        w1 = see.input(torch.randn(128, 256))
        w2 = see.input(torch.randn(256, 128))
        torch.relu(x @ w1) @ w2

    return body


def plain_backward(see: Declarations) -> Body:
    """Leaf tensors instead of modules, plain SGD by hand."""
    torch.manual_seed(0)
    w1 = see.parameter(torch.randn(128, 256, requires_grad=True))
    w2 = see.parameter(torch.randn(256, 10, requires_grad=True))
    x, y = batch(see, 64, 128)

    def body() -> None:
        loss = functional.cross_entropy(torch.relu(x @ w1) @ w2, y)
        loss.backward()
        with torch.no_grad():
            for w in (w1, w2):
                assert w.grad is not None
                w.sub_(w.grad, alpha=0.1)
                w.grad = None

    return body


def backward_without_optimizer(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(mlp())
    x, y = batch(see, 64, 128)
    return lambda: train_step(model, None, x, y)


def autograd_grad(see: Declarations) -> Body:
    torch.manual_seed(0)
    model = see.model(mlp())
    x, y = batch(see, 64, 128)

    def body() -> None:
        loss = functional.cross_entropy(model(x), y)
        for gradient in torch.autograd.grad(loss, list(model.parameters())):
            see.gradient(gradient)

    return body


def in_place_chain(see: Declarations) -> Body:
    torch.manual_seed(0)
    w = see.parameter(torch.randn(128, 128, requires_grad=True))
    x, _ = batch(see, 64, 128)

    def body() -> None:
        h = x @ w
        for _ in range(50):
            h = h.add(1.0).relu_()
        h.sum().backward()

    return body


BASIC: tuple[Workload, ...] = (
    mlp_adamw_first_step,
    mlp_adamw_steady,
    mlp_adamw_foreach,
    mlp_adamw_fused,
    mlp_sgd_momentum,
    mlp_zero_in_place,
    mlp_zero_to_none,
    optimizer_scratch,
    lbfgs,
    made_in_body,
    preprocessing,
    gradient_accumulation,
    cnn_batch_norm,
    lstm,
    transformer,
    forward_no_grad,
    forward_with_grad,
    plain_forward,
    plain_backward,
    backward_without_optimizer,
    autograd_grad,
    in_place_chain,
)
