"""Thirty programs as people write them, on a GPU: each makes what it needs and returns its step.

``torchmem simulate --gpu H100 -- python -m tests.simulate.thirty_programs`` prints the peaks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import measure

DEVICE: Final = "cuda"
Step = Callable[[], Any]


def mlp(width: int = 256) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers).to(DEVICE), torch.randn(128, width, device=DEVICE)


def mlp_forward() -> Step:
    model, x = mlp()
    return lambda: model(x)


def training(
    model: nn.Module,
    loss_of: Callable[[], torch.Tensor],
    after: Callable[[torch.Tensor], Any] = lambda _loss: None,
    optimizer: Any = None,
) -> Step:
    """Return a usual training step; ``after`` is called with the loss before the update."""
    used = optimizer or torch.optim.AdamW(model.parameters())

    def step() -> None:
        used.zero_grad()
        loss = loss_of()
        loss.backward()
        after(loss)
        used.step()

    return step


def mlp_training(after: Callable[[Any], Any] = lambda _loss: None) -> Step:
    model, x = mlp()
    return training(model, lambda: model(x).square().mean(), after)


def convolutions() -> Step:
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    return training(model, lambda: model(x).mean())


def encoder(**around: Any) -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)
    x = torch.randn(8, 64, 128, device=DEVICE)

    def loss_of() -> torch.Tensor:
        with torch.autocast("cuda", **around) if around else contextlib.nullcontext():
            return model(x).float().square().mean()

    return training(model, loss_of)


def checkpointed(reentrant: bool) -> Step:
    model, x = mlp()
    x.requires_grad_()
    return training(model, lambda: checkpoint(model, x, use_reentrant=reentrant).square().mean())


def cast_training(dtype: torch.dtype, kind: str = "cuda") -> Step:
    model, x = mlp()

    def loss_of() -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype):
            return functional.mse_loss(model(x).softmax(-1), x)

    return training(model, loss_of)


def cast_inference() -> Step:
    model, x = mlp()

    def step() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            return functional.layer_norm(model(x), (256,))

    return step


def scaled() -> Step:
    model, x = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


def gradients_by_function() -> Step:
    model, x = mlp()
    parameters = dict(model.named_parameters())

    def loss_of(owned: Any) -> torch.Tensor:
        return torch.func.functional_call(model, owned, x).square().mean()

    return lambda: torch.func.grad(loss_of)(parameters)


def gradients_by_sample() -> Step:
    model, x = mlp(32)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(owned: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, owned, row).square().mean()

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
    return lambda: each(parameters, x)


def gradient_penalty() -> Step:
    model, x = mlp()
    x.requires_grad_()

    def loss_of() -> torch.Tensor:
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    return training(model, loss_of)


def enables_gradients() -> Step:
    model, x = mlp()

    def step() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(model(x).sum(), list(model.parameters()))

    return step


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grads[0] + 0 * x


def own_function() -> Step:
    model, x = mlp()
    return training(model, lambda: Doubling.apply(model(x)).square().mean())


def accumulation() -> Step:
    model, x = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            (model(x).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def lbfgs(rows: int = 64, max_iter: int = 3, line_search: str | None = None) -> Step:
    model, x = mlp(rows)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=max_iter, line_search_fn=line_search)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


class Replacing(torch.optim.Optimizer):
    """Makes its state anew in each step, as a first implementation of Adam does."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                old = state.get("m", torch.zeros_like(parameter))
                state["m"] = 0.9 * old + 0.1 * parameter.grad
                del old
                parameter.sub_(0.01 * state["m"])


def replaced_state() -> Step:
    model, x = mlp()
    optimizer = Replacing(model.parameters(), {})
    return training(model, lambda: model(x).square().mean(), optimizer=optimizer)


def averaged() -> Step:
    model, x = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    return training(
        model, lambda: model(x).square().mean(), lambda _: average.update_parameters(model)
    )


def deep_copied() -> Step:
    model, x = mlp()

    def step() -> torch.Tensor:
        best = copy.deepcopy(model)
        return (model(x) + best(x)).square().mean()

    return step


def replaced_data() -> Step:
    model, x = mlp()

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model(x).square().mean()

    return step


@functools.lru_cache(maxsize=4)
def causal_mask(length: int) -> torch.Tensor:
    return torch.ones(length, length, device=DEVICE).tril().bool()


def cached_mask() -> Step:
    model, x = mlp()

    def step() -> torch.Tensor:
        mask = causal_mask(128)
        return model((x @ x.T).masked_fill(~mask, 0.0) @ x).mean()

    return step


def logged() -> Step:
    history: list[float] = []
    return mlp_training(lambda loss: history.append(loss.item()))


def accuracy() -> Step:
    model, x = mlp()
    labels, seen = torch.randint(0, 256, (128,), device=DEVICE), {"right": 0}

    def loss_of() -> torch.Tensor:
        out = model(x)
        seen["right"] += (out.argmax(-1) == labels).sum().item()
        return functional.cross_entropy(out, labels)

    return training(model, loss_of)


def chosen_rows() -> Step:
    model, x = mlp()
    return lambda: model(x[x.sum(1) > 0])


def looked_up() -> Step:
    table, ids = torch.randn(1000, 64, device=DEVICE), torch.randint(0, 1000, (512,), device=DEVICE)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return table[ids] * 2

    return step


def hooked() -> Step:
    model, x = mlp()
    seen: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda _m, _i, out: seen.update(out=out.detach()))
    model[2].register_full_backward_hook(lambda _m, _i, grads: seen.update(grad=grads[0]))
    return training(model, lambda: model(x).square().mean())


def loaded() -> Step:
    model, _ = mlp()
    data = torch.utils.data.TensorDataset(torch.randn(256, 256))

    def loss_of() -> torch.Tensor:
        loader = torch.utils.data.DataLoader(data, batch_size=128)
        return torch.stack([model(x.to(DEVICE)).square().mean() for (x,) in loader]).sum()

    return training(model, loss_of)


def cells() -> Step:
    cell = nn.LSTMCell(64, 128).to(DEVICE)
    x = torch.randn(8, 16, 64, device=DEVICE)

    def loss_of() -> torch.Tensor:
        state = torch.zeros(16, 128, device=DEVICE), torch.zeros(16, 128, device=DEVICE)
        for row in x:
            state = cell(row, state)
        return state[0].mean()

    return training(cell, loss_of)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "MLP, forward": mlp_forward,
    "MLP, AdamW": mlp_training,
    "encoder, AdamW": encoder,
    "encoder, autocast": lambda: encoder(dtype=torch.float16),
    "convolutions and BatchNorm": convolutions,
    "LSTM cell by cell": cells,
    "checkpoint": lambda: checkpointed(reentrant=False),
    "checkpoint, reentrant": lambda: checkpointed(reentrant=True),
    "autocast, bf16": lambda: cast_training(torch.bfloat16),
    "autocast, fp16": lambda: cast_training(torch.float16),
    "autocast, inference": cast_inference,
    "GradScaler": scaled,
    "torch.func.grad": gradients_by_function,
    "vmap of grad": gradients_by_sample,
    "gradient penalty": gradient_penalty,
    "enable_grad": enables_gradients,
    "own autograd.Function": own_function,
    "accumulation and clipping": accumulation,
    "LBFGS": lbfgs,
    "optimizer that replaces its state": replaced_state,
    "averaged weights": averaged,
    "deepcopy of the model": deep_copied,
    "p.data = ...": replaced_data,
    "hooks that keep tensors": hooked,
    "loader": loaded,
    ".item() in a log": logged,
    ".item() of a count": accuracy,
    "x[mask]": chosen_rows,
    "weight[ids] without grad": looked_up,
    # The last: the mask stays when it is over, and torch counts it with whatever comes next.
    "mask in an lru_cache": cached_mask,
}


def peaks() -> dict[str, tuple[int, int]]:
    """The peak of each program's second step, and the most that torch's allocator counted of it."""
    found = {}
    for name, build in PROGRAMS.items():
        torch.manual_seed(0)
        step = build()
        step()
        with measure(device=DEVICE) as block:
            step()
        assert block.result.counters
        found[name] = block.peak.total, block.result.counters.requested
        del step
    return found


if __name__ == "__main__":
    print(json.dumps(peaks(), indent=1))
