"""Programs of text and speech for an estimate, each for the CPU and for CUDA.

Language models and how they are trained: adapters, preferences, experts, quantized weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from workloads_estimated import Step, on_both, training

_WORDS = 500


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.type_as(x)


def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles[: x.shape[1], None]).flatten(3).type_as(x)


class _Grouped(nn.Module):
    """A layer of Llama, whose heads of keys and values serve several queries."""

    def __init__(self, width: int = 128, heads: int = 8, shared: int = 2) -> None:
        super().__init__()
        self.heads, self.shared, self.each = heads, shared, width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.each, bias=False)
        self.value = nn.Linear(width, shared * self.each, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.before, self.after = _RmsNorm(width), _RmsNorm(width)

    def attend(self, x: torch.Tensor, angles: torch.Tensor, cache: Any = None) -> torch.Tensor:
        batch, length, _ = x.shape
        query = _turned(self.query(x).view(batch, length, -1, self.each), angles)
        key = _turned(self.key(x).view(batch, length, -1, self.each), angles)
        value = self.value(x).view(batch, length, -1, self.each)
        if cache is not None:
            key, value = cache(key, value)
        repeats = self.heads // self.shared
        key, value = (t.repeat_interleave(repeats, 2).transpose(1, 2) for t in (key, value))
        query = query.transpose(1, 2)
        causal = length > 1
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.out(found.transpose(1, 2).reshape(batch, length, -1))

    def forward(self, x: torch.Tensor, angles: torch.Tensor, cache: Any = None) -> torch.Tensor:
        x = x + self.attend(self.before(x), angles, cache)
        h = self.after(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class _Llama(nn.Module):
    def __init__(self, layers: int = 2, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.layers = nn.ModuleList(_Grouped(width) for _ in range(layers))
        self.norm, self.head = _RmsNorm(width), nn.Linear(width, _WORDS, bias=False)
        self.head.weight = self.words.weight
        turns = torch.outer(torch.arange(128.0), 1e4 ** -(torch.arange(0, 16, 2) / 16))
        self.register_buffer("angles", torch.polar(torch.ones_like(turns), turns))

    def hidden(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text)
        for layer in self.layers:
            x = layer(x, self.angles)
        return self.norm(x)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(text))


def _text(device: str, rows: int = 4, length: int = 64) -> torch.Tensor:
    return torch.randint(0, _WORDS, (rows, length), device=device)


def _next(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())


def llama(device: str) -> Step:
    model, text = _Llama().to(device), _text(device)
    return training(device, model, lambda: _next(model(text), text))


def sampled(device: str) -> Step:
    """A prompt, then words by their share of the probability, with keys that are kept."""
    model, text = _Llama().to(device), _text(device, 2, 16)

    class Kept:
        def __init__(self) -> None:
            self.key = self.value = torch.empty(2, 0, 2, 16, device=device)

        def __call__(self, key: torch.Tensor, value: torch.Tensor) -> Any:
            self.key = torch.cat([self.key, key], 1)
            self.value = torch.cat([self.value, value], 1)
            return self.key, self.value

    def step() -> torch.Tensor:
        caches, words, given = [Kept() for _ in model.layers], text, text
        for place in range(8):
            x = model.words(given)
            begin = 0 if not place else words.shape[1] - 1
            for layer, cache in zip(model.layers, caches, strict=True):
                x = layer(x, model.angles[begin:], cache)
            logits = model.head(model.norm(x[:, -1])) / 0.8
            ordered, order = logits.softmax(-1).sort(descending=True)
            ordered[ordered.cumsum(-1) - ordered > 0.9] = 0
            given = order.gather(1, torch.multinomial(ordered, 1))
            words = torch.cat([words, given], 1)
        return words

    return step


class _Relative(nn.Module):
    """Attention of T5: a bias for each distance, and no scale."""

    def __init__(self, width: int = 64, heads: int = 4, *, crossed: bool = False) -> None:
        super().__init__()
        self.heads, self.crossed = heads, crossed
        self.query, self.both = nn.Linear(width, width, False), nn.Linear(width, 2 * width, False)
        self.out, self.bias = nn.Linear(width, width, False), nn.Embedding(32, heads)

    def forward(self, x: torch.Tensor, other: torch.Tensor, *, causal: bool) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, -1, self.heads, width // self.heads)
        query = self.query(x).view(shape).transpose(1, 2)
        key, value = (t.view(shape).transpose(1, 2) for t in self.both(other).chunk(2, -1))
        scores = query @ key.transpose(-1, -2)
        if not self.crossed:
            rows = torch.arange(length, device=x.device)
            apart = rows[None] - rows[:, None]
            far = (-apart).clamp(min=0) if causal else apart.abs()
            larger = 16 + (torch.log(far.float() / 16) / math.log(8) * 16).long()
            buckets = torch.where(far < 16, far, larger.clamp(max=31))
            scores = scores + self.bias(buckets).permute(2, 0, 1)[None]
            if causal:
                scores = scores.masked_fill(apart > 0, torch.finfo(x.dtype).min)
        weights = functional.dropout(scores.float().softmax(-1).type_as(scores), 0.1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


def relative(device: str) -> Step:
    words, head = nn.Embedding(_WORDS, 64), nn.Linear(64, _WORDS, bias=False)
    parts = [_Relative(), _Relative(), _Relative(crossed=True), nn.Linear(64, 64)]
    model = nn.ModuleList([words, head, *parts]).to(device)
    read, written = _text(device, 4, 48), _text(device, 4, 32)

    def loss_of() -> torch.Tensor:
        x = words(read)
        x = x + parts[0](x, x, causal=False)
        y = words(written) * 64**-0.5
        y = y + parts[1](y, y, causal=True)
        y = y + parts[2](y, x, causal=False)
        return _next(head(y + parts[3](y).relu()), written)

    return training(device, model, loss_of)


class _Scan(nn.Module):
    """Mamba's selective state space, step by step."""

    def __init__(self, width: int = 32, states: int = 8) -> None:
        super().__init__()
        wide = 2 * width
        self.into, self.out = nn.Linear(width, 2 * wide, False), nn.Linear(wide, width, False)
        self.near = nn.Conv1d(wide, wide, 4, groups=wide, padding=3)
        self.chosen, self.steps = nn.Linear(wide, 4 + 2 * states, False), nn.Linear(4, wide)
        self.decay = nn.Parameter(torch.arange(1.0, states + 1).log().expand(wide, -1).clone())
        self.skip = nn.Parameter(torch.ones(wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        x, gate = self.into(x).chunk(2, -1)
        x = functional.silu(self.near(x.transpose(1, 2))[..., :length]).transpose(1, 2)
        low, b, c = self.chosen(x).split([4, 8, 8], -1)
        delta = functional.softplus(self.steps(low))
        kept = torch.exp(delta[..., None] * -self.decay.exp())
        given = delta[..., None] * b[:, :, None] * x[..., None]
        state, made = torch.zeros_like(kept[:, 0]), []
        for time in range(length):
            state = kept[:, time] * state + given[:, time]
            made.append(torch.einsum("bdn,bn->bd", state, c[:, time]))
        return self.out((torch.stack(made, 1) + x * self.skip) * functional.silu(gate))


def scanned(device: str) -> Step:
    model = nn.Sequential(nn.Embedding(_WORDS, 32), _Scan(), nn.LayerNorm(32), _Scan())
    model.append(nn.Linear(32, _WORDS)).to(device)
    text = _text(device, 2, 32)
    return training(device, model, lambda: _next(model(text), text))


def with_capacity(device: str) -> Step:
    """Two experts for each word, as many words as fit, and losses that balance them."""
    gate, up = nn.Linear(64, 8, bias=False), nn.Parameter(torch.randn(8, 64, 128) * 0.02)
    down = nn.Parameter(torch.randn(8, 128, 64) * 0.02)
    model = nn.ModuleList([gate, nn.ParameterList([up, down])]).to(device)
    x, capacity = torch.randn(256, 64, device=device), 80

    def loss_of() -> torch.Tensor:
        logits = gate(x)
        chances = logits.softmax(-1)
        shares, chosen = chances.topk(2)
        shares = shares / shares.sum(-1, keepdim=True)
        hot = functional.one_hot(chosen, 8)
        places = (hot.transpose(0, 1).reshape(-1, 8).cumsum(0) - 1).view(2, 256, 8)
        places = (places.transpose(0, 1) * hot).sum(-1)
        fits = places < capacity
        spots = functional.one_hot(places.clamp(max=capacity - 1), capacity) * fits[..., None]
        given = torch.einsum("nke,nkc->nkec", hot.float(), spots.float())
        mixed = (given * shares[..., None, None]).sum(1)
        read = torch.einsum("nec,nd->ecd", given.sum(1), x)
        made = torch.bmm(functional.gelu(torch.bmm(read, model[1][0])), model[1][1])
        out = torch.einsum("nec,ecd->nd", mixed, made)
        balance = 8 * (hot[:, 0].float().mean(0) * chances.mean(0)).sum()
        return out.square().mean() + 0.01 * balance + 1e-3 * logits.logsumexp(-1).square().mean()

    return training(device, model, loss_of)


class _FourBits(nn.Module):
    """QLoRA: weights of four bits by blocks, and an adapter of two small matrices."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.shape = (outer, inner)
        self.register_buffer("packed", torch.randint(0, 256, (outer * inner // 2,)).byte())
        self.register_buffer("scales", torch.rand(outer * inner // 64, 1))
        self.register_buffer("table", torch.linspace(-1, 1, 16))
        self.down, self.up = nn.Linear(inner, 8, False), nn.Linear(8, outer, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halves = torch.stack([self.packed >> 4, self.packed & 15], -1).flatten().long()
        weight = (self.table[halves].view(-1, 64) * self.scales).view(self.shape).to(x.dtype)
        return functional.linear(x, weight) + self.up(functional.dropout(self.down(x), 0.05)) * 2


def four_bits(device: str) -> Step:
    layers = [nn.Linear(128, 128), _FourBits(128, 512), nn.SiLU(), _FourBits(512, 128)]
    model = nn.Sequential(*layers).to(device)
    model[0].requires_grad_(False)
    x = torch.randn(64, 128, device=device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-4)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def fake_quantized(device: str) -> Step:
    """Weights by channel and activations by a moving range, rounded as eight bits would be."""
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    least, most = torch.zeros(2, device=device), torch.ones(2, device=device)
    x, labels = torch.rand(64, 128, device=device), torch.randint(0, 10, (64,), device=device)

    def rounded(h: torch.Tensor, number: int) -> torch.Tensor:
        with torch.no_grad():
            least[number].lerp_(h.min(), 0.1)
            most[number].lerp_(h.max(), 0.1)
            scale = ((most[number] - least[number]) / 255).clamp(min=1e-8)
            zero = (-least[number] / scale).round().clamp(0, 255).int()
        return torch.fake_quantize_per_tensor_affine(h, scale, zero, 0, 255)

    def layer(h: torch.Tensor, linear: nn.Linear) -> torch.Tensor:
        scales = (linear.weight.detach().abs().amax(1) / 127).clamp(min=1e-8)
        zeros = torch.zeros_like(scales).int()
        weight = torch.fake_quantize_per_channel_affine(linear.weight, scales, zeros, 0, -128, 127)
        return functional.linear(h, weight, linear.bias)

    def loss_of() -> torch.Tensor:
        h = layer(rounded(x, 0), model[0]).relu()
        return functional.cross_entropy(layer(rounded(h, 1), model[2]), labels)

    return training(device, model, loss_of)


class _ChunkedLoss(torch.autograd.Function):
    """Logits of a few rows at a time; their gradients are made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros(())
        for begin in range(0, len(hidden), 64):
            rows, wanted = hidden[begin : begin + 64], labels[begin : begin + 64]
            logits = rows @ weight.t()
            shares = logits.softmax(-1)
            loss += -(shares.gather(1, wanted[:, None]) + 1e-9).log().sum()
            shares.scatter_add_(1, wanted[:, None], -torch.ones_like(shares[:, :1]))
            of_hidden[begin : begin + 64] = shares @ weight
            of_weight.addmm_(shares.t(), rows)
        ctx.save_for_backward(of_hidden / len(hidden), of_weight / len(hidden))
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden.mul_(grad), of_weight.mul_(grad), None


def chunked(device: str) -> Step:
    model, text = _Llama().to(device), _text(device)

    def loss_of() -> torch.Tensor:
        hidden = model.hidden(text)[:, :-1].flatten(0, 1)
        return _ChunkedLoss.apply(hidden, model.head.weight, text[:, 1:].flatten())

    return training(device, model, loss_of)


def accumulated(device: str) -> Step:
    """Four parts of a batch, gradients that are clipped, a schedule, and averaged weights."""
    model = _Llama(1).to(device)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": plain, "weight_decay": 0.0}]
    groups.append({"params": [p for p in model.parameters() if p.dim() > 1]})
    optimizer = torch.optim.AdamW(groups, 3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    text = _text(device, 8, 32)

    def step() -> dict[str, float]:
        total = 0.0
        for part in text.chunk(4):
            loss = _next(model(part), part) / 4
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        averaged.update_parameters(model)
        return {"loss": total, "norm": norm.item(), "lr": schedule.get_last_lr()[0]}

    return step


def distilled(device: str) -> Step:
    student, teacher = _Llama(1).to(device), _Llama(3).to(device).eval().requires_grad_(False)
    text = _text(device)

    def loss_of() -> torch.Tensor:
        with torch.inference_mode():
            wanted = teacher(text)
        out = student(text)
        log_shares = functional.log_softmax(out / 2, -1)
        shares = functional.log_softmax(wanted / 2, -1)
        soft = functional.kl_div(log_shares, shares, log_target=True, reduction="batchmean")
        return 0.5 * 4 * soft + 0.5 * _next(out, text)

    return training(device, student, loss_of)


def preferred(device: str) -> Step:
    """DPO: a pair of answers, by the model and by what it was."""
    model = _Llama().to(device)
    reference = copy.deepcopy(model).requires_grad_(False).eval()
    good, bad = _text(device), _text(device)
    answers = torch.arange(63, device=device) >= 20

    def chances(of: nn.Module) -> torch.Tensor:
        text = torch.cat([good, bad])
        logs = of(text)[:, :-1].log_softmax(-1)
        each = logs.gather(2, text[:, 1:, None]).squeeze(2)
        return (each * answers).sum(1)

    def loss_of() -> torch.Tensor:
        with torch.no_grad():
            before = chances(reference)
        gained = chances(model) - before
        more = gained[:4] - gained[4:]
        return -functional.logsigmoid(0.1 * more).mean()

    return training(device, model, loss_of)


def grouped_policy(device: str) -> Step:
    """GRPO: answers are sampled, scored in their group, and learned from with a clipped ratio."""
    model = _Llama(1).to(device)
    prompts, scores = _text(device, 4, 16), torch.randn(4, device=device)

    def logs(text: torch.Tensor) -> torch.Tensor:
        return model(text)[:, 15:-1].log_softmax(-1).gather(2, text[:, 16:, None]).squeeze(2)

    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)

    def step() -> None:
        text = prompts
        with torch.no_grad():
            for _ in range(6):
                word = torch.distributions.Categorical(logits=model(text)[:, -1]).sample()
                text = torch.cat([text, word[:, None]], 1)
            before = logs(text)
        gain = (scores - scores.mean()) / (scores.std() + 1e-4)
        for _ in range(2):
            ratio = (logs(text) - before).exp()
            least = torch.minimum(ratio * gain[:, None], ratio.clamp(0.8, 1.2) * gain[:, None])
            optimizer.zero_grad()
            (-least.mean()).backward()
            optimizer.step()

    return step


def linear_attention(device: str) -> Step:
    """A state for each head that decays, in chunks."""
    model = nn.ModuleList([nn.Linear(64, 192), nn.Linear(64, 64), nn.GroupNorm(4, 64)]).to(device)
    x = torch.randn(4, 64, 64, device=device)
    decay = 1 - torch.exp2(-5 - torch.arange(4.0, device=device))

    def loss_of() -> torch.Tensor:
        query, key, value = model[0](x).view(4, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
        state, made = query.new_zeros(4, 4, 16, 16), []
        rows = torch.arange(16, device=device)
        apart = (rows[:, None] - rows).clamp(min=0)
        inside = (decay[:, None, None] ** apart).tril()
        for q, k, v in zip(*(t.split(16, 2) for t in (query, key, value)), strict=True):
            near = (q @ k.transpose(-1, -2) * inside) @ v
            far = (q * decay[:, None, None] ** (rows + 1)[:, None]) @ state
            weighted = k * decay[:, None, None] ** (15 - rows)[:, None]
            state = state * decay[:, None, None] ** 16 + weighted.transpose(-1, -2) @ v
            made.append(near + far)
        out = torch.cat(made, 2).transpose(1, 2).reshape(256, 64)
        return model[1](model[2](out)).square().mean()

    return training(device, model, loss_of)


class _Reversible(torch.autograd.Function):
    """Inputs are computed again from outputs, layer by layer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, *layers: Any) -> Any:
        ctx.layers = layers
        with torch.no_grad():
            for f, g in layers:
                x = x + f(y)
                y = y + g(x)
        ctx.save_for_backward(x, y)
        return x, y

    @staticmethod
    def backward(ctx: Any, of_x: torch.Tensor, of_y: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        for f, g in reversed(ctx.layers):
            for layer in (g, f):
                with torch.enable_grad():
                    given = (x if layer is g else y).detach().requires_grad_()
                    made = layer(given)
                torch.autograd.backward(made, of_y if layer is g else of_x)
                with torch.no_grad():
                    if layer is g:
                        y = y - made
                        of_x = of_x + given.grad
                    else:
                        x = x - made
                        of_y = of_y + given.grad
        return of_x, of_y, *[None] * len(ctx.layers)


def reversible(device: str) -> Step:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    model = nn.ModuleList(nn.ModuleList([block(), block()]) for _ in range(3)).to(device)
    x = torch.randn(128, 128, device=device, requires_grad=True)

    def loss_of() -> torch.Tensor:
        return torch.cat(_Reversible.apply(*x.chunk(2, -1), *model), -1).square().mean()

    return training(device, model, loss_of)


def packed_texts(device: str) -> Step:
    """Several texts in a row, which do not see each other; places begin anew in each."""
    model, lengths = _Llama().to(device), torch.tensor([30, 50, 48])
    text = _text(device, 1, 128)
    number = torch.repeat_interleave(torch.arange(3), lengths).to(device)

    def loss_of() -> torch.Tensor:
        mask = (number[:, None] == number).tril()
        x = model.words(text)
        for layer in model.layers:
            h = layer.before(x)
            query = layer.query(h).view(1, 128, 8, 16).transpose(1, 2)
            key, value = (
                part(h).view(1, 128, 2, 16).transpose(1, 2) for part in (layer.key, layer.value)
            )
            found = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, enable_gqa=True
            )
            x = x + layer.out(found.transpose(1, 2).flatten(2))
        wanted = text[:, 1:].masked_fill(number[1:] != number[:-1], -100)
        out = model.head(model.norm(x))[:, :-1]
        return functional.cross_entropy(out.flatten(0, 1), wanted.flatten())

    return training(device, model, loss_of)


def translated(device: str) -> Step:
    """torch's own transformer with its masks."""
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True).to(device)
    words, head = nn.Embedding(_WORDS, 64).to(device), nn.Linear(64, _WORDS).to(device)
    read, written = _text(device, 4, 40), _text(device, 4, 32)
    padded = torch.zeros(4, 40, dtype=torch.bool, device=device)
    padded[:, 35:] = True
    later = nn.Transformer.generate_square_subsequent_mask(31, device=device)
    every = [*model.parameters(), *words.parameters(), *head.parameters()]

    def loss_of() -> torch.Tensor:
        out = model(
            words(read),
            words(written[:, :-1]),
            tgt_mask=later,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
            tgt_is_causal=True,
        )
        return functional.cross_entropy(head(out).transpose(1, 2), written[:, 1:])

    return training(device, model, loss_of, optimizer=torch.optim.Adam(every, 1e-4))


def replaced_words(device: str) -> Step:
    """ELECTRA: a small model replaces words, a larger one finds which."""
    small, large = _Llama(1).to(device), _Llama(2).to(device)
    judge, text = nn.Linear(_WORDS, 1).to(device), _text(device)
    every = [p for m in (small, large, judge) for p in m.parameters()]
    optimizer = torch.optim.AdamW(every, 1e-4)

    def loss_of() -> torch.Tensor:
        hidden = torch.rand(text.shape, device=device) < 0.15
        given = torch.where(hidden, 3, text)
        out = small(given)
        each = functional.cross_entropy(out.transpose(1, 2), text, reduction="none")
        guessing = (each * hidden).sum() / hidden.sum().clamp(min=1)
        with torch.no_grad():
            found = functional.gumbel_softmax(out, hard=True).argmax(-1)
        mixed = torch.where(hidden, found, text)
        told = judge(large(mixed)).squeeze(-1)
        wanted = (mixed != text).float()
        return guessing + 50 * functional.binary_cross_entropy_with_logits(told, wanted)

    return training(device, small, loss_of, optimizer=optimizer)


def sixteen_bits(device: str) -> Step:
    """Weights of 16 bits, updates of 32: the usual bf16 pretraining without casts."""
    model, text = _Llama().to(device, torch.bfloat16), _text(device)
    model.angles = model.angles.to(torch.cfloat)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
    return training(device, model, lambda: _next(model(text), text), optimizer=optimizer)


def in_reserve(device: str, make: Callable[[nn.Module], Any] | None = None) -> Step:
    """A layer at a time is checkpointed, and what is kept waits on the host."""
    from torch.utils.checkpoint import checkpoint

    model, text = _Llama(3).to(device), _text(device)

    def loss_of() -> torch.Tensor:
        x = model.words(text)
        with torch.autograd.graph.save_on_cpu():
            for layer in model.layers:
                x = checkpoint(layer, x, model.angles, use_reentrant=False)
        return _next(model.head(model.norm(x)), text)

    return training(device, model, loss_of)


_BUILT = {
    "grouped queries, tied head": llama,
    "words by share of probability": sampled,
    "relative positions": relative,
    "selective scan": scanned,
    "experts with capacity": with_capacity,
    "weights of 4 bits, adapters": four_bits,
    "fake quantization": fake_quantized,
    "loss in chunks, own gradients": chunked,
    "accumulated, clipped, averaged": accumulated,
    "distillation": distilled,
    "DPO": preferred,
    "GRPO": grouped_policy,
    "linear attention": linear_attention,
    "reversible layers": reversible,
    "packed texts": packed_texts,
    "translation": translated,
    "replaced words": replaced_words,
    "language model of 16 bits": sixteen_bits,
    "checkpoints on the host": in_reserve,
}
TEXT = on_both(_BUILT)
