"""Programs of sequences and of what decides among layers, for an estimate, on both devices."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from workloads_estimated import Step, on_both, training


def _random(device: str, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, device=device)


def rwkv(device: str) -> Step:
    """Time is mixed by sums that decay, and channels by squares."""
    mix = nn.ParameterList([torch.rand(64) for _ in range(3)])
    key, value, gate, out = (nn.Linear(64, 64, bias=False) for _ in range(4))
    decay = nn.Parameter(torch.rand(2, 64))
    model = nn.ModuleList([mix, key, value, gate, out]).to(device)
    model.decay = nn.Parameter(decay.to(device).detach())
    x = _random(device, 4, 32, 64)

    def loss_of() -> torch.Tensor:
        before = functional.pad(x, (0, 0, 1, -1))
        k, v, r = (
            layer(x * m + before * (1 - m))
            for layer, m in zip((key, value, gate), mix, strict=True)
        )
        over, under, most = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), k[:, 0] - 1e4
        rows = []
        for time in range(x.shape[1]):
            largest = torch.maximum(most, model.decay[0] + k[:, time])
            old, new = (most - largest).exp(), (model.decay[0] + k[:, time] - largest).exp()
            rows.append((old * over + new * v[:, time]) / (old * under + new))
            largest = torch.maximum(most - model.decay[1].exp(), k[:, time])
            old, new = (most - model.decay[1].exp() - largest).exp(), (k[:, time] - largest).exp()
            over, under, most = old * over + new * v[:, time], old * under + new, largest
        return out(torch.sigmoid(r) * torch.stack(rows, 1)).square().mean()

    return training(device, model, loss_of)


def retention(device: str) -> Step:
    """Retention of a network without softmax: scores that decay with the distance."""
    project, norm = nn.Linear(64, 192).to(device), nn.GroupNorm(4, 64).to(device)
    model, x = nn.ModuleList([project, norm]), _random(device, 4, 48, 64)
    rates = 1 - 2.0 ** -(5 + torch.arange(4.0, device=device))

    def loss_of() -> torch.Tensor:
        q, k, v = project(x).view(4, 48, 3, 4, 16).permute(2, 0, 3, 1, 4)
        places = torch.arange(48, device=device)
        far = (places[:, None] - places).clamp(min=0)
        decays = torch.tril(rates[:, None, None] ** far)
        scores = torch.einsum("bhld,bhmd->bhlm", q, k) * decays
        made = (scores / scores.detach().abs().sum(-1, keepdim=True).clamp(min=1)) @ v
        return norm(made.transpose(1, 2).reshape(-1, 64)).square().mean()

    return training(device, model, loss_of)


def scanned_in_logs(device: str) -> Step:
    """A gated layer whose whole sequence is one running sum of logarithms."""
    gates, head, x = (
        nn.Linear(32, 128).to(device),
        nn.Linear(64, 5).to(device),
        _random(device, 8, 64, 32),
    )

    def loss_of() -> torch.Tensor:
        z, h = gates(x).chunk(2, -1)
        keep, take = -functional.softplus(z), -functional.softplus(-z)
        value = torch.where(h >= 0, (functional.relu(h) + 0.5).log(), -functional.softplus(-h))
        sums = functional.pad(keep.cumsum(1), (0, 0, 1, 0))
        values = torch.cat([torch.zeros_like(value[:, :1]), value + take], 1)
        states = (sums + torch.logcumsumexp(values - sums, 1)).exp()[:, 1:]
        return head(states).logsumexp(-1).mean()

    return training(device, nn.ModuleList([gates, head]), loss_of)


def long_convolution(device: str) -> Step:
    """Hyena: filters as long as the sequence, which a small network makes, by Fourier."""
    project, filters = (
        nn.Linear(32, 96),
        nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 32)),
    )
    short = nn.Conv1d(96, 96, 3, padding=2, groups=96)
    model, x = nn.ModuleList([project, filters, short]).to(device), _random(device, 4, 128, 32)
    places = torch.linspace(0, 1, 128, device=device)[:, None]

    def loss_of() -> torch.Tensor:
        found = short(project(x).transpose(1, 2))[..., :128]
        gate, value, last = found.chunk(3, 1)
        waves = torch.cat(
            [places, *(f(places * n) for f in (torch.sin, torch.cos) for n in (1, 2))], 1
        )
        kernel = filters(waves).t() * torch.exp(-places.t() * 4)
        spectrum = torch.fft.rfft(kernel, n=256) / 256
        made = torch.fft.irfft(
            torch.fft.rfft(gate * value, n=256) * spectrum, n=256, norm="forward"
        )
        return (last * made[..., :128]).square().mean()

    return training(device, model, loss_of)


def latent_attention(device: str) -> Step:
    """Keys and values come out of one narrow row for each word."""
    down, up, ask, out = (
        nn.Linear(128, 40),
        nn.Linear(32, 256),
        nn.Linear(128, 4 * 40),
        nn.Linear(128, 128),
    )
    model, x = nn.ModuleList([down, up, ask, out]).to(device), _random(device, 2, 64, 128)

    def loss_of() -> torch.Tensor:
        narrow, turned = down(x).split([32, 8], -1)
        k, v = up(narrow).view(2, 64, 4, 64).chunk(2, -1)
        q = ask(x).view(2, 64, 4, 40).transpose(1, 2)
        k = torch.cat([k, turned[:, :, None].expand(-1, -1, 4, -1)], -1).transpose(1, 2)
        found = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
        return out(found.transpose(1, 2).flatten(2)).square().mean()

    return training(device, model, loss_of)


def depths(device: str) -> Step:
    """A layer takes the words alone that it chooses, and puts them back."""
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)
    )
    routers = nn.ModuleList(nn.Linear(64, 1) for _ in range(2))
    model, x = nn.ModuleList([layers, routers]).to(device), _random(device, 4, 32, 64)

    def loss_of() -> torch.Tensor:
        h = x
        for layer, router in zip(layers, routers, strict=True):
            weights, places = router(h).squeeze(-1).topk(8, 1, sorted=False)
            places, order = places.sort(1)
            rows = places[..., None].expand(-1, -1, 64)
            made = layer(h.gather(1, rows)) * weights.gather(1, order).sigmoid()[..., None]
            h = h.scatter_add(1, rows, made)
        return h.square().mean()

    return training(device, model, loss_of)


def soft_experts(device: str) -> Step:
    """Each expert gets averages of all words."""
    experts = nn.ParameterList([torch.randn(4, 64, 128) * 0.1, torch.randn(4, 128, 64) * 0.1])
    slots = nn.Parameter(torch.randn(64, 4, 8))
    model = nn.ParameterList([*experts, slots]).to(device)
    x = _random(device, 4, 32, 64)

    def loss_of() -> torch.Tensor:
        first, second, places = model
        logits = torch.einsum("bld,des->bles", functional.normalize(x, dim=-1), places)
        parts = torch.einsum("bles,bld->besd", logits.softmax(1), x)
        hidden = torch.einsum("besd,edf->besf", parts, first).relu()
        made = torch.einsum("besf,efd->besd", hidden, second)
        joined = logits.flatten(2).softmax(-1).view_as(logits)
        return torch.einsum("bles,besd->bld", joined, made).square().mean()

    return training(device, model, loss_of)


def ternary(device: str) -> Step:
    """Weights of three values and activations of 8 bits, with gradients straight through."""
    model, x = (
        nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(3))).to(device),
        _random(device, 64, 96),
    )

    def loss_of() -> torch.Tensor:
        h = x
        for layer in model:
            scale = layer.weight.abs().mean().clamp(min=1e-5)
            weight = (layer.weight / scale).round().clamp(-1, 1) * scale
            steps = 127 / h.abs().amax(-1, keepdim=True).clamp(min=1e-5)
            given = (h * steps).round().clamp(-128, 127) / steps
            h = functional.linear(
                h + (given - h).detach(), layer.weight + (weight - layer.weight).detach()
            )
            h = functional.silu(h)
        return h.square().mean()

    return training(device, model, loss_of)


def directions(device: str) -> Step:
    """DoRA: the direction of a frozen weight and its adapter, and a length for each row."""
    base = nn.Linear(128, 128).to(device).requires_grad_(False)
    low, high = nn.Linear(128, 8, bias=False).to(device), nn.Linear(8, 128, bias=False).to(device)
    lengths = nn.Parameter(base.weight.norm(dim=1).detach().clone())
    x = _random(device, 64, 128)

    def loss_of() -> torch.Tensor:
        weight = base.weight + high.weight @ low.weight
        scale = lengths / weight.norm(dim=1).detach()
        return functional.linear(x, weight * scale[:, None], base.bias).square().mean()

    every = [*low.parameters(), *high.parameters(), lengths]
    return training(
        device, nn.ModuleList([base, low, high]), loss_of, optimizer=torch.optim.AdamW(every)
    )


def made_weights(device: str) -> Step:
    """A network makes the weights of another one, which is called with them."""
    inner, task = (
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device),
        _random(device, 12),
    )
    shapes = {name: p.shape for name, p in inner.named_parameters()}
    makes = nn.Sequential(
        nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, sum(map(torch.Size.numel, shapes.values())))
    )
    makes.to(device)
    x = _random(device, 128, 8)

    def loss_of() -> torch.Tensor:
        flat = makes(task).split([shape.numel() for shape in shapes.values()])
        given = {n: part.view(s) for (n, s), part in zip(shapes.items(), flat, strict=True)}
        return torch.func.functional_call(inner, given, (x,)).square().mean()

    return training(device, makes, loss_of)


def pointed(device: str) -> Step:
    """A pointer network decodes, and what it has pointed at is masked."""
    read, cell = nn.LSTM(2, 32, batch_first=True), nn.LSTMCell(32, 32)
    ask, offer, score = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)
    model, x = (
        nn.ModuleList([read, cell, ask, offer, score]).to(device),
        torch.rand(8, 12, 2, device=device),
    )

    def loss_of() -> torch.Tensor:
        kept, (h, c) = read(x)
        h, c, given, keys = h[0], c[0], kept.mean(1), offer(kept)
        taken = torch.zeros(8, 12, dtype=torch.bool, device=device)
        total = torch.zeros(8, device=device)
        for _ in range(12):
            h, c = cell(given, (h, c))
            logits = score(torch.tanh(ask(h)[:, None] + keys)).squeeze(-1)
            logs = logits.masked_fill(taken, -1e9).log_softmax(-1)
            chosen = logs.detach().argmax(-1, keepdim=True)
            taken = taken.scatter(1, chosen, True)
            total = total + logs.gather(1, chosen).squeeze(1)
            given = kept.gather(1, chosen[..., None].expand(-1, -1, 32)).squeeze(1)
        return -(total * 0.1).mean()

    return training(device, model, loss_of)


def transduced(device: str) -> Step:
    """RNN-T: sums over all ways through a lattice of sounds and words."""
    sounds, words, join = nn.Linear(20, 32), nn.Embedding(30, 32), nn.Linear(32, 30)
    model = nn.ModuleList([sounds, words, join]).to(device)
    x, text = _random(device, 4, 24, 20), torch.randint(1, 30, (4, 8), device=device)

    def loss_of() -> torch.Tensor:
        begun = functional.pad(text, (1, 0))
        logs = join(torch.tanh(sounds(x)[:, :, None] + words(begun)[:, None])).log_softmax(-1)
        blank = logs[..., 0]
        said = logs[:, :, :-1].gather(3, text[:, None, :, None].expand(-1, 24, -1, 1)).squeeze(-1)
        alpha = functional.pad(said[:, 0].cumsum(-1), (1, 0))
        for time in range(1, 24):
            stayed, row = alpha + blank[:, time - 1], []
            for place in range(9):
                moved = row[-1] + said[:, time, place - 1] if row else stayed[:, 0]
                row.append(torch.logaddexp(stayed[:, place], moved) if row else moved)
            alpha = torch.stack(row, 1)
        return -(alpha[:, -1] + blank[:, -1, -1]).mean()

    return training(device, model, loss_of)


def forecast(device: str) -> Step:
    """Blocks that explain what is left of a series, and its quantiles."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48 + 3 * 12)) for _ in range(3)
    )
    blocks.to(device)
    x, y = _random(device, 32, 48), _random(device, 32, 12)
    quantiles = torch.tensor([0.1, 0.5, 0.9], device=device)

    def loss_of() -> torch.Tensor:
        left, out = x, torch.zeros(32, 12, 3, device=device)
        for block in blocks:
            back, ahead = block(left).split([48, 36], 1)
            left, out = left - back, out + ahead.view(32, 12, 3)
        off = y[..., None] - out
        return torch.maximum(quantiles * off, (quantiles - 1) * off).mean()

    return training(device, blocks, loss_of)


def likelihoods(device: str) -> Step:
    """DeepAR: cells step through a series and say how sure they are."""
    cells = nn.ModuleList([nn.LSTMCell(1, 32), nn.LSTMCell(32, 32)])
    head, x = nn.Linear(32, 2), torch.randn(16, 24, device=device).cumsum(1)
    model = nn.ModuleList([cells, head]).to(device)

    def loss_of() -> torch.Tensor:
        states = [
            (torch.zeros(16, 32, device=device), torch.zeros(16, 32, device=device)) for _ in cells
        ]
        losses = []
        for time in range(23):
            h = x[:, time : time + 1]
            for place, cell in enumerate(cells):
                states[place] = cell(h, states[place])
                h = states[place][0]
            mean, spread = head(h).unbind(1)
            losses.append(
                functional.gaussian_nll_loss(mean, x[:, time + 1], functional.softplus(spread))
            )
        return torch.stack(losses).mean()

    return training(device, model, loss_of)


def odds(device: str) -> Step:
    """ORPO: the odds of a wanted answer against another one, without a second model."""
    model = nn.Sequential(
        nn.Embedding(300, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 300)
    ).to(device)
    good, bad = (torch.randint(0, 300, (4, 32), device=device) for _ in range(2))

    def logs(text: torch.Tensor) -> torch.Tensor:
        found = model(text)[:, :-1].log_softmax(-1)
        return found.gather(2, text[:, 1:, None]).squeeze(-1).mean(1)

    def loss_of() -> torch.Tensor:
        wanted, other = logs(good), logs(bad)
        ratio = wanted - other - (torch.log1p(-wanted.exp()) - torch.log1p(-other.exp()))
        return -(wanted + 0.1 * functional.logsigmoid(ratio)).mean()

    return training(device, model, loss_of)


def rewarded(device: str) -> Step:
    """A model of rewards reads the last word of each answer that is no padding."""
    words, layer = (
        nn.Embedding(300, 64),
        nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True),
    )
    head = nn.Linear(64, 1, bias=False)
    model = nn.ModuleList([words, layer, head]).to(device)
    text = torch.randint(0, 300, (8, 32), device=device)
    lengths = torch.randint(8, 32, (8,), device=device)

    def loss_of() -> torch.Tensor:
        padded = torch.arange(32, device=device) >= lengths[:, None]
        h = layer(words(text), src_key_padding_mask=padded)
        rewards = head(h).squeeze(-1)[torch.arange(8, device=device), lengths - 1]
        chosen, rejected = rewards.chunk(2)
        return -functional.logsigmoid(chosen - rejected).mean() + 1e-2 * rewards.square().mean()

    return training(device, model, loss_of)


def several_heads_ahead(device: str) -> Step:
    """Medusa: heads for the next words beside a frozen model, in 16 bits."""
    body = nn.Sequential(nn.Embedding(300, 64), nn.Linear(64, 64)).to(device, torch.bfloat16)
    body.requires_grad_(False)
    heads = nn.ModuleList(
        nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 300)) for _ in range(3)
    )
    heads.to(device, torch.bfloat16)
    text = torch.randint(0, 300, (4, 48), device=device)

    def loss_of() -> torch.Tensor:
        with torch.no_grad():
            h = body(text)
        parts = [
            0.8**n
            * functional.cross_entropy(
                head(h)[:, : -n - 1].flatten(0, 1).float(), text[:, n + 1 :].flatten()
            )
            for n, head in enumerate(heads)
        ]
        return torch.stack(parts).sum()

    return training(device, heads, loss_of)


def drafted(device: str) -> Step:
    """A small model drafts words, and a large one reads them at once; both keep their keys."""
    small, large = (
        nn.ModuleDict(
            {"words": nn.Embedding(200, w), "qkv": nn.Linear(w, 3 * w), "head": nn.Linear(w, 200)}
        ).to(device)
        for w in (32, 128)
    )
    text = torch.randint(0, 200, (1, 16), device=device)
    caches = {
        m: torch.zeros(2, 1, 64, m["words"].embedding_dim, device=device) for m in (small, large)
    }

    def read(model: nn.ModuleDict, part: torch.Tensor, begin: int) -> torch.Tensor:
        q, k, v = model["qkv"](model["words"](part)).chunk(3, -1)
        cache, end = caches[model], begin + part.shape[1]
        cache[0, :, begin:end], cache[1, :, begin:end] = k, v
        return model["head"](
            functional.scaled_dot_product_attention(q, cache[0, :, :end], cache[1, :, :end])
        )

    def step() -> torch.Tensor:
        read(small, text, 0)
        read(large, text, 0)
        last, drafts = text[:, -1:], []
        for n in range(4):
            shares = read(small, last, 16 + n)[:, -1].softmax(-1)
            last = torch.multinomial(shares, 1)
            drafts.append((last, shares))
        words = torch.cat([word for word, _ in drafts], 1)
        wanted = read(large, words, 16).softmax(-1)
        given = torch.stack([shares for _, shares in drafts], 1)
        ratio = (wanted.gather(2, words[..., None]) / given.gather(2, words[..., None])).squeeze(-1)
        accepted = (torch.rand_like(ratio) < ratio).long().cumprod(1)
        again = torch.multinomial((wanted - given).clamp(min=1e-6)[:, -1], 1)
        return torch.where(accepted.bool(), words, again)

    return step


_BUILT = {
    "RWKV": rwkv,
    "retention": retention,
    "scan in logs": scanned_in_logs,
    "Hyena": long_convolution,
    "latent attention": latent_attention,
    "mixture of depths": depths,
    "soft experts": soft_experts,
    "ternary weights": ternary,
    "DoRA": directions,
    "hypernetwork": made_weights,
    "pointer network": pointed,
    "RNN-T": transduced,
    "N-BEATS, quantiles": forecast,
    "DeepAR": likelihoods,
    "ORPO": odds,
    "model of rewards": rewarded,
    "Medusa": several_heads_ahead,
}
SEQUENCES = on_both(_BUILT) | on_both({"speculative decoding": drafted}, no_grad=True)
