"""Programs of further kinds for an estimate, each for the CPU and for CUDA.

Networks for pictures, volumes and sound, complex numbers, Gaussian processes, several models at
once, a policy's gradient, and what is kept for a backward pass in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from workloads_estimated import Program, Step, training


def layers(device: str, *parts: nn.Module, shape: tuple[int, ...], **how: Any) -> Step:
    """Train modules, one after the other, on an input of a shape."""
    model: nn.Module = nn.Sequential(*parts).to(device, **how)
    x = torch.randn(shape, device=device).to(**how)
    return training(device, model, lambda: model(x).square().mean())


def residual(device: str) -> Step:
    """A ResNet's blocks, with a stride and a head."""

    class Block(nn.Module):
        def __init__(self, width: int, made: int, stride: int) -> None:
            super().__init__()
            self.first = nn.Conv2d(width, made, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
            self.norms = nn.ModuleList(nn.BatchNorm2d(made) for _ in range(3))
            self.short = nn.Conv2d(width, made, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = functional.relu(self.norms[0](self.first(x)), inplace=True)
            y = self.norms[1](self.second(y)) + self.norms[2](self.short(x))
            return functional.relu(y, inplace=True)

    stem = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)]
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head).to(device)
    x, y = torch.randn(4, 3, 64, 64, device=device), torch.randint(0, 10, (4,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    return training(
        device, model, lambda: functional.cross_entropy(model(x), y), optimizer=optimizer
    )


def dense(device: str) -> Step:
    """A DenseNet: what came before is joined again and again, and computed again."""
    convs = nn.ModuleList(nn.Conv2d(8 + 8 * k, 8, 3, padding=1) for k in range(4)).to(device)
    x = torch.randn(2, 8, 32, 32, device=device)

    def loss_of() -> torch.Tensor:
        found = [x]
        for conv in convs:
            join = lambda *parts, conv=conv: functional.relu(conv(torch.cat(parts, 1)))  # noqa: E731
            found.append(checkpoint(join, *found, use_reentrant=False))
        return torch.cat(found, 1).square().mean()

    return training(device, convs, loss_of)


def inverted(device: str) -> Step:
    """A MobileNet's block with squeeze and excitation, channels last."""

    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Conv2d(64, 8, 1), nn.ReLU(), nn.Conv2d(8, 64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * functional.hardsigmoid(self.inner(x.mean((2, 3), keepdim=True)))

    parts = [nn.Conv2d(16, 64, 1), nn.BatchNorm2d(64), nn.Hardswish()]
    parts += [
        nn.Conv2d(64, 64, 3, padding=1, groups=64),
        nn.BatchNorm2d(64),
        Squeeze(),
        nn.Conv2d(64, 16, 1),
    ]
    return layers(device, *parts, shape=(4, 16, 32, 32), memory_format=torch.channels_last)


def weaving(device: str, *, need_weights: bool, key_padding: bool = False) -> Step:
    model = nn.MultiheadAttention(128, 8, dropout=0.1, batch_first=True).to(device)
    x = torch.randn(4, 64, 128, device=device)
    padding = torch.zeros(4, 64, dtype=torch.bool, device=device) if key_padding else None

    def loss_of() -> torch.Tensor:
        out, weights = model(x, x, x, key_padding_mask=padding, need_weights=need_weights)
        return out.square().mean() + (weights.square().mean() if need_weights else 0)

    return training(device, model, loss_of)


def bags(device: str) -> Step:
    table = nn.EmbeddingBag(500, 64, mode="max").to(device)
    ids = torch.randint(0, 500, (400,), device=device)
    offsets = torch.arange(0, 400, 10, device=device)
    return training(device, table, lambda: table(ids, offsets).square().mean())


def turned(device: str) -> Step:
    """Rotary positions as complex numbers."""
    project = nn.Linear(128, 256).to(device)
    x = torch.randn(4, 64, 128, device=device)
    angles = torch.outer(torch.arange(64.0, device=device), torch.rand(16, device=device))
    turns = torch.polar(torch.ones_like(angles), angles)

    def loss_of() -> torch.Tensor:
        query, key = project(x).view(4, 64, 2, 4, 32).unbind(2)
        both = []
        for part in (query, key):
            pairs = torch.view_as_complex(part.reshape(4, 64, 4, 16, 2))
            both.append(torch.view_as_real(pairs * turns[:, None]).flatten(3))
        return torch.einsum("bqhd,bkhd->bhqk", *both).softmax(-1).square().mean()

    return training(device, project, loss_of)


def filtered(device: str) -> Step:
    """A global filter: a transform, a complex weight, and back."""
    weight = nn.Parameter(torch.randn(16, 9, 32, dtype=torch.complex64, device=device))
    model = nn.ParameterList([weight])
    x = torch.randn(4, 16, 16, 32, device=device)

    def loss_of() -> torch.Tensor:
        spectrum = torch.fft.rfft2(x, dim=(1, 2), norm="ortho") * weight
        return torch.fft.irfft2(spectrum, s=(16, 16), dim=(1, 2), norm="ortho").square().mean()

    return training(device, model, loss_of)


def gaussian(device: str) -> Step:
    """A Gaussian process: distances, a factor, a solution."""
    x, y = torch.randn(96, 4, device=device), torch.randn(96, 1, device=device)
    scale = nn.Parameter(torch.ones(4, device=device))
    noise = nn.Parameter(torch.ones((), device=device))

    def loss_of() -> torch.Tensor:
        kernel = torch.exp(-0.5 * torch.cdist(x / scale, x / scale).square())
        factor = torch.linalg.cholesky(kernel + noise.exp() * torch.eye(96, device=device))
        solved = torch.cholesky_solve(y, factor)
        return (y * solved).sum() + 2 * factor.diagonal().log().sum()

    return training(device, nn.ParameterList([scale, noise]), loss_of)


def sparse_adam(device: str) -> Step:
    table = nn.Embedding(500, 64, sparse=True).to(device)
    ids = torch.randint(0, 500, (8, 16), device=device)
    optimizer = torch.optim.SparseAdam(table.parameters())
    return training(device, table, lambda: table(ids).square().mean(), optimizer=optimizer)


def functional_ensemble(device: str) -> Step:
    """Several models at once, as torch.func has it."""
    models = [
        nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8)).to(device) for _ in range(4)
    ]
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(32, 64, device=device)

    def loss(some: Any, kept: Any) -> torch.Tensor:
        return torch.func.functional_call(models[0], (some, kept), (x,)).square().mean()

    def step() -> Any:
        return torch.vmap(torch.func.grad(loss))(parameters, buffers)

    return step


def hessian(device: str) -> Step:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    x = torch.randn(16, device=device)
    return lambda: torch.func.hessian(lambda v: model(v).sum())(x)


def decoded(device: str) -> Step:
    """Tokens one by one, with keys and values in tensors of a fixed size."""
    project, out = nn.Linear(64, 192).to(device), nn.Linear(64, 64).to(device)
    keys = torch.zeros(2, 4, 32, 16, device=device)
    values = torch.zeros_like(keys)

    def step() -> torch.Tensor:
        x = torch.ones(2, 1, 64, device=keys.device)
        for place in range(16):
            query, key, value = project(x).view(2, 1, 3, 4, 16).permute(2, 0, 3, 1, 4)
            keys[:, :, place : place + 1] = key
            values[:, :, place : place + 1] = value
            seen = functional.scaled_dot_product_attention(
                query, keys[:, :, : place + 1], values[:, :, : place + 1]
            )
            x = out(seen.transpose(1, 2).flatten(2))
        return x

    return step


def sequence_model(device: str) -> Step:
    """Convolutions over time that see the past alone, as WaveNet has them."""

    class Causal(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.dilation = dilation
            self.conv = nn.Conv1d(16, 32, 2, dilation=dilation)
            self.out = nn.Conv1d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            both = self.conv(functional.pad(x, (self.dilation, 0)))
            return x + self.out(functional.glu(both, 1))

    return layers(device, *(Causal(2**k) for k in range(4)), shape=(4, 16, 256))


def voxels(device: str) -> Step:
    down = [nn.Conv3d(2, 8, 3, 2, 1), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU()]
    up = [
        nn.ConvTranspose3d(8, 2, 2, 2),
        nn.MaxPool3d(2),
        nn.Upsample(scale_factor=2, mode="trilinear"),
    ]
    return layers(device, *down, *up, shape=(2, 2, 16, 16, 16))


def reversible(device: str) -> Step:
    """An autoencoder that samples, with pooling by places and its reverse."""
    enc, dec = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 1, 3, padding=1)
    model = nn.ModuleList([enc, dec]).to(device)
    x = torch.rand(8, 1, 28, 28, device=device)

    def loss_of() -> torch.Tensor:
        y, places = functional.max_pool2d(enc(x), 2, return_indices=True)
        noisy = y + torch.randn_like(y) * 0.1
        made = dec(functional.max_unpool2d(noisy, places, 2)).sigmoid()
        return functional.binary_cross_entropy(made, x, reduction="sum")

    return training(device, model, loss_of)


def variational(device: str) -> Step:
    enc, dec = nn.Linear(256, 64), nn.Linear(32, 256)
    model = nn.ModuleList([enc, dec]).to(device)
    x = torch.rand(64, 256, device=device)

    def loss_of() -> torch.Tensor:
        mean, spread = enc(x).chunk(2, -1)
        z = torch.distributions.Normal(mean, (spread / 2).exp()).rsample()
        apart = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(1).mean()
        return functional.mse_loss(dec(z).sigmoid(), x) + apart

    return training(device, model, loss_of)


def played(device: str) -> Step:
    """A step of a policy gradient: logits, actions, an advantage, clipping of ratios."""
    model = nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 9)).to(device)
    x = torch.randn(256, 32, device=device)
    taken = torch.randint(0, 8, (256,), device=device)
    before, gained = torch.rand(256, device=device), torch.randn(256, device=device)

    def loss_of() -> torch.Tensor:
        out = model(x)
        chances = torch.distributions.Categorical(logits=out[:, :8], validate_args=False)
        ratio = (chances.log_prob(taken) - before).exp()
        gain = torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()
        return (out[:, 8] - gained).square().mean() - gain - 0.01 * chances.entropy().mean()

    return training(device, model, loss_of)


def graph_attention(device: str) -> Step:
    edges = torch.randint(0, 100, (2, 800), device=device)
    project, score = nn.Linear(32, 64), nn.Linear(128, 1)
    model = nn.ModuleList([project, score]).to(device)
    x = torch.randn(100, 32, device=device)

    def loss_of() -> torch.Tensor:
        h = project(x)
        source, target = h.index_select(0, edges[0]), h.index_select(0, edges[1])
        found = functional.leaky_relu(score(torch.cat([source, target], -1))).squeeze(-1).exp()
        sums = torch.zeros(100, device=x.device).index_add(0, edges[1], found)
        weighted = source * (found / sums[edges[1]]).unsqueeze(-1)
        return (
            torch.zeros(100, 64, device=x.device)
            .scatter_reduce(0, edges[1][:, None].expand(-1, 64), weighted, "sum")
            .square()
            .mean()
        )

    return training(device, model, loss_of)


def offloaded(device: str) -> Step:
    """What is saved for the backward is kept in 16 bits."""
    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)).to(device)
    x = torch.randn(64, 128, device=device)

    def loss_of() -> torch.Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.bfloat16(), lambda t: t.float()
        )
        with hooks:
            return model(x).square().mean()

    return training(device, model, loss_of)


_ON_BOTH: dict[str, Callable[[str], Step]] = {
    "ResNet": residual,
    "DenseNet, checkpointed": dense,
    "MobileNet, channels last": inverted,
    "MultiheadAttention, weights": partial(weaving, need_weights=True),
    "MultiheadAttention, padded": partial(weaving, need_weights=False, key_padding=True),
    "bags, max": bags,
    "rotary positions": turned,
    "global filter": filtered,
    "orthogonal weight": lambda d: layers(
        d, parametrizations.orthogonal(nn.Linear(64, 64)), nn.Tanh(), shape=(32, 64)
    ),
    "Gaussian process": gaussian,
    "SparseAdam": sparse_adam,
    "several models by vmap": functional_ensemble,
    "Hessian": hessian,
    "WaveNet": sequence_model,
    "voxels": voxels,
    "unpooling": reversible,
    "VAE": variational,
    "PPO": played,
    "graph attention": graph_attention,
    "saved in 16 bits": offloaded,
}

FURTHER = {
    "decoding, fixed cache": Program(decoded, no_grad=True),
    "decoding, fixed cache, for CUDA": Program(decoded, "cuda", no_grad=True),
    **{name: Program(build) for name, build in _ON_BOTH.items()},
    **{f"{name}, for CUDA": Program(build, "cuda") for name, build in _ON_BOTH.items()},
}
