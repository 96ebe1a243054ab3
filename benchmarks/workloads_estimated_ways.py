"""Ways to train, for an estimate, each for the CPU and for CUDA.

Agents, graphs, diffusion, physics, sound, recommenders; optimizers, torch.func, casts, the compiler
and linear algebra.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional
from torch.nn.utils import parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint
from workloads_estimated import Step, lbfgs, mlp, on_both, training


def _layers(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    made: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        made += [nn.Linear(inner, outer), between()]
    return nn.Sequential(*made[:-1])


# Agents.


def soft_actor_critic(device: str) -> Step:
    from torch.distributions import Normal

    actor, critics = _layers(24, 128, 12).to(device), nn.ModuleList()
    critics.extend(_layers(30, 128, 1) for _ in range(2)).to(device)
    behind, log_alpha = copy.deepcopy(critics), torch.zeros(1, device=device, requires_grad=True)
    of_actor, of_critics = (torch.optim.Adam(m.parameters(), 3e-4) for m in (actor, critics))
    of_alpha = torch.optim.Adam([log_alpha], 3e-4)
    state, other = torch.randn(2, 256, 24, device=device)
    action, reward = torch.randn(256, 6, device=device), torch.randn(256, 1, device=device)

    def acted(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = actor(given).chunk(2, -1)
        found = Normal(mean, spread.clamp(-5, 2).exp())
        raw = found.rsample()
        logs = found.log_prob(raw) - torch.log(1 - raw.tanh().square() + 1e-6)
        return raw.tanh(), logs.sum(-1, keepdim=True)

    def step() -> None:
        with torch.no_grad():
            then, logs = acted(other)
            least = torch.min(*(c(torch.cat([other, then], -1)) for c in behind))
            wanted = reward + 0.99 * (least - log_alpha.exp() * logs)
        given = torch.cat([state, action], -1)
        of_critics.zero_grad()
        sum(functional.mse_loss(c(given), wanted) for c in critics).backward()
        of_critics.step()
        now, logs = acted(state)
        least = torch.min(*(c(torch.cat([state, now], -1)) for c in critics))
        of_actor.zero_grad()
        (log_alpha.exp().detach() * logs - least).mean().backward()
        of_actor.step()
        of_alpha.zero_grad()
        (-(log_alpha * (logs - 6).detach()).mean()).backward()
        of_alpha.step()
        with torch.no_grad():
            for kept, learned in zip(behind.parameters(), critics.parameters(), strict=True):
                kept.data.mul_(0.995).add_(0.005 * learned.data)

    return step


def advantages(device: str) -> Step:
    """PPO with advantages computed backwards in time, in shuffled parts."""
    model = nn.ModuleList([_layers(16, 64, 4, between=nn.Tanh), _layers(16, 64, 1)]).to(device)
    states = torch.randn(32, 8, 16, device=device)
    rewards, ends = torch.randn(32, 8, device=device), torch.zeros(32, 8, device=device)
    optimizer = torch.optim.Adam(model.parameters(), 2.5e-4, eps=1e-5)

    def step() -> None:
        with torch.no_grad():
            found = torch.distributions.Categorical(logits=model[0](states))
            actions = found.sample()
            before, values = found.log_prob(actions), model[1](states).squeeze(-1)
            gains, last = torch.zeros_like(rewards), 0
            for time in reversed(range(31)):
                left = 1.0 - ends[time + 1]
                delta = rewards[time] + 0.99 * values[time + 1] * left - values[time]
                gains[time] = last = delta + 0.99 * 0.95 * left * last
        parts = [t.flatten(0, 1) for t in (states, actions, before, gains, gains + values)]
        for places in torch.randperm(256, device=device).split(64):
            x, action, log, gain, wanted = (t[places] for t in parts)
            now = torch.distributions.Categorical(logits=model[0](x))
            ratio = (now.log_prob(action) - log).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            lost = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
            off = 0.5 * (model[1](x).squeeze(-1) - wanted).square().mean()
            optimizer.zero_grad()
            (lost + 0.5 * off - 0.01 * now.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    return step


# Graphs.


def neighbours(device: str) -> Step:
    """Means and maxima of neighbours, by ``scatter_reduce``."""
    model = nn.ModuleList([nn.Linear(96, 64), nn.Linear(192, 7)]).to(device)
    x, ends = torch.randn(400, 32, device=device), torch.randint(0, 400, (2, 2000), device=device)
    labels, known = torch.randint(0, 7, (400,), device=device), torch.arange(100, device=device)

    def around(h: torch.Tensor) -> torch.Tensor:
        sent, wide = h[ends[0]], ends[1][:, None].expand(-1, h.shape[1])
        empty = torch.zeros_like(h)
        mean = empty.scatter_reduce(0, wide, sent, "mean", include_self=False)
        most = empty.scatter_reduce(0, wide, sent, "amax", include_self=False)
        return torch.cat([h, mean, most], -1)

    def loss_of() -> torch.Tensor:
        h = functional.dropout(functional.normalize(model[0](around(x)).relu()), 0.5)
        return functional.cross_entropy(model[1](around(h))[known], labels[known])

    return training(device, model, loss_of)


def molecules(device: str) -> Step:
    """Messages over edges, a recurrent update, and a sum over each graph."""
    message, cell = _layers(72, 64, 32), nn.GRUCell(32, 32)
    model = nn.ModuleList([message, cell, _layers(32, 32, 1, between=nn.SiLU)]).to(device)
    x, edges = torch.randn(200, 32, device=device), torch.randn(600, 8, device=device)
    begins, ends = torch.randint(0, 200, (2, 600), device=device)
    graph, wanted = torch.arange(200, device=device) // 10, torch.randn(20, device=device)

    def loss_of() -> torch.Tensor:
        h = x
        for _ in range(3):
            sent = message(torch.cat([h[begins], h[ends], edges], -1))
            h = cell(torch.zeros_like(h).index_add(0, ends, sent), h)
        found = torch.zeros(20, device=device).index_add_(0, graph, model[2](h).squeeze(-1))
        return functional.l1_loss(found, wanted)

    return training(device, model, loss_of)


def softmax_of_edges(device: str) -> Step:
    """GAT by hand: a softmax over the edges of each node."""
    model = nn.ModuleList([nn.Linear(32, 64, False), nn.Linear(16, 1), nn.Linear(16, 1)]).to(device)
    x = torch.randn(300, 32, device=device)
    begins, ends = torch.randint(0, 300, (2, 1500), device=device)

    def loss_of() -> torch.Tensor:
        h = model[0](x).view(300, 4, 16)
        score = (model[1](h)[begins] + model[2](h)[ends]).squeeze(-1)
        score = functional.leaky_relu(score, 0.2)
        wide = ends[:, None].expand(-1, 4)
        most = score.new_full((300, 4), -math.inf).scatter_reduce(0, wide, score, "amax")
        share = (score - most[ends]).exp()
        share = share / torch.zeros(300, 4, device=device).scatter_add(0, wide, share)[ends]
        out = torch.zeros_like(h).index_add(0, ends, h[begins] * share[..., None])
        return functional.elu(out).flatten(1).square().mean()

    return training(device, model, loss_of)


def adjacency(device: str) -> Step:
    """A sparse matrix of all edges."""
    model, x = nn.Linear(32, 16).to(device), torch.randn(200, 32, device=device)
    places = torch.randint(0, 200, (2, 800), device=device)
    edges = torch.sparse_coo_tensor(places, torch.ones(800, device=device), (200, 200)).coalesce()
    return training(device, model, lambda: torch.sparse.mm(edges, model(x)).square().mean())


# Diffusion.


class _Conditioned(nn.Module):
    """A block of a diffusion transformer, whose norms are told the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.after = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )
        self.told = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        parts = self.told(time)[:, None].chunk(6, -1)
        h = self.before(x) * (1 + parts[0]) + parts[1]
        x = x + parts[2] * self.attend(h, h, h, need_weights=False)[0]
        h = self.after(x) * (1 + parts[3]) + parts[4]
        return x + parts[5] * self.wide(h)


def diffusion_transformer(device: str) -> Step:
    blocks = nn.ModuleList(_Conditioned(64) for _ in range(2))
    model = nn.ModuleList([nn.Linear(16, 64), blocks, nn.Linear(64, 16)]).to(device)
    labels = nn.Embedding(11, 64).to(device)
    averaged = copy.deepcopy(model).requires_grad_(False)
    x, classes = torch.randn(8, 64, 16, device=device), torch.randint(10, (8,), device=device)
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64, device=device)
    kept = (1 - betas).cumprod(0).float()
    optimizer = torch.optim.AdamW([*model.parameters(), *labels.parameters()], 1e-4)

    def loss_of() -> torch.Tensor:
        times, noise = torch.randint(0, 1000, (8,), device=device), torch.randn_like(x)
        share = kept[times].view(-1, 1, 1)
        given = share.sqrt() * x + (1 - share).sqrt() * noise
        dropped = torch.where(torch.rand(8, device=device) < 0.1, 10, classes)
        waves = torch.exp(-math.log(1e4) * torch.arange(32, device=device) / 32)
        angles = times[:, None] * waves
        told = torch.cat([angles.cos(), angles.sin()], -1) + labels(dropped)
        h = model[0](given)
        for block in blocks:
            h = block(h, told)
        wanted = share.sqrt() * noise - (1 - share).sqrt() * x
        return (model[2](h) - wanted).square().mean((1, 2)).mean()

    def follow(_: torch.Tensor) -> None:
        with torch.no_grad():
            pairs = zip(averaged.parameters(), model.parameters(), strict=True)
            for old, new in pairs:
                old.lerp_(new, 1e-4)

    return training(device, model, loss_of, follow, optimizer)


def denoised(device: str) -> Step:
    """Samples of a flow, with guidance, by twenty steps of Heun's method."""
    model = _layers(34, 128, 32, between=nn.SiLU).to(device).eval()

    @torch.inference_mode()
    def step() -> torch.Tensor:
        x = torch.randn(64, 32, device=device)
        times = torch.linspace(0, 1, 11)

        def slope(x: torch.Tensor, time: float) -> torch.Tensor:
            told = torch.full((128, 1), time, device=device)
            which = torch.tensor([0.0, 1.0], device=device).repeat_interleave(64)[:, None]
            free, bound = model(torch.cat([torch.cat([x, x]), told, which], 1)).chunk(2)
            return free + 2.0 * (bound - free)

        for now, then in pairwise(times):
            dt = (then - now).item()
            first = slope(x, now.item())
            x = x + dt / 2 * (first + slope(x + dt * first, then.item()))
        return x.clamp(-1, 1)

    return step


# Physics.


def burgers(device: str) -> Step:
    """First and second derivatives of the answer are in the loss."""
    model = _layers(2, 64, 64, 1, between=nn.Tanh).to(device)
    x = torch.rand(512, 1, device=device, requires_grad=True)
    t = torch.rand(512, 1, device=device, requires_grad=True)

    def slope(y: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(y, of, torch.ones_like(y), create_graph=True)[0]

    def loss_of() -> torch.Tensor:
        u = model(torch.cat([x, t], 1))
        of_x = slope(u, x)
        off = slope(u, t) + u * of_x - 0.01 / math.pi * slope(of_x, x)
        edge = model(torch.cat([torch.ones_like(t), t], 1))
        return off.square().mean() + edge.square().mean()

    return training(device, model, loss_of)


def hamiltonian(device: str) -> Step:
    model = _layers(8, 128, 1, between=nn.Softplus).to(device)
    x, wanted = torch.randn(2, 128, 8, device=device)

    def field(state: torch.Tensor) -> torch.Tensor:
        slope = grad(lambda s: model(s).sum())(state)
        of_place, of_speed = slope.chunk(2, -1)
        return torch.cat([of_speed, -of_place], -1)

    def loss_of() -> torch.Tensor:
        first = field(x)
        second = field(x + 0.05 * first)
        return functional.mse_loss(x + 0.05 * (first + second), wanted)

    return training(device, model, loss_of)


class _Spectral(nn.Module):
    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes, self.near = modes, nn.Conv2d(width, width, 1)
        shape = (2, width, width, modes, modes)
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width**2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves, m = torch.fft.rfft2(x, norm="ortho"), self.modes
        out = torch.zeros_like(waves)
        low, high = waves[..., :m, :m], waves[..., -m:, :m]
        out[..., :m, :m] = torch.einsum("bixy,ioxy->boxy", low, self.weight[0])
        out[..., -m:, :m] = torch.einsum("bixy,ioxy->boxy", high, self.weight[1])
        return functional.gelu(torch.fft.irfft2(out, s=x.shape[-2:], norm="ortho") + self.near(x))


def fourier_operator(device: str) -> Step:
    parts = [nn.Conv2d(3, 16, 1), _Spectral(16, 8), _Spectral(16, 8), nn.Conv2d(16, 1, 1)]
    model, x = nn.Sequential(*parts).to(device), torch.randn(4, 3, 32, 32, device=device)
    wanted = torch.randn(4, 1, 32, 32, device=device)

    def loss_of() -> torch.Tensor:
        off = (model(x) - wanted).flatten(1).norm(dim=1)
        return (off / wanted.flatten(1).norm(dim=1)).mean()

    return training(device, model, loss_of)


def neural_ode(device: str) -> Step:
    """Runge and Kutta's steps, each computed again for the backward."""
    field = _layers(33, 128, 32, between=nn.Tanh).to(device)
    head, x = nn.Linear(32, 10).to(device), torch.randn(128, 32, device=device)
    labels = torch.randint(0, 10, (128,), device=device)

    def slope(state: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return field(torch.cat([state, time.expand(len(state), 1)], 1))

    def advanced(state: torch.Tensor, time: torch.Tensor, dt: float) -> torch.Tensor:
        a = slope(state, time)
        b = slope(state + dt / 2 * a, time + dt / 2)
        c = slope(state + dt / 2 * b, time + dt / 2)
        d = slope(state + dt * c, time + dt)
        return state + dt / 6 * (a + 2 * b + 2 * c + d)

    def loss_of() -> torch.Tensor:
        state = x
        for time in torch.linspace(0, 0.9, 10, device=device):
            state = checkpoint(advanced, state, time, 0.1, use_reentrant=False)
        return functional.cross_entropy(head(state), labels)

    model = nn.ModuleList([field, head])
    return training(device, model, loss_of)


def equilibrium(device: str) -> Step:
    """A fixed point found without a graph; its gradient is another fixed point, by a hook."""
    cell, x = nn.Linear(128, 64).to(device), torch.randn(128, 64, device=device)

    def mapped(z: torch.Tensor) -> torch.Tensor:
        return cell(torch.cat([z, x], -1)).tanh() * 0.5

    def loss_of() -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(10):
                z = mapped(z)
        z = mapped(z)
        given = z.detach().requires_grad_()
        again = mapped(given)

        def backward_hook(grad: torch.Tensor) -> torch.Tensor:
            found = grad
            for _ in range(5):
                found = torch.autograd.grad(again, given, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(backward_hook)
        return z.square().mean()

    return training(device, cell, loss_of)


def tangents(device: str) -> Step:
    """Laplacians by forward mode over reverse mode, of each point."""
    model = _layers(3, 64, 1, between=nn.Tanh).to(device)
    x = torch.rand(64, 3, device=device)

    def of_point(point: torch.Tensor) -> torch.Tensor:
        return model(point).squeeze(-1)

    def loss_of() -> torch.Tensor:
        curves = vmap(jacfwd(grad(of_point)))(x)
        return curves.diagonal(dim1=-2, dim2=-1).sum(-1).square().mean()

    return training(device, model, loss_of)


# Sound.


def spectra(device: str) -> Step:
    """A vocoder with losses of spectra at several resolutions."""
    layers = [nn.Conv1d(20, 32, 7, padding=3), nn.LeakyReLU(0.1)]
    layers += [parametrizations.weight_norm(nn.ConvTranspose1d(32, 16, 16, 8, 4))]
    layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(16, 8, 16, 8, 4), nn.LeakyReLU(0.1)]
    model = nn.Sequential(*layers, nn.Conv1d(8, 1, 7, padding=3), nn.Tanh()).to(device)
    x, wanted = torch.randn(2, 20, 64, device=device), torch.randn(2, 4096, device=device)
    windows = {n: torch.hann_window(n, device=device) for n in (256, 512, 1024)}

    def spectrum(sound: torch.Tensor, size: int) -> torch.Tensor:
        found = torch.stft(
            sound, size, size // 4, window=windows[size], return_complex=True, center=True
        )
        return found.abs().clamp(min=1e-5)

    def loss_of() -> torch.Tensor:
        made, loss = model(x).squeeze(1), torch.zeros((), device=device)
        for size in windows:
            a, b = spectrum(made, size), spectrum(wanted, size)
            loss = loss + (a - b).norm() / b.norm() + functional.l1_loss(a.log(), b.log())
        return loss

    return training(device, model, loss_of)


def separated(device: str) -> Step:
    """Demucs: gated convolutions of sound, a recurrent middle, and sums of what was before."""
    down = nn.ModuleList(
        nn.Sequential(nn.Conv1d(i, o, 8, 4, 2), nn.ReLU(), nn.Conv1d(o, 2 * o, 1), nn.GLU(1))
        for i, o in ((1, 16), (16, 32))
    )
    up = nn.ModuleList(
        nn.Sequential(
            nn.Conv1d(i, 2 * i, 3, padding=1), nn.GLU(1), nn.ConvTranspose1d(i, o, 8, 4, 2)
        )
        for i, o in ((32, 16), (16, 2))
    )
    middle = nn.LSTM(32, 16, 2, bidirectional=True)
    model, x = nn.ModuleList([down, middle, up]).to(device), torch.randn(2, 1, 2048, device=device)

    def loss_of() -> torch.Tensor:
        h, before = x, []
        for layer in down:
            h = layer(h)
            before.append(h)
        h = middle(h.permute(2, 0, 1))[0].permute(1, 2, 0)
        for layer in up:
            h = layer(h + before.pop()[..., : h.shape[-1]])
        return functional.l1_loss(h, x.expand(-1, 2, -1))

    return training(device, model, loss_of)


def recognized(device: str) -> Step:
    """Convolutions, a GRU both ways, and CTC."""
    convolve = nn.Sequential(nn.Conv1d(40, 64, 3, 2, 1), nn.BatchNorm1d(64), nn.GELU())
    recur, head = nn.GRU(64, 64, 2, batch_first=True, bidirectional=True), nn.Linear(128, 30)
    model = nn.ModuleList([convolve, recur, head]).to(device)
    x, words = torch.randn(8, 40, 200, device=device), torch.randint(1, 30, (8, 20), device=device)
    given, wanted = torch.full((8,), 100, dtype=torch.long), torch.randint(10, 20, (8,))

    def loss_of() -> torch.Tensor:
        h = recur(convolve(x).transpose(1, 2))[0]
        logs = head(h).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(logs, words, given, wanted, zero_infinity=True)

    return training(device, model, loss_of)


def conformer(device: str) -> Step:
    """A block of a conformer, of masked spectra."""
    attend = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
    wide = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64))
    near = nn.Sequential(
        nn.Conv1d(64, 128, 1),
        nn.GLU(1),
        nn.Conv1d(64, 64, 15, padding=7, groups=64),
        nn.BatchNorm1d(64),
        nn.SiLU(),
        nn.Conv1d(64, 64, 1),
    )
    model = nn.ModuleList([attend, wide, near, nn.LayerNorm(64)]).to(device)
    x, lengths = torch.randn(4, 100, 64, device=device), torch.tensor([100, 90, 80, 70])
    padded = (torch.arange(100) >= lengths[:, None]).to(device)

    def loss_of() -> torch.Tensor:
        begin = torch.randint(0, 80, (4, 1), device=device)
        rows = torch.arange(100, device=device)
        masked = (rows >= begin) & (rows < begin + 20)
        h = x.masked_fill(masked[..., None], 0)
        h = h + 0.5 * wide(h)
        n = model[3](h)
        h = h + attend(n, n, n, key_padding_mask=padded, need_weights=False)[0]
        h = h + near(h.transpose(1, 2)).transpose(1, 2)
        off = (h - x).square().mean(-1).masked_fill(padded, 0)
        return off.sum() / (~padded).sum()

    return training(device, model, loss_of)


# Recommenders.


def recommended(device: str) -> Step:
    """DLRM: bags of categories, and how each two of them go together."""
    bags = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum") for n in (1000, 500, 200))
    low, high = _layers(13, 64, 16), _layers(22, 64, 1)
    model = nn.ModuleList([bags, low, high]).to(device)
    dense, wanted = torch.randn(256, 13, device=device), torch.rand(256, device=device).round()
    rows = [torch.randint(0, b.num_embeddings, (256 * 4,), device=device) for b in bags]
    begins = torch.arange(0, 1024, 4, device=device)
    left, right = torch.tril_indices(4, 4, -1, device=device)

    def loss_of() -> torch.Tensor:
        x = low(dense).relu()
        parts = [x, *(bag(row, begins) for bag, row in zip(bags, rows, strict=True))]
        whole = torch.stack(parts, 1)
        pairs = torch.bmm(whole, whole.transpose(1, 2))[:, left, right]
        out = high(torch.cat([x, pairs], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(out, wanted)

    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    return training(device, model, loss_of, optimizer=optimizer)


def sparse_towers(device: str) -> Step:
    users, items = (nn.Embedding(n, 32, sparse=True).to(device) for n in (2000, 1000))
    who, what = torch.randint(0, 2000, (256,)), torch.randint(0, 1000, (256,))
    who, what = who.to(device), what.to(device)
    optimizer = torch.optim.SparseAdam([*users.parameters(), *items.parameters()])
    labels = torch.arange(256, device=device)

    def loss_of() -> torch.Tensor:
        return functional.cross_entropy(users(who) @ items(what).t(), labels)

    return training(device, users, loss_of, optimizer=optimizer)


# Optimizers.


def newton_schulz(device: str) -> Step:
    """Muon for matrices, in 16 bits, and AdamW for the rest."""
    model = _layers(128, 256, 256, 10, between=nn.GELU).to(device)
    x, labels = torch.randn(64, 128, device=device), torch.randint(0, 10, (64,), device=device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = torch.optim.AdamW([p for p in model.parameters() if p.dim() < 2], 1e-3)
    momenta = [torch.zeros_like(p) for p in matrices]

    def orthogonal(grad: torch.Tensor) -> torch.Tensor:
        x = grad.bfloat16()
        x = x.t() if grad.shape[0] > grad.shape[1] else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.t()
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x.t() if grad.shape[0] > grad.shape[1] else x

    def step() -> None:
        model.zero_grad()
        rest.zero_grad()
        functional.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for weight, momentum in zip(matrices, momenta, strict=True):
                momentum.lerp_(weight.grad, 0.05)
                update = orthogonal(weight.grad.lerp(momentum, 0.95))
                weight.mul_(1 - 0.002)
                weight.add_(update.to(weight.dtype), alpha=-0.02)
        rest.step()

    return step


def shampoo(device: str) -> Step:
    """Roots of products of gradients, by eigenvalues."""
    model, x = _layers(64, 128, 10).to(device), torch.randn(64, 64, device=device)
    kept = [[torch.eye(n, device=device) for n in p.shape] for p in model.parameters()]

    @torch.no_grad()
    def root(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=1e-6).pow(-0.25)) @ vectors.t()

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for weight, factors in zip(model.parameters(), kept, strict=True):
                grad = weight.grad
                if grad.dim() == 2:
                    factors[0].addmm_(grad, grad.t())
                    factors[1].addmm_(grad.t(), grad)
                    grad = root(factors[0]) @ grad @ root(factors[1])
                weight.sub_(grad, alpha=1e-3)

    return step


def eight_bit_adam(device: str) -> Step:
    """State of eight bits by blocks, by a table of values."""
    model, x = _layers(128, 256, 128).to(device), torch.randn(64, 128, device=device)
    table = torch.linspace(-1, 1, 256, device=device)
    bounds = (table[1:] + table[:-1]) / 2
    states = {
        p: torch.zeros(p.numel(), dtype=torch.uint8, device=device) for p in model.parameters()
    }
    scales = {p: torch.zeros(-(-p.numel() // 256), 1, device=device) for p in states}

    @torch.no_grad()
    def update(weight: nn.Parameter) -> None:
        size = weight.numel()
        padded = functional.pad(table[states[weight].long()], [0, -size % 256]).view(-1, 256)
        moment = (padded * scales[weight]).flatten()[:size].view_as(weight)
        moment.mul_(0.9).add_(weight.grad, alpha=0.1)
        weight.add_(moment.sign(), alpha=-1e-4)
        blocks = functional.pad(moment.flatten(), [0, -size % 256]).view(-1, 256)
        most = blocks.abs().amax(1, keepdim=True)
        scales[weight] = most
        found = torch.bucketize(blocks / most.clamp(min=1e-12), bounds)
        states[weight] = found.to(torch.uint8).flatten()[:size].clone()

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        for weight in model.parameters():
            update(weight)

    return step


def low_rank_gradients(device: str) -> Step:
    """GaLore: Adam in a space of few dimensions, by singular vectors of the gradient."""
    model, x = _layers(128, 256, 128).to(device), torch.randn(64, 128, device=device)
    state = {
        p: (torch.zeros(8, p.shape[1], device=device),) * 2
        for p in model.parameters()
        if p.dim() > 1
    }

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for weight, (first, second) in state.items():
                basis = torch.linalg.svd(weight.grad, full_matrices=False)[0][:, :8]
                low = basis.t() @ weight.grad
                state[weight] = (
                    0.9 * first + 0.1 * low,
                    0.999 * second + 0.001 * low.square(),
                )
                mean, squares = state[weight]
                weight.sub_(basis @ (mean / (squares.sqrt() + 1e-8)), alpha=1e-3)

    return step


def conflicting(device: str) -> Step:
    """Gradients of two tasks, one after the other through a graph that stays, then projected."""
    trunk, heads = _layers(64, 128, 64), nn.ModuleList(nn.Linear(64, 4) for _ in range(2))
    model, x = nn.ModuleList([trunk, heads]).to(device), torch.randn(64, 64, device=device)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        h = trunk(x)
        found = []
        for head in heads:
            optimizer.zero_grad()
            head(h).square().mean().backward(retain_graph=True)
            found.append(torch.cat([p.grad.flatten() for p in trunk.parameters()]))
        one, two = found
        share = (one @ two) / two.norm().square().clamp(min=1e-8)
        mixed = one - share.clamp(max=0) * two + two
        place = 0
        for p in trunk.parameters():
            p.grad = mixed[place : place + p.numel()].view_as(p).clone()
            place += p.numel()
        optimizer.step()

    return step


def by_kind(device: str, kind: str, **how: Any) -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Tanh(), nn.Linear(256, 64))
    model.to(device)
    x = torch.randn(128, 64, device=device)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **how)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def evolved(device: str) -> Step:
    """Evolution strategies: many perturbed copies, without gradients."""
    model = _layers(16, 32, 4).to(device)
    base = nn.utils.parameters_to_vector(model.parameters()).detach()
    x = torch.randn(64, 16, device=device)

    @torch.no_grad()
    def step() -> None:
        noise, scores = torch.randn(8, len(base), device=device), []
        for row in noise:
            vector_to_parameters(base + 0.1 * row, model.parameters())
            scores.append(model(x).square().mean())
        ranks = torch.stack(scores).argsort().argsort().float() / 7 - 0.5
        base.add_(noise.t() @ ranks, alpha=-0.01)
        vector_to_parameters(base, model.parameters())

    return step


# torch.func.


def private(device: str) -> Step:
    """DP-SGD: gradients of each picture, clipped, added up, with noise."""
    layers = [
        nn.Conv2d(1, 8, 3, 2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(392, 10),
    ]
    model = nn.Sequential(*layers).to(device)
    x, labels = torch.randn(32, 1, 16, 16, device=device), torch.randint(10, (32,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_of(weights: Any, picture: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        out = functional_call(model, weights, (picture[None],))
        return functional.cross_entropy(out, label[None])

    def step() -> None:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        each = vmap(grad(loss_of), in_dims=(None, 0, 0), chunk_size=8)(weights, x, labels)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()], 1).norm(dim=1)
        scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", scale, each[name]) / 32
            p.grad += torch.randn_like(p) * 0.01
        optimizer.step()
        optimizer.zero_grad()

    return step


def tangent_kernel(device: str) -> Step:
    model = _layers(8, 64, 3).to(device)
    weights = dict(model.named_parameters())
    x, y = torch.randn(2, 16, 8, device=device)

    def step() -> torch.Tensor:
        def made(given: Any, row: torch.Tensor) -> torch.Tensor:
            return functional_call(model, given, (row[None],)).squeeze(0)

        fixed = {name: p.detach() for name, p in weights.items()}
        of_x = vmap(jacrev(made), (None, 0))(fixed, x)
        of_y = vmap(jacrev(made), (None, 0))(fixed, y)
        pairs = zip(of_x.values(), of_y.values(), strict=True)
        return sum(torch.einsum("naf,mbf->nmab", a.flatten(2), b.flatten(2)) for a, b in pairs)

    return step


def ensemble(device: str) -> Step:
    """Five models at once, each with noise of its own."""

    def one() -> nn.Sequential:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    models = [one().to(device) for _ in range(5)]
    weights, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x, wanted = torch.randn(128, 32, device=device), torch.randn(128, 2, device=device)
    optimizer = torch.optim.Adam(weights.values())

    def step() -> None:
        def made(given: Any, kept: Any, rows: torch.Tensor) -> torch.Tensor:
            return functional_call(base, (given, kept), (rows,))

        out = vmap(made, (0, 0, None), randomness="different")(weights, buffers, x)
        optimizer.zero_grad()
        (out - wanted).square().mean((1, 2)).sum().backward()
        optimizer.step()

    return step


def forward_gradients(device: str) -> Step:
    """A direction and its slope, in place of a backward pass."""
    model, x = _layers(64, 128, 10).to(device), torch.randn(64, 64, device=device)
    labels = torch.randint(0, 10, (64,), device=device)

    @torch.no_grad()
    def step() -> None:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        way = {name: torch.randn_like(p) for name, p in weights.items()}
        _, slope = jvp(
            lambda w: functional.cross_entropy(functional_call(model, w, (x,)), labels),
            (weights,),
            (way,),
        )
        for name, p in model.named_parameters():
            p.sub_(0.01 * slope * way[name])

    return step


# Casts and the compiler.


def cast_and_scaled(device: str) -> Step:
    """Casts to 16 bits, one part of them left out, and a scaler that is asked before clipping."""
    model = _layers(128, 256, 256, 10, between=nn.GELU).to(device)
    x, labels = torch.randn(64, 128, device=device), torch.randint(0, 10, (64,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            h = model[:3](x)
            with torch.autocast(device, enabled=False):
                h = h.float().softmax(-1)
            loss = functional.cross_entropy(model[3:](h), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return step


def twice_cast(device: str) -> Step:
    """Weights that are used twice are cast once, and once more when they are computed again."""
    layer, head = nn.Linear(128, 128).to(device), nn.Linear(128, 10).to(device)
    model, x = nn.ModuleList([layer, head]), torch.randn(64, 128, device=device)

    def loss_of() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            h = x
            for _ in range(3):
                h = checkpoint(lambda h: layer(h).relu(), h, use_reentrant=False)
            return head(h).float().square().mean()

    return training(device, model, loss_of)


def as_written(device: str) -> Step:
    """Compiled code that the program lets run as it is written."""
    step = compiled(device)
    return torch.compiler.set_stance("force_eager")(step)


def compiled(device: str) -> Step:
    """Model and update are compiled, by a backend that runs them as they are written."""
    model, x = mlp(device)
    fast = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    def step() -> None:
        optimizer.zero_grad()
        fast(x).square().mean().backward()
        update()

    # The first step makes the optimizer's state, and the second one compiles again.
    step()
    return step


# Linear algebra.


class _Complex(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner, dtype=torch.cfloat) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.weight.t()
        return torch.polar(out.abs().tanh(), out.angle())


def complex_layers(device: str) -> Step:
    model = nn.Sequential(_Complex(64, 128), _Complex(128, 64)).to(device)
    x = torch.randn(128, 64, dtype=torch.cfloat, device=device)
    return training(device, model, lambda: (model(x) - x).abs().square().mean())


def rotations(device: str) -> Step:
    """Orthogonal matrices by Cayley, points turned onto others by singular vectors."""
    weight = nn.Parameter(torch.randn(64, 64, device=device) * 0.01)
    head, points = nn.Linear(64, 3).to(device), torch.randn(32, 64, device=device)
    optimizer = torch.optim.Adam([weight, *head.parameters()])
    wanted = torch.randn(32, 3, device=device)

    def loss_of() -> torch.Tensor:
        skew = weight - weight.t()
        eye = torch.eye(64, device=device)
        turned = points @ torch.linalg.solve(eye + skew, eye - skew)
        found = head(turned)
        shared = (found - found.mean(0)).t() @ (wanted - wanted.mean(0))
        u, _, v = torch.linalg.svd(shared)
        sign = torch.det(u @ v).sign()
        last = torch.cat([torch.ones(2, device=device), sign[None]])
        return ((found @ (u * last) @ v) - wanted).square().mean()

    return training(device, head, loss_of, optimizer=optimizer)


def filtered(device: str) -> Step:
    """A Kalman filter whose matrices are learned."""
    moves = nn.Parameter(torch.eye(6, device=device) * 0.9)
    seen, noise = nn.Parameter(torch.randn(3, 6, device=device)), torch.eye(3, device=device) * 0.1
    x = torch.randn(16, 20, 3, device=device)
    optimizer = torch.optim.Adam([moves, seen])

    def loss_of() -> torch.Tensor:
        mean = torch.zeros(16, 6, device=device)
        spread = torch.eye(6, device=device).expand(16, 6, 6)
        loss = torch.zeros((), device=device)
        for time in range(20):
            mean, spread = (
                mean @ moves.t(),
                moves @ spread @ moves.t() + 0.01 * torch.eye(6, device=device),
            )
            off = x[:, time] - mean @ seen.t()
            whole = seen @ spread @ seen.t() + noise
            factor = torch.linalg.cholesky(whole)
            gain = torch.cholesky_solve(seen @ spread, factor).transpose(1, 2)
            mean = mean + (gain @ off[..., None]).squeeze(-1)
            spread = spread - gain @ seen @ spread
            white = torch.linalg.solve_triangular(factor, off[..., None], upper=False)
            logs = factor.diagonal(dim1=1, dim2=2).log().sum(-1)
            loss = loss + (white.square().sum((1, 2)) / 2 + logs).mean()
        return loss

    return training(device, nn.Linear(1, 1), loss_of, optimizer=optimizer)


def transported(device: str) -> Step:
    """Sinkhorn's steps, with sums of exponents of what is broadcast."""
    model = nn.Linear(32, 16).to(device)
    x, y = torch.randn(128, 32, device=device), torch.randn(96, 16, device=device)

    def loss_of() -> torch.Tensor:
        costs = torch.cdist(model(x), y) / 0.1
        f, g = costs.new_zeros(128), costs.new_zeros(96)
        for _ in range(5):
            f = -torch.logsumexp(g[None] - costs, 1)
            g = -torch.logsumexp(f[:, None] - costs, 0)
        plan = (f[:, None] + g - costs).exp()
        return (plan * costs).sum() + torch.logsumexp(f[:, None].expand(-1, 96), 1).mean()

    return training(device, model, loss_of)


def random_field(device: str) -> Step:
    """A chain of labels, by the forward algorithm."""
    model, moves = nn.Linear(32, 9).to(device), nn.Parameter(torch.randn(9, 9, device=device))
    x, labels = torch.randn(8, 40, 32, device=device), torch.randint(9, (8, 40), device=device)
    optimizer = torch.optim.Adam([*model.parameters(), moves])

    def loss_of() -> torch.Tensor:
        scores = model(x)
        right = scores.gather(2, labels[..., None]).squeeze(-1).sum(1)
        right = right + moves[labels[:, :-1], labels[:, 1:]].sum(1)
        alpha = scores[:, 0]
        for time in range(1, 40):
            alpha = (alpha[:, :, None] + moves + scores[:, time, None]).logsumexp(1)
        return (alpha.logsumexp(-1) - right).mean()

    return training(device, model, loss_of, optimizer=optimizer)


def low_rank(device: str) -> Step:
    """Tables by parts, nuclear norms and least squares."""
    cores = nn.ParameterList([torch.randn(s) * 0.1 for s in ((8, 8, 6), (6, 8, 8, 6), (6, 8, 8))])
    cores.to(device)
    x, wanted = torch.randn(64, 512, device=device), torch.randn(64, 32, device=device)

    def loss_of() -> torch.Tensor:
        whole = torch.einsum("air,rbjs,sck->abcijk", *cores).reshape(512, 512)
        out = x @ whole
        found = torch.linalg.lstsq(out[:, :16], wanted).solution
        off = (out[:, :16] @ found - wanted).square().mean()
        return off + 1e-3 * torch.linalg.matrix_norm(whole[:64, :64], "nuc")

    return training(device, cores, loss_of)


_BUILT: dict[str, Callable[[str], Step]] = {
    "SAC": soft_actor_critic,
    "PPO, parts": advantages,
    "means and maxima of neighbours": neighbours,
    "molecules": molecules,
    "softmax of edges": softmax_of_edges,
    "sparse adjacency": adjacency,
    "diffusion transformer": diffusion_transformer,
    "Burgers' equation": burgers,
    "Hamiltonian": hamiltonian,
    "Fourier operator": fourier_operator,
    "neural ODE": neural_ode,
    "equilibrium": equilibrium,
    "Laplacians": tangents,
    "vocoder": spectra,
    "sources of sound": separated,
    "speech, CTC": recognized,
    "conformer": conformer,
    "recommender": recommended,
    "sparse towers": sparse_towers,
    "LBFGS, line search": partial(lbfgs, rows=32, max_iter=20, line_search="strong_wolfe"),
    "Muon in 16 bits": newton_schulz,
    "Shampoo": shampoo,
    "state of 8 bits": eight_bit_adam,
    "GaLore": low_rank_gradients,
    "two tasks, projected": conflicting,
    "RAdam, decoupled, foreach": partial(by_kind, kind="RAdam", decoupled_weight_decay=True),
    "Adafactor, relative": partial(by_kind, kind="Adafactor"),
    "Adam, foreach, amsgrad": partial(by_kind, kind="Adam", amsgrad=True, foreach=True),
    "Adam, fused": partial(by_kind, kind="Adam", fused=True),
    "NAdam, one by one": partial(by_kind, kind="NAdam", foreach=False),
    "Adagrad, fused": partial(by_kind, kind="Adagrad", fused=True),
    "SGD, differentiable": partial(by_kind, kind="SGD", momentum=0.9, maximize=True, foreach=True),
    "evolution": evolved,
    "gradients of each picture": private,
    "tangent kernel": tangent_kernel,
    "ensemble with dropout": ensemble,
    "forward gradients": forward_gradients,
    "casts and a scaler": cast_and_scaled,
    "casts, checkpointed": twice_cast,
    "compiled step": compiled,
    "compiled step, as written": as_written,
    "complex layers": complex_layers,
    "rotations": rotations,
    "Kalman filter": filtered,
    "Sinkhorn": transported,
    "random field": random_field,
    "low rank": low_rank,
}
WAYS = on_both(_BUILT) | on_both({"samples of a flow": denoised}, no_grad=True)
