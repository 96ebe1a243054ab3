"""Single operators, estimated against measured on the CPU: which take scratch nobody can see.

    python benchmarks/estimate_operators.py [operator ...]

Prints the operators whose estimate is off by more than 0.5 %, with what the profiler saw them
allocate and give back at the peak. The gradient here comes out of ``.sum()``, an expanded tensor,
which many kernels copy first; in a real model few see one.
"""

from __future__ import annotations

import datetime
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from estimate_accuracy import GOAL, measure
from torch import nn

from pytest_torchmem import estimate


class Call(nn.Module):
    """A function as a module, as `measure` wants one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output = self.function(*inputs)
        return output[0] if isinstance(output, tuple) else output


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def cases() -> Iterator[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...]]]:
    """Name, function and inputs of every operator."""
    image, matrix, sequence = (4, 16, 32, 32), (64, 64), (4, 16, 32)
    heads = (2, 4, 64, 32)
    tokens = torch.randint(0, 100, (8, 16))
    columns = torch.zeros(64, 4, dtype=torch.long)
    yield "conv2d", nn.Conv2d(16, 32, 3), (leaf(*image),)
    yield "conv1d", nn.Conv1d(16, 32, 3), (leaf(4, 16, 128),)
    yield "conv_transpose2d", nn.ConvTranspose2d(16, 32, 3), (leaf(4, 16, 16, 16),)
    yield "lstm", nn.LSTM(32, 32, batch_first=True), (leaf(*sequence),)
    yield "gru", nn.GRU(32, 32, batch_first=True), (leaf(*sequence),)
    yield "linear", nn.Linear(64, 64), (leaf(*matrix),)
    bf16 = torch.bfloat16
    yield "linear bf16", nn.Linear(64, 64, dtype=bf16), (leaf(*matrix, dtype=bf16),)
    yield "layer_norm", nn.LayerNorm(64), (leaf(*matrix),)
    yield "group_norm", nn.GroupNorm(4, 16), (leaf(*image),)
    yield "batch_norm", nn.BatchNorm2d(16), (leaf(*image),)
    yield "softmax", nn.Softmax(-1), (leaf(*matrix),)
    yield "gelu", nn.GELU(), (leaf(*matrix),)
    yield "silu", nn.SiLU(), (leaf(*matrix),)
    yield "dropout", nn.Dropout(0.5), (leaf(*matrix),)
    yield "embedding", nn.Embedding(100, 64), (tokens,)
    yield "embedding_bag", nn.EmbeddingBag(100, 64), (tokens,)
    yield "sdpa", F.scaled_dot_product_attention, (leaf(*heads), leaf(*heads), leaf(*heads))
    yield "max_pool2d", nn.MaxPool2d(2), (leaf(*image),)
    yield "avg_pool2d", nn.AvgPool2d(2), (leaf(*image),)
    yield "upsample", nn.Upsample(scale_factor=2, mode="bilinear"), (leaf(*image),)
    yield "reflection_pad2d", nn.ReflectionPad2d(2), (leaf(*image),)
    yield "unfold", nn.Unfold(3), (leaf(*image),)
    yield "bmm", torch.bmm, (leaf(4, 32, 32), leaf(4, 32, 32))
    yield "index", lambda a: a[torch.arange(0, 64, 2)], (leaf(*matrix),)
    yield "gather", lambda a, i: a.gather(1, i), (leaf(*matrix), columns)
    yield "topk", lambda a: a.topk(4)[0], (leaf(*matrix),)
    yield "sort", lambda a: a.sort()[0], (leaf(*matrix),)
    yield "cumsum", lambda a: a.cumsum(0), (leaf(*matrix),)
    yield "prod", lambda a: a.prod(0), (leaf(*matrix),)
    yield "logsumexp", lambda a: a.logsumexp(0), (leaf(*matrix),)
    yield "square", lambda a: torch.tanh(a) ** 2, (leaf(*matrix),)
    yield "used twice", lambda a: torch.tanh(a) * torch.tanh(a).exp() + a, (leaf(*matrix),)
    yield "linalg.inv", torch.linalg.inv, (leaf(*matrix),)
    yield "linalg.svdvals", torch.linalg.svdvals, (leaf(*matrix),)
    yield "fft", lambda a: torch.fft.rfft(a).abs(), (leaf(*matrix),)


def compare(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...], *, train: bool) -> Any:
    """Estimated bytes, measured bytes, and what was inside operators at the measured peak."""
    module = function if isinstance(function, nn.Module) else Call(function)
    call = Call(module)

    def forget(self: nn.Module) -> None:
        nn.Module.zero_grad(self)
        for tensor in inputs:
            tensor.grad = None

    call.zero_grad = types.MethodType(forget, call)

    def step(_: Any, values: dict[str, torch.Tensor]) -> Any:
        if not train:
            return call(*values.values())
        call(*values.values()).sum().backward()
        return None

    with torch.set_grad_enabled(train):
        estimated = estimate(call, *inputs, backward=train).peak.total
        named = {str(i): tensor for i, tensor in enumerate(inputs)}
        measured, hidden = measure(_Step(step, named), call, None)
    return estimated, measured, hidden


class _Step:
    """A call without arguments that shows `measure` its inputs, as a partial does."""

    def __init__(self, function: Callable[..., Any], values: dict[str, torch.Tensor]) -> None:
        self.function, self.args = function, (None, values)

    def __call__(self) -> Any:
        return self.function(*self.args)


def main() -> None:
    wanted = sys.argv[1:]
    today = datetime.datetime.now(datetime.timezone.utc).date()
    print(f"`python benchmarks/estimate_operators.py`, torch {torch.__version__}, {today}, on the")
    print("CPU. Bytes; operators off by more than 0.5 %.\n")
    print("| operator | mode | measured | estimated | error | taken inside at the peak |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    exact = []
    for name, function, inputs in cases():
        if wanted and name not in wanted:
            continue
        for mode, train in (("inference", False), ("train", True)):
            estimated, measured, hidden = compare(function, inputs, train=train)
            error = estimated / measured - 1
            if abs(error) > GOAL or wanted:
                cells = (name, mode, f"{measured:,}", f"{estimated:,}", f"{error:+.1%}", hidden)
                print("| " + " | ".join(cells) + " |", flush=True)
            else:
                exact.append(f"{name} ({mode})")
    print("\nWithin 0.5 %:", ", ".join(exact))


if __name__ == "__main__":
    main()
