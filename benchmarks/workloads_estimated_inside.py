"""Programs for an estimate that turn on what is inside: operators made of others, other code.

Layers that one operator computes, optimizers inside others, code that torch's compiler takes.
"""

from __future__ import annotations

import concurrent.futures
import copy
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


def ensemble_on_meta(device: str) -> Step:
    """Several models at once, by one that is on meta, as the tutorial has it."""
    models = [mlp(device, 64)[0] for _ in range(4)]
    base, x = copy.deepcopy(models[0]).to("meta"), torch.randn(32, 64, device=device)

    def step() -> None:
        stacked = torch.func.stack_module_state(models)
        call = functools.partial(torch.func.functional_call, base, args=(x,))
        torch.vmap(lambda *state: call(state))(*stacked).square().mean().backward()

    return step


def physics_informed(device: str) -> Step:
    parts = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    model, points = nn.Sequential(*parts).to(device), torch.rand(256, 2, device=device)

    def loss() -> torch.Tensor:
        z = points.clone().requires_grad_()
        u = model(z)
        (slope,) = torch.autograd.grad(u.sum(), z, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, :1].sum(), z, create_graph=True)
        return (slope[:, 1:] + u * slope[:, :1] - 0.01 * bend[:, :1]).square().mean()

    return training(device, model, loss)


def copies_of_weights(device: str) -> Step:
    """A model in 16 bits, and an optimizer in 32."""
    model, x = mlp(device)
    model.bfloat16()
    copies = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies)

    def step() -> None:
        model(x.bfloat16()).float().square().mean().backward()
        for parameter, kept in zip(model.parameters(), copies, strict=True):
            assert parameter.grad is not None
            kept.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), copies)

    return step


def low_rank_by_hooks(device: str) -> Step:
    model, x = mlp(device)
    model.requires_grad_(False)
    low = nn.Sequential(nn.Linear(256, 8), nn.Linear(8, 1024)).to(device)
    model[0].register_forward_hook(lambda _, given, made: made + low(given[0]))
    optimizer = torch.optim.AdamW(low.parameters())
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


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
    "ensemble on meta": Program(ensemble_on_meta),
    "physics-informed": Program(physics_informed),
    "physics-informed, for CUDA": Program(physics_informed, "cuda"),
    "copies of weights": Program(copies_of_weights),
    "copies of weights, for CUDA": Program(copies_of_weights, "cuda"),
    "LoRA by hooks": Program(low_rank_by_hooks),
    "LoRA by hooks, for CUDA": Program(low_rank_by_hooks, "cuda"),
}
