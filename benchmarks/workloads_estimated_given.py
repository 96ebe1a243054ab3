"""Programs whose sizes known values decide, or that keep tensors on the CPU, and others."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from workloads_estimated import Step, on_both, training

# Whole numbers that were there.


def classified(device: str, loss: Any) -> Step:
    model, x = nn.Linear(64, 20).to(device), torch.randn(96, 64, device=device)
    labels = torch.arange(96, device=device) * 7 % 20
    return training(device, model, lambda: loss(model, x, labels))


def one_hot(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return -(functional.one_hot(labels).float() * model(x).log_softmax(-1)).sum(-1).mean()


def of_each_label(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.stack([model(x[labels == k]).square().mean() for k in labels.unique()]).sum()


def repeated(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(model(x), labels, 0).square().mean()


def contrastive(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    z = functional.normalize(model(x), dim=-1)
    itself = torch.eye(96, dtype=torch.bool, device=x.device)
    scores = (z @ z.T / 0.1).masked_fill(itself, -1e9)
    same = (labels[:, None] == labels) & ~itself
    of_pairs = scores - scores.logsumexp(1, keepdim=True)
    return -((of_pairs * same).sum(1) / same.sum(1).clamp(min=1)).mean()


def spoken(device: str) -> Step:
    model, x = nn.Linear(32, 20).to(device), torch.randn(50, 16, 32, device=device)
    words = torch.randint(1, 20, (16, 30), device=device)
    lengths = [50] * 16, [30] * 16

    def loss_of() -> torch.Tensor:
        return torch.ctc_loss(model(x).log_softmax(-1), words, *lengths).mean()

    return training(device, model, loss_of)


# Tensors that are kept on the CPU.


def q_learning(device: str, *, stacked: bool) -> Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)).to(device)
    target = copy.deepcopy(model)
    seen = torch.randn(2000, 64), torch.randint(0, 16, (2000, 1)), torch.randn(2000, 1)
    episodes = [tuple(part[i].clone() for part in seen) for i in range(500 * stacked)]

    def batch() -> list[torch.Tensor]:
        if stacked:
            chosen = zip(*episodes[:128], strict=True)
            return [torch.stack(part).to(device) for part in chosen]
        places = torch.randint(0, 2000, (128,))
        return [part[places].to(device) for part in seen]

    def loss_of() -> torch.Tensor:
        state, action, reward = batch()
        with torch.no_grad():
            wanted = reward + 0.99 * target(state).max(1, keepdim=True)[0]
        return functional.smooth_l1_loss(model(state).gather(1, action), wanted)

    def follow(_: torch.Tensor) -> None:
        with torch.no_grad():
            for kept, learned in zip(target.parameters(), model.parameters(), strict=True):
                kept.lerp_(learned, 0.005)

    return training(device, model, loss_of, follow)


# Losses and layers.


def of_logits(device: str, **how: Any) -> Step:
    model, x = nn.Linear(64, 256).to(device), torch.randn(512, 64, device=device)
    wanted = torch.rand(512, 256, device=device)
    weights = torch.rand(256, device=device) if how.pop("weighted", False) else None

    def loss_of() -> torch.Tensor:
        loss = functional.binary_cross_entropy_with_logits
        return loss(model(x), wanted, pos_weight=weights, **how).neg().sum()

    return training(device, model, loss_of)


def auto_encoder(device: str) -> Step:
    from torch.distributions import Bernoulli, Independent, Normal, kl_divergence

    model = nn.ModuleList([nn.Linear(128, 32), nn.Linear(16, 128)]).to(device)
    x = torch.rand(64, 128, device=device).round()

    def loss_of() -> torch.Tensor:
        mean, spread = model[0](x).chunk(2, -1)
        found = Independent(Normal(mean, spread.exp()), 1)
        before = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        made = Independent(Bernoulli(logits=model[1](found.rsample())), 1)
        return (kl_divergence(found, before) - made.log_prob(x)).mean()

    return training(device, model, loss_of)


def weighted_bags(device: str) -> Step:
    model = nn.EmbeddingBag(1000, 32, mode="sum").to(device)
    rows = torch.randint(0, 1000, (640,), device=device)
    begins = torch.arange(0, 640, 10, device=device)
    weights = torch.rand(640, device=device)
    return training(
        device, model, lambda: model(rows, begins, per_sample_weights=weights).square().mean()
    )


def masked_16_bits(device: str) -> Step:
    model = nn.Linear(64, 192).to(device, torch.bfloat16)
    x = torch.randn(2, 128, 64, device=device, dtype=torch.bfloat16)
    mask = torch.ones(128, 128, dtype=torch.bool, device=device).tril()

    def loss_of() -> torch.Tensor:
        parts = model(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        return attended.float().square().mean()

    return training(device, model, loss_of)


def messages(device: str) -> Step:
    model = nn.Linear(64, 64, bias=False).to(device)
    begins, ends = torch.randint(0, 500, (2, 3000), device=device)
    x = torch.randn(500, 64, device=device)

    def loss_of() -> torch.Tensor:
        h = model(x)
        ones = torch.ones(3000, device=device)
        shares = torch.zeros(500, device=device).scatter_add_(0, ends, ones).clamp(min=1).rsqrt()
        sent = h[begins] * (shares[begins] * shares[ends])[:, None]
        return torch.zeros_like(h).index_add_(0, ends, sent).square().mean()

    return training(device, model, loss_of)


def state_space(device: str) -> Step:
    model = nn.ParameterList(
        [torch.randn(32, 16, dtype=torch.cfloat), torch.randn(32, 16, dtype=torch.cfloat)]
    ).to(device)
    x, length = torch.randn(8, 32, 256, device=device), 256

    def loss_of() -> torch.Tensor:
        powers = torch.exp((model[0] * -0.01)[..., None] * torch.arange(length, device=device))
        kernel = 2 * torch.einsum("hn,hnl->hl", model[1], powers).real
        both = torch.fft.rfft(kernel, n=2 * length) * torch.fft.rfft(x, n=2 * length)
        return torch.fft.irfft(both, n=2 * length)[..., :length].square().mean()

    return training(device, model, loss_of)


def boxes(device: str) -> Step:
    model, x = nn.Linear(64, 5).to(device), torch.randn(2000, 64, device=device)
    wanted = torch.rand(20, 4, device=device)

    def area(box: torch.Tensor) -> torch.Tensor:
        return (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])

    def loss_of() -> torch.Tensor:
        out = model(x)
        scores, places = out[:, 0].topk(300)
        found = out[places, 1:].sigmoid()
        least = torch.max(found[:, None, :2], wanted[:, :2])
        most = torch.min(found[:, None, 2:], wanted[:, 2:])
        shared = (most - least).clamp(min=0).unbind(-1)
        inside = shared[0] * shared[1]
        best, which = (inside / (area(found)[:, None] + area(wanted) - inside + 1e-6)).max(1)
        return (
            (1 - best).mean() + functional.l1_loss(found, wanted[which]) + scores.sigmoid().mean()
        )

    return training(device, model, loss_of)


def limited_experts(device: str) -> Step:
    gate, up, down = nn.Linear(64, 8), torch.randn(8, 64, 128), torch.randn(8, 128, 64)
    model = nn.ModuleList([gate, nn.ParameterList([up, down])]).to(device)
    x = torch.randn(256, 64, device=device)

    def loss_of() -> torch.Tensor:
        shares, chosen = gate(x).softmax(-1).topk(2)
        hot = torch.zeros(256, 2, 8, device=device).scatter_(2, chosen[..., None], 1.0)
        order = ((hot.flatten(0, 1).cumsum(0) - 1).view_as(hot) * hot).sum(-1)
        places = order.long().clamp(max=127)
        given = torch.zeros(8, 128, 64, device=device)
        rows = (chosen.flatten(), places.flatten())
        given = given.index_put(rows, x.repeat_interleave(2, 0), accumulate=True)
        made = torch.bmm(torch.bmm(given, model[1][0]).relu(), model[1][1])
        return (made[chosen, places] * shares[..., None]).sum(1).square().mean()

    return training(device, model, loss_of)


def searched(device: str) -> Step:
    """The best beginnings of a text, token by token."""
    embedding, cell = nn.Embedding(100, 64).to(device), nn.LSTMCell(64, 64).to(device)
    head = nn.Linear(64, 100).to(device)

    def step() -> torch.Tensor:
        h = c = torch.zeros(5, 64, device=device)
        text, scores = torch.zeros(5, 1, dtype=torch.long, device=device), torch.zeros(5, 1)
        scores = scores.to(h)
        for _ in range(8):
            h, c = cell(embedding(text[:, -1]), (h, c))
            best, places = (head(h).log_softmax(-1) + scores).flatten().topk(5)
            before = torch.div(places, 100, rounding_mode="floor")
            h, c, scores = h[before], c[before], best[:, None]
            text = torch.cat([text[before], places[:, None] % 100], 1)
        return text

    return step


def sharpness_aware(device: str) -> Step:
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    x = torch.randn(64, 128, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(x).square().mean().backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [p.grad * (0.05 / (norm + 1e-12)) for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rays(device: str) -> Step:
    model = nn.Sequential(nn.Linear(63, 128), nn.ReLU(), nn.Linear(128, 4)).to(device)
    begin, way = torch.randn(2, 128, 3, device=device)

    def loss_of() -> torch.Tensor:
        along = torch.linspace(2, 6, 32, device=device) + torch.rand(128, 32, device=device)
        places = begin[:, None] + way[:, None] * along[..., None]
        waves = [f(places * 2**i) for i in range(10) for f in (torch.sin, torch.cos)]
        out = model(torch.cat([places, *waves], -1))
        light = 1 - torch.exp(-out[..., 3].relu() * 0.1)
        ones = torch.ones(128, 1, device=device)
        left = torch.cumprod(torch.cat([ones, 1 - light + 1e-10], 1), 1)[:, :-1]
        return ((light * left)[..., None] * out[..., :3].sigmoid()).sum(1).square().mean()

    return training(device, model, loss_of)


def noised(device: str) -> Step:
    model = nn.Sequential(nn.Linear(160, 256), nn.SiLU(), nn.Linear(256, 128)).to(device)
    shares = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), 0)
    x = torch.randn(256, 128, device=device)

    def loss_of() -> torch.Tensor:
        times = torch.randint(0, 1000, (256,), device=device)
        noise, share = torch.randn_like(x), shares[times][:, None]
        waves = torch.exp(-math.log(1e4) * torch.arange(16, device=device) / 16)
        angles = times[:, None].float() * waves
        given = share.sqrt() * x + (1 - share).sqrt() * noise
        out = model(torch.cat([given, angles.sin(), angles.cos()], -1))
        return functional.mse_loss(out, noise)

    return training(device, model, loss_of)


_BUILT = {
    "labels as one-hot rows": lambda device: classified(device, one_hot),
    "rows of each label": lambda device: classified(device, of_each_label),
    "rows that are repeated": lambda device: classified(device, repeated),
    "supervised contrast": lambda device: classified(device, contrastive),
    "CTC, lengths as lists": spoken,
    "DQN, a buffer": lambda device: q_learning(device, stacked=False),
    "DQN, episodes": lambda device: q_learning(device, stacked=True),
    "BCE of each logit": lambda device: of_logits(device, reduction="none"),
    "BCE, weighted": lambda device: of_logits(device, weighted=True),
    "VAE of distributions": auto_encoder,
    "bags, weighted": weighted_bags,
    "attention, masked, bf16": masked_16_bits,
    "graph convolution": messages,
    "state space": state_space,
    "boxes": boxes,
    "experts with a limit": limited_experts,
    "SAM": sharpness_aware,
    "rays": rays,
    "noise": noised,
}
GIVEN = on_both(_BUILT) | on_both({"beam search": searched}, no_grad=True)
