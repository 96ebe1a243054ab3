"""Bodies that train: copied into a project of their own and run in many orders.

What a body needs of time is its import; each is as small as it can be and still be what its name
says.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

measured = pytest.mark.memory_budget("1GiB")


def mlp(width: int = 32, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_sgd_with_momentum(torchmem):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in torchmem.steps(3, warmup=1):
        train(model, optimizer, torch.ones(16, 32))


@pytest.mark.memory_budget("1GiB", growth="0B")
def test_adamw_in_steps(torchmem):
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in torchmem.steps(3, warmup=1):
        train(model, optimizer, torch.ones(16, 32))


@measured
def test_adam_without_foreach():
    model = mlp()
    train(model, torch.optim.Adam(model.parameters(), foreach=False), torch.ones(16, 32))


@measured
def test_a_convolution_with_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    model(torch.randn(2, 3, 16, 16)).sum().backward()


@measured
def test_a_long_short_term_memory():
    model = nn.LSTM(8, 16, num_layers=2, batch_first=True)
    output, _ = model(torch.ones(4, 5, 8))
    output.sum().backward()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


@measured
def test_tied_weights():
    tokens = torch.arange(32).reshape(2, 16)
    cross_entropy(Tied()(tokens).flatten(0, 1), tokens.flatten()).backward()


@measured
def test_a_low_rank_adapter():
    base, down, up = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
    base.requires_grad_(False)
    optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()])
    x = torch.ones(8, 64)
    (base(x) + up(down(x))).square().mean().backward()
    optimizer.step()


@measured
def test_mixed_precision():
    model = mlp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(torch.ones(16, 32)).float().square().mean()
    loss.backward()


@measured
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant):
    model, x = mlp(depth=3), torch.ones(16, 32, requires_grad=True)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()


def test_gradients_pile_up(torchmem):
    model = mlp()
    with torchmem.measure("two passes") as region:
        for _ in range(2):
            model(torch.ones(16, 32)).sum().backward()
    assert region.retained.gradient == sum(p.nbytes for p in model.parameters())
    with torchmem.measure("third"):
        model(torch.ones(16, 32)).sum().backward()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.scale = x.new_full((32,), 3.0)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * ctx.scale * x**2


@measured
def test_a_function_of_ones_own():
    x = torch.ones(16, 32, requires_grad=True)
    Cube.apply(x * 2).sum().backward()


@measured
def test_a_gradient_of_a_gradient():
    model, x = mlp(), torch.ones(16, 32, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), [x], create_graph=True)
    (slope.norm() - 1).square().backward()


@measured
def test_two_passes_over_one_graph():
    loss = mlp()(torch.ones(16, 32)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


@measured
def test_hooks_everywhere():
    model, seen = mlp(), []
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_full_backward_hook(lambda module, inward, outward: seen.append(inward))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    hidden = model(torch.ones(16, 32))
    hidden.register_hook(lambda gradient: gradient * 2)
    hidden.sum().backward()
    assert seen


@measured
def test_saved_tensors_are_packed_by_the_user():
    model = mlp()
    halve = torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())
    with halve:
        loss = model(torch.ones(16, 32)).sum()
    loss.backward()


@measured
def test_saved_tensors_are_offloaded():
    with torch.autograd.graph.save_on_cpu():
        loss = mlp()(torch.ones(16, 32)).sum()
    loss.backward()


@measured
def test_a_sparse_gradient():
    embed = nn.Embedding(100, 16, sparse=True)
    optimizer = torch.optim.SGD(embed.parameters(), lr=0.1)
    embed(torch.tensor([1, 5, 5, 7])).sum().backward()
    optimizer.step()


@measured
def test_operators_in_place():
    x = torch.ones(16, 32, requires_grad=True)
    (x * 2).add_(1).mul_(3).relu_().sum().backward()


@measured
def test_anomaly_mode():
    with torch.autograd.detect_anomaly(check_nan=True):
        mlp()(torch.ones(16, 32)).sum().backward()


@measured
@pytest.mark.parametrize("count", [1, 2])
def test_threads_within_an_operator(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        x = torch.ones(64, 1024, requires_grad=True)
        (x.softmax(1) @ torch.ones(1024, 64)).sum().backward()
    finally:
        torch.set_num_threads(before)


@measured
def test_a_pass_that_fails_half_way():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: 1 / 0)  # type: ignore[operator]
    with contextlib.suppress(ZeroDivisionError):
        model(torch.ones(16, 32)).sum().backward()
    model[2].zero_grad()


@pytest.mark.memory_budget("1GiB", warmup=1)
def test_dropout_after_a_warm_up():
    model = nn.Sequential(mlp(), nn.Dropout(0.5))
    model(torch.ones(16, 32)).sum().backward()


@measured
@pytest.mark.filterwarnings("ignore")
def test_compiled_without_code_generation():
    torch._dynamo.reset()
    model = torch.compile(mlp(), backend="aot_eager")
    for _ in range(2):
        model(torch.ones(16, 32)).sum().backward()


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    return torch.compile(mlp())


@pytest.mark.memory_budget("1GiB", warmup=1)
@pytest.mark.filterwarnings("ignore")
def test_compiled(compiled):
    compiled(torch.ones(16, 32)).sum().backward()
    compiled.zero_grad()
