"""Programs for an estimate that people bring along: usual models, wrappers and optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, rnn
from workloads_estimated import Program, Step, mlp, mlp_training, training


class Down(nn.Module):
    """A residual block with time, as in a model of diffusion."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.time = nn.GroupNorm(4, inner), nn.Linear(32, outer)
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(inner, outer, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(functional.silu(self.norm(x)))
        return y + self.time(time)[:, :, None, None] + self.second(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.low = nn.Conv2d(3, 16, 3, padding=1), Down(16, 32), Down(32, 32)
        self.up, self.leave = Down(48, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        first = self.enter(x)
        low = self.low(functional.avg_pool2d(self.down(first, time), 2), time)
        high = functional.interpolate(low, scale_factor=2, mode="bilinear")
        return self.leave(self.up(torch.cat([high, first], 1), time))


def diffusion(device: str) -> Step:
    model = UNet().to(device)
    x, time = torch.randn(2, 3, 32, 32, device=device), torch.randn(2, 32, device=device)

    def loss_of() -> torch.Tensor:
        noise = torch.randn_like(x)
        return functional.mse_loss(model(x + noise, time), noise)

    return training(device, model, loss_of)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 64))
        self.places = nn.Parameter(torch.randn(1, 17, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1) + self.places
        return self.head(self.blocks(tokens)[:, 0])


def vision(device: str) -> Step:
    model, x = Vision().to(device), torch.randn(8, 3, 32, 32, device=device)
    labels = torch.randint(0, 10, (8,), device=device)
    return training(
        device, model, lambda: functional.cross_entropy(model(x), labels, label_smoothing=0.1)
    )


def translation(device: str) -> Step:
    import transformers

    config = transformers.T5Config(
        vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    config.decoder_start_token_id = config.pad_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).to(device)
    tokens = torch.randint(1, 500, (4, 32), device=device)
    return training(device, model, lambda: model(input_ids=tokens, labels=tokens).loss)


def listening(device: str) -> Step:
    """The encoder of a model of speech: convolutions over time before attention."""
    first, second = nn.Conv1d(40, 64, 3, padding=1), nn.Conv1d(64, 64, 3, 2, 1)
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
    blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleList([first, second, blocks]).to(device)
    x = torch.randn(2, 40, 100, device=device)

    def loss_of() -> torch.Tensor:
        y = functional.gelu(second(functional.gelu(first(x))))
        return blocks(y.transpose(1, 2)).square().mean()

    return training(device, model, loss_of)


def packed(device: str) -> Step:
    model = nn.GRU(32, 64, 2, bidirectional=True, batch_first=True).to(device)
    x, lengths = torch.randn(4, 12, 32, device=device), torch.tensor([12, 9, 5, 2])

    def loss_of() -> torch.Tensor:
        out, _ = model(rnn.pack_padded_sequence(x, lengths, batch_first=True))
        return rnn.pad_packed_sequence(out, batch_first=True)[0].square().mean()

    return training(device, model, loss_of)


def both_ways(device: str) -> Step:
    model = nn.LSTM(32, 64, 2, bidirectional=True, batch_first=True).to(device)
    x = torch.randn(8, 20, 32, device=device)
    return training(device, model, lambda: model(x)[0].square().mean())


def volumes(device: str) -> Step:
    layers = [nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.ConvTranspose3d(8, 2, 2, 2)]
    model, x = nn.Sequential(*layers).to(device), torch.randn(2, 2, 12, 12, 12, device=device)
    return training(device, model, lambda: model(x).square().mean())


def frozen_statistics(device: str) -> Step:
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Hardswish(), nn.Dropout2d(0.2)]
    model, x = nn.Sequential(*layers).to(device).eval(), torch.randn(4, 3, 32, 32, device=device)
    return training(device, model, lambda: model(x).square().mean())


def tied(device: str) -> Step:
    rows, middle = nn.Embedding(500, 64), nn.Linear(64, 64)
    head = nn.Linear(64, 500, bias=False)
    head.weight = rows.weight
    model = nn.ModuleList([rows, middle, head]).to(device)
    ids = torch.randint(0, 500, (8, 16), device=device)

    def loss_of() -> torch.Tensor:
        return functional.cross_entropy(head(middle(rows(ids))).flatten(0, 1), ids.flatten())

    return training(device, model, loss_of)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized(device: str) -> Step:
    layers = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(64, 64)),
        parametrizations.spectral_norm(nn.Linear(64, 64)),
        nn.Linear(64, 64),
    ).to(device)
    parametrize.register_parametrization(layers[2], "weight", Symmetric())
    x = torch.randn(32, 64, device=device)
    return training(device, layers, lambda: layers(x).square().mean())


def compiled(device: str) -> Step:
    model, x = mlp(device)
    return training(device, model, lambda: torch.compile(model, backend="eager")(x).mean())


def in_parallel(device: str) -> Step:
    model, x = mlp(device)
    return training(device, model, lambda: nn.DataParallel(model)(x).square().mean())


def mixed(device: str) -> Step:
    """Halves of a model in 16 bits, normalized in 32."""
    first, norm, last = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)
    model = nn.ModuleList([first.bfloat16(), norm, last.bfloat16()]).to(device)
    x = torch.randn(64, 64, device=device)

    def loss_of() -> torch.Tensor:
        hidden = norm(first(x.bfloat16()).float()) * x.new_ones(256, dtype=torch.bfloat16)
        return functional.mse_loss(last(hidden.bfloat16()).float(), x)

    return training(device, model, loss_of)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x > 0)
        ctx.mark_dirty(x)
        return x.clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * mask


def own_function(device: str) -> Step:
    model, x = mlp(device)
    return training(device, model, lambda: Clamped.apply(model(x)).square().mean())


def second_derivative(device: str) -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 1)).to(device)
    x = torch.randn(32, 64, device=device, requires_grad=True)

    def loss_of() -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return training(device, model, loss_of)


def stepped_early(device: str) -> Step:
    """Each parameter is updated, and its gradient dropped, as soon as that is there."""
    model, x = mlp(device)
    steps = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        steps[parameter].step()
        steps[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)

    def step() -> None:
        model(x).square().mean().backward()

    return step


def optimized(device: str, kind: str, **how: Any) -> Step:
    model, x = mlp(device)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **how)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def orthogonal(device: str) -> Step:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)).to(device)
    x = torch.randn(32, 64, device=device)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def scheduled(device: str) -> Step:
    model, x = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters())
    plan = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    average = torch.optim.swa_utils.AveragedModel(model)

    def after(_: torch.Tensor) -> None:
        plan.step()
        average.update_parameters(model)

    return training(device, model, lambda: model(x).square().mean(), after, optimizer)


def capturable(device: str) -> Step:
    model, x = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=device == "cuda")
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def quantized(device: str) -> Step:
    model, x = mlp("cpu", 64)
    small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return lambda: small(x)


def logged(device: str) -> Step:
    values: list[float] = []
    return mlp_training(device, lambda loss: values.append(round(loss.item(), 3)))


_ON_BOTH: dict[str, Callable[[str], Step]] = {
    "diffusion's U-Net": diffusion,
    "vision transformer": vision,
    "T5 with labels": translation,
    "encoder of speech": listening,
    "embedding tied to the head": tied,
    "parametrizations": parametrized,
    "BatchNorm in eval mode": frozen_statistics,
    "volumes": volumes,
    "16 and 32 bits": mixed,
    "own function, in place": own_function,
    "second derivative": second_derivative,
    "optimizer in hooks": stepped_early,
    "Adafactor": lambda d: optimized(d, "Adafactor"),
    "RMSprop, centered": lambda d: optimized(d, "RMSprop", centered=True, momentum=0.9),
    "Adagrad": lambda d: optimized(d, "Adagrad"),
    "SGD, Nesterov, fused": lambda d: optimized(d, "SGD", momentum=0.9, nesterov=True, fused=True),
    "schedule and averages": scheduled,
    "AdamW, capturable": capturable,
}
_ON_CPU: dict[str, Callable[[str], Step]] = {
    "GRU, packed": packed,
    "LSTM, both ways": both_ways,
    "Muon": orthogonal,
    "torch.compile": compiled,
    "DataParallel": in_parallel,
    "quantized": quantized,
    "rounded .item()": logged,
}

USUAL = {
    **{name: Program(build) for name, build in {**_ON_BOTH, **_ON_CPU}.items()},
    **{f"{name}, for CUDA": Program(build, "cuda") for name, build in _ON_BOTH.items()},
}
