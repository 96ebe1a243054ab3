"""Programs for an estimate that turn on what is inside: operators made of others, other code.

Layers that one operator computes, optimizers inside others, code that torch's compiler takes.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from workloads_estimated import Program, Step, mlp, training


def encoder(device: str, *, masked: bool = False, **how: Any) -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, **how)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device).eval()
    x, mask = torch.randn(4, 64, 128, device=device), torch.zeros(4, 64, device=device)
    mask[:, 50:] = 1
    return functools.partial(model, x, src_key_padding_mask=mask.bool() if masked else None)


def nested(device: str) -> Step:
    """An encoder that packs what a mask leaves, where lengths are values."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(4, 64, 128)
    mask = torch.zeros(4, 64, dtype=torch.bool)
    mask[:, 50:] = True
    return functools.partial(model, x, src_key_padding_mask=mask)


def attention(device: str) -> Step:
    model = nn.MultiheadAttention(128, 4, batch_first=True).to(device).eval()
    x = torch.randn(4, 64, 128, device=device)
    return lambda: model(x, x, x, need_weights=False)[0]


class Lookahead(torch.optim.Optimizer):
    """Shares groups and state with the optimizer whose steps it takes."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        fast = [p for group in self.param_groups for p in group["params"]]
        for weight, slow in zip(fast, self.slow, strict=True):
            slow.lerp_(weight, 0.5)
            weight.copy_(slow)


def lookahead(device: str) -> Step:
    model, x = mlp(device)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def unfolded(device: str) -> Step:
    """Convolutions that oneDNN does not take."""
    parts = [nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose3d(8, 4, 2, 2)]
    model = nn.Sequential(*parts).double().to(device)
    x = torch.randn(1, 4, 8, 12, 12, dtype=torch.float64, device=device)
    return training(device, model, lambda: model(x).square().mean())


def learned_quantization(device: str) -> Step:
    model, x = mlp(device)
    scale, zero = (nn.Parameter(torch.full((1,), value, device=device)) for value in (0.1, 0.0))
    quantize = torch._fake_quantize_learnable_per_tensor_affine
    return training(
        device, model, lambda: quantize(model(x), scale, zero, 0, 255, 1.0).square().mean()
    )


def from_numpy(device: str) -> Step:
    """A batch whose memory is numpy's."""
    import numpy as np

    model, _ = mlp(device)
    data = np.ones((128, 256), dtype=np.float32)
    return lambda: model(torch.from_numpy(data)).square().mean()


def compiled(device: str) -> Step:
    x = torch.randn(64, 64, device=device)
    return functools.partial(torch.compile(torch.nn.functional.gelu, backend="eager"), x)


def called_by_operators(make: Callable[[torch.Tensor], Any]) -> Callable[[str], Step]:
    return lambda device: functools.partial(make, torch.randn(64, 64, device=device))


def condition(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def loop(x: torch.Tensor) -> Any:
    from torch._higher_order_ops import while_loop

    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), (torch.tensor(0), x))[1]


def flexible(x: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    q = x.view(1, 1, 128, 32)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))


def linearized(x: torch.Tensor) -> Any:
    return torch.func.linearize(torch.tanh, x)[1](x)


def pooled(device: str) -> Step:
    model, x = mlp(device)

    def step() -> Any:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda factor: model(x * factor).sum(), range(3)))

    return step


def scripted(device: str) -> Step:
    model, x = mlp(device)
    outer = nn.Sequential(torch.jit.trace(model, x), nn.ReLU())
    return lambda: outer(x)


def relative_bias(device: str) -> Step:
    """Attention with a bias that is learned."""
    project, bias = nn.Linear(64, 192).to(device), nn.Parameter(torch.zeros(1, 4, 64, 64))
    x = torch.randn(4, 64, 64, device=device)

    def loss() -> torch.Tensor:
        q, k, v = project(x).view(4, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended: torch.Tensor = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return attended.square().mean()

    return training(device, nn.ParameterList([*project.parameters(), bias]), loss)


INSIDE = {
    "encoder without gradients": Program(encoder, no_grad=True),
    "encoder, norms first": Program(
        lambda device: encoder(device, norm_first=True, activation="gelu"), no_grad=True
    ),
    "padded encoder": Program(lambda device: encoder(device, masked=True), no_grad=True),
    "nested encoder": Program(nested, no_grad=True),
    "attention without gradients": Program(attention, no_grad=True),
    "Lookahead": Program(lookahead),
    "unfolded convolutions": Program(unfolded),
    "learned quantization": Program(learned_quantization),
    "batch of numpy": Program(from_numpy),
    "compiled function": Program(compiled),
    "torch.cond": Program(called_by_operators(condition)),
    "while_loop": Program(called_by_operators(loop)),
    "flex_attention": Program(called_by_operators(flexible)),
    "linearize": Program(called_by_operators(linearized)),
    "thread pool": Program(pooled),
    "traced module": Program(scripted),
    "learned bias": Program(relative_bias),
}
