"""More programs for an estimate, each for the CPU and for CUDA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint_sequential
from workloads_estimated import Program, Step, mlp, training


def grouped_attention(device: str) -> Step:
    """Eight heads ask, two answer; causal, written out by hand."""
    project = nn.Linear(128, 128 + 64).to(device)
    x = torch.randn(4, 64, 128, device=device)

    def loss_of() -> torch.Tensor:
        query, key, value = project(x).split([128, 32, 32], -1)
        query = query.view(4, 64, 8, 16).transpose(1, 2)
        key = key.view(4, 64, 2, 16).transpose(1, 2).repeat_interleave(4, 1)
        value = value.view(4, 64, 2, 16).transpose(1, 2).repeat_interleave(4, 1)
        scores = query @ key.transpose(-1, -2) / 4
        mask = torch.ones(64, 64, device=device, dtype=torch.bool).triu(1)
        return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ value).square().mean()

    return training(device, project, loss_of)


def residual_blocks(device: str) -> Step:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 16)
            self.conv = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + functional.silu(self.conv(self.norm(x)))

    layers = [nn.Conv2d(3, 16, 3, padding=1), Block(), Block(), nn.AvgPool2d(2), Block()]
    model = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
    x = torch.randn(2, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    return training(device, model, lambda: model(x).square().mean())


def adversaries(device: str) -> Step:
    maker = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
    judge = nn.Sequential(nn.Linear(128, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(device)
    of_maker = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), betas=(0.5, 0.999))
    real = torch.randn(64, 128, device=device)

    def step() -> None:
        made = maker(torch.randn(64, 32, device=device))
        of_judge.zero_grad()
        ones, zeros = torch.ones(64, 1, device=device), torch.zeros(64, 1, device=device)
        loss = functional.binary_cross_entropy_with_logits(judge(real), ones)
        loss = loss + functional.binary_cross_entropy_with_logits(judge(made.detach()), zeros)
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        functional.binary_cross_entropy_with_logits(judge(made), ones).backward()
        of_maker.step()

    return step


def bags(device: str) -> Step:
    rows = nn.EmbeddingBag(1000, 64, mode="sum").to(device)
    ids = torch.randint(0, 1000, (256,), device=device)
    offsets = torch.arange(0, 256, 8, device=device)
    return training(device, rows, lambda: rows(ids, offsets).square().mean())


def sparse_rows(device: str) -> Step:
    rows = nn.Embedding(1000, 64, sparse=True).to(device)
    ids = torch.arange(256, device=device)
    optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
    return training(device, rows, lambda: rows(ids).square().mean(), optimizer=optimizer)


def segments(device: str) -> Step:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(6)])
    model.to(device)
    x = torch.randn(64, 128, device=device, requires_grad=True)

    def loss_of() -> torch.Tensor:
        return checkpoint_sequential(model, 3, x, use_reentrant=False).mean()

    return training(device, model, loss_of)


def low_rank(device: str) -> Step:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(256, 256).requires_grad_(False)
            self.down, self.up = nn.Linear(256, 8, bias=False), nn.Linear(8, 256, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(x) + self.up(self.down(x)) * 2

    model = nn.Sequential(Adapted(), nn.GELU(), Adapted()).to(device)
    x = torch.randn(128, 256, device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def moving_average(device: str) -> Step:
    model, x = mlp(device)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def follow(_: torch.Tensor) -> None:
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.01)

    def loss_of() -> torch.Tensor:
        return functional.mse_loss(model(x), teacher(x))

    return training(device, model, loss_of, follow)


def soft_experts(device: str) -> Step:
    experts = nn.ModuleList([nn.Linear(128, 128) for _ in range(4)]).to(device)
    router = nn.Linear(128, 4).to(device)
    x = torch.randn(64, 128, device=device)
    model = nn.ModuleList([experts, router])

    def loss_of() -> torch.Tensor:
        weights, chosen = router(x).softmax(-1).topk(2, -1)
        kept = torch.zeros(64, 4, device=device).scatter(1, chosen, weights)
        each = torch.stack([expert(x) for expert in experts], 1)
        return (each * kept.unsqueeze(-1)).sum(1).square().mean()

    return training(device, model, loss_of)


def jacobians(device: str) -> Step:
    model, x = mlp(device, 32)
    whole = torch.func.vmap(torch.func.jacrev(model))
    return lambda: whole(x[:16])


def spectral(device: str) -> Step:
    weight = nn.Parameter(torch.randn(128, 33, dtype=torch.complex64, device=device))
    x = torch.randn(32, 128, 64, device=device)
    model = nn.ParameterList([weight])

    def loss_of() -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * weight).square().mean()

    return training(device, model, loss_of)


def whole_numbers(device: str) -> Step:
    weight = torch.randn(256, 256, device=device)
    x = torch.randn(128, 256, device=device)

    def step() -> torch.Tensor:
        scale = weight.abs().amax(1, keepdim=True) / 127
        small = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        return x @ (small.float() * scale).T

    return step


def one_by_one(device: str, **how: Any) -> Step:
    model, x = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def cached_keys(device: str) -> Step:
    project = nn.Linear(64, 192).to(device)
    x = torch.randn(2, 1, 64, device=device)

    def step() -> torch.Tensor:
        with torch.inference_mode():
            keys = torch.empty(2, 0, 64, device=device)
            values = keys
            for _ in range(32):
                query, key, value = project(x).chunk(3, -1)
                keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
                seen = functional.scaled_dot_product_attention(query, keys, values)
            return seen

    return step


def clipped(device: str) -> Step:
    model, x = mlp(device)

    def clip(_: torch.Tensor) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)

    return training(device, model, lambda: functional.huber_loss(model(x), x), clip)


def unrolled(device: str) -> Step:
    cell, head = nn.GRUCell(64, 128).to(device), nn.Linear(128, 10).to(device)
    x = torch.randn(12, 32, 64, device=device)
    labels = torch.randint(0, 10, (32,), device=device)

    def loss_of() -> torch.Tensor:
        hidden = torch.zeros(32, 128, device=device)
        for row in x:
            hidden = cell(row, hidden)
        return functional.cross_entropy(head(hidden), labels)

    return training(device, nn.ModuleList([cell, head]), loss_of)


_BUILDS: dict[str, Callable[[str], Step]] = {
    "grouped attention": grouped_attention,
    "residual blocks, channels last": residual_blocks,
    "two models, two optimizers": adversaries,
    "EmbeddingBag": bags,
    "sparse gradients": sparse_rows,
    "checkpoint_sequential": segments,
    "low-rank adapters": low_rank,
    "teacher by moving average": moving_average,
    "experts that all run": soft_experts,
    "vmap of jacrev": jacobians,
    "complex numbers and FFT": spectral,
    "weights of 8 bits": whole_numbers,
    "AdamW, one tensor after another": lambda d: one_by_one(d, foreach=False),
    "AdamW, fused": lambda d: one_by_one(d, fused=True),
    "decoding with cached keys": cached_keys,
    "clipping twice, Huber's loss": clipped,
    "GRUCell, unrolled": unrolled,
}
_RETURNS = {"vmap of jacrev", "weights of 8 bits", "decoding with cached keys"}

MORE = {
    name + ending: Program(build, device, **({"no_grad": True} if name in _RETURNS else {}))
    for name, build in _BUILDS.items()
    for device, ending in (("cpu", ""), ("cuda", ", for CUDA"))
}
