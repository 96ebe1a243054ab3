"""Programs as people write them, for an estimate: each makes what it needs and returns its step."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Step = Callable[[], Any]


@dataclass(frozen=True)
class Program:
    """A step, what `estimate` is given with it, and the device that it is estimated for.

    ``on_meta`` has it estimated with tensors that have no memory.
    """

    build: Callable[[str], Step]
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=lambda: {"backward": False})
    no_grad: bool = False
    on_meta: bool = False


def on_both(
    built: Mapping[str, Callable[[str], Step]], *, no_grad: bool = False
) -> dict[str, Program]:
    """Return a program for the CPU and one for CUDA of each, by name."""
    return {
        name + ending: Program(build, device, no_grad=no_grad)
        for device, ending in (("cpu", ""), ("cuda", ", for CUDA"))
        for name, build in built.items()
    }


def mlp(device: str, width: int = 256) -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
    return nn.Sequential(*layers).to(device), torch.randn(128, width, device=device)


def mlp_forward(device: str) -> Step:
    model, x = mlp(device)
    return lambda: model(x)


def training(
    device: str,
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


def mlp_training(device: str, after: Callable[[Any], Any] = lambda _loss: None) -> Step:
    model, x = mlp(device)
    return training(device, model, lambda: model(x).square().mean(), after)


# Models.


def language_model(kind: str, device: str, **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    import transformers

    sizes = {
        "vocab_size": 1000,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 256,
        **more,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes)
    head = "MaskedLM" if kind == "Bert" else "CausalLM"
    head = "LMHeadModel" if kind == "GPT2" else f"For{head}"
    tokens = torch.randint(0, 1000, (4, 64), device=device)
    model = getattr(transformers, f"{kind}{head}")(config).to(device)
    return model, {"input_ids": tokens, "labels": tokens.clone()}


def language_training(kind: str, device: str, **more: Any) -> Step:
    model, batch = language_model(kind, device, **more)
    return training(device, model, lambda: model(**batch).loss)


def mixtral_cast(device: str) -> Step:
    model, batch = language_model("Mixtral", device, num_local_experts=4, num_key_value_heads=2)
    model.bfloat16()
    return training(device, model, lambda: model(**batch).loss)


def generation(device: str) -> Step:
    model, batch = language_model("Llama", device, pad_token_id=0, eos_token_id=1)
    tokens = batch["input_ids"]
    return lambda: model.generate(tokens, max_new_tokens=4, do_sample=False)


def convolutions(device: str) -> Step:
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers).to(device)
    x = torch.randn(4, 3, 32, 32, device=device)
    return training(device, model, lambda: model(x).mean())


def lstm(device: str) -> Step:
    model = nn.LSTM(64, 128, 2).to(device)
    x = torch.randn(32, 16, 64, device=device)

    def loss_of() -> torch.Tensor:
        return model(x)[0].mean()

    return training(device, model, loss_of)


def encoder(device: str, **around: Any) -> Step:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(device)
    x = torch.randn(8, 64, 128, device=device)

    def loss_of() -> torch.Tensor:
        with torch.autocast("cuda", **around) if around else contextlib.nullcontext():
            return model(x).float().square().mean()

    return training(device, model, loss_of)


def checkpointed(device: str, *, reentrant: bool) -> Step:
    model, x = mlp(device)
    x.requires_grad_()
    return training(
        device, model, lambda: checkpoint(model, x, use_reentrant=reentrant).square().mean()
    )


# Casts.


def cast_training(device: str, dtype: torch.dtype, kind: str = "cuda") -> Step:
    model, x = mlp(device)

    def loss_of() -> torch.Tensor:
        with torch.autocast(kind, dtype=dtype):
            return functional.mse_loss(model(x).softmax(-1), x)

    return training(device, model, loss_of)


def cast_inference(device: str) -> Step:
    model, x = mlp(device)

    def step() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            return functional.layer_norm(model(x), (256,))

    return step


def cast_llama(device: str) -> Step:
    model, batch = language_model("Llama", device)

    def loss_of() -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(**batch).loss

    return training(device, model, loss_of)


def scaled(device: str) -> Step:
    model, x = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step


# Gradients in other ways.


def gradients_by_function(device: str) -> Step:
    model, x = mlp(device)
    parameters = dict(model.named_parameters())

    def loss_of(owned: Any) -> torch.Tensor:
        return torch.func.functional_call(model, owned, x).square().mean()

    return lambda: torch.func.grad(loss_of)(parameters)


def gradients_by_sample(device: str) -> Step:
    model, x = mlp(device, 32)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(owned: Any, row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, owned, row).square().mean()

    each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0))
    return lambda: each(parameters, x)


def gradient_penalty(device: str) -> Step:
    model, x = mlp(device)
    x.requires_grad_()

    def loss_of() -> torch.Tensor:
        out = model(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    return training(device, model, loss_of)


def enables_gradients(device: str) -> Step:
    model, x = mlp(device)

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


def own_function(device: str) -> Step:
    model, x = mlp(device)
    return training(device, model, lambda: Doubling.apply(model(x)).square().mean())


def accumulation(device: str) -> Step:
    model, x = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(3):
            (model(x).square().mean() / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def lbfgs(device: str, rows: int = 64, max_iter: int = 3, line_search: str | None = None) -> Step:
    model, x = mlp(device, rows)
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


def replaced_state(device: str) -> Step:
    model, x = mlp(device)
    optimizer = Replacing(model.parameters(), {})
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


# What a program keeps, copies and replaces.


def averaged(device: str) -> Step:
    model, x = mlp(device)
    average = torch.optim.swa_utils.AveragedModel(model)
    return training(
        device, model, lambda: model(x).square().mean(), lambda _: average.update_parameters(model)
    )


def deep_copied(device: str) -> Step:
    model, x = mlp(device)

    def step() -> torch.Tensor:
        best = copy.deepcopy(model)
        return (model(x) + best(x)).square().mean()

    return step


def replaced_data(device: str) -> Step:
    model, x = mlp(device)

    def step() -> torch.Tensor:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model(x).square().mean()

    return step


@functools.lru_cache(maxsize=4)
def causal_mask(length: int, device: str) -> torch.Tensor:
    return torch.ones(length, length, device=device).tril().bool()


def cached_mask(device: str) -> Step:
    model, x = mlp(device)

    def step() -> torch.Tensor:
        mask = causal_mask(128, device)
        return model((x @ x.T).masked_fill(~mask, 0.0) @ x).mean()

    return step


_TABLES: dict[int, torch.Tensor] = {}


def cached_table(device: str) -> Step:
    model, x = mlp(device)

    def step() -> torch.Tensor:
        _TABLES.clear()
        if 256 not in _TABLES:
            _TABLES[256] = torch.arange(256.0, device=device).sin()
        return model(x + _TABLES[256]).mean()

    return step


def kept_losses(device: str) -> Step:
    model, x = mlp(device)
    losses: list[torch.Tensor] = []
    return training(device, model, lambda: model(x).square().mean(), losses.append)


# Values that are read.


def logged(device: str) -> Step:
    history: list[float] = []
    return mlp_training(device, lambda loss: history.append(loss.item()))


def averaged_log(device: str) -> Step:
    seen = {"total": 0.0, "count": 0}

    def log(loss: torch.Tensor) -> None:
        seen["total"] += loss.item()
        seen["count"] += 1
        f"loss {loss.item():.3f}, average {seen['total'] / seen['count']:.3f}"

    return mlp_training(device, log)


def printed(device: str) -> Step:
    return mlp_training(device, lambda loss: f"{loss:.3f} {loss}")


def accuracy(device: str) -> Step:
    model, x = mlp(device)
    labels, seen = torch.randint(0, 256, (128,), device=device), {"right": 0}

    def loss_of() -> torch.Tensor:
        out = model(x)
        seen["right"] += (out.argmax(-1) == labels).sum().item()
        return functional.cross_entropy(out, labels)

    return training(device, model, loss_of)


def stops_early(device: str) -> Step:
    best = [float("inf")]

    def look(loss: torch.Tensor) -> None:
        if loss.item() < best[0]:
            best[0] = loss.item()

    return mlp_training(device, look)


def to_numpy(device: str) -> Step:
    return mlp_training(device, lambda loss: loss.detach().cpu().numpy())


def chosen_rows(device: str) -> Step:
    model, x = mlp(device)
    return lambda: model(x[x.sum(1) > 0])


def nonzero(device: str) -> Step:
    model, x = mlp(device)
    return lambda: model(x[(x.sum(1) > 0).nonzero().flatten()])


def compared(device: str) -> Step:
    model, x = mlp(device)
    return lambda: model(x) if torch.equal(x, x + 0) else None


def truncated(device: str) -> Step:
    def step() -> torch.Tensor:
        weight = torch.empty(256, 256, device=device)
        nn.init.trunc_normal_(weight)
        return weight @ weight

    return step


def looked_up(device: str) -> Step:
    table, ids = torch.randn(1000, 64, device=device), torch.randint(0, 1000, (512,), device=device)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return table[ids] * 2

    return step


def hooked(device: str) -> Step:
    model, x = mlp(device)
    seen: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda _m, _i, out: seen.update(out=out.detach()))
    model[2].register_full_backward_hook(lambda _m, _i, grads: seen.update(grad=grads[0]))
    return training(device, model, lambda: model(x).square().mean())


def loaded(device: str) -> Step:
    model, _ = mlp(device)
    data = torch.utils.data.TensorDataset(torch.randn(256, 256))

    def loss_of() -> torch.Tensor:
        loader = torch.utils.data.DataLoader(data, batch_size=128)
        return torch.stack([model(x.to(device)).square().mean() for (x,) in loader]).sum()

    return training(device, model, loss_of)


TRAINS: dict[str, Any] = {"backward": True}

PROGRAMS: dict[str, Program] = {
    "MLP, forward": Program(mlp_forward, no_grad=True),
    "MLP, AdamW": Program(mlp_training),
    "MLP, AdamW, for CUDA": Program(mlp_training, "cuda"),
    "encoder, AdamW": Program(encoder),
    "encoder, AdamW, for CUDA": Program(encoder, "cuda"),
    "GPT-2": Program(lambda d: language_training("GPT2", d, n_inner=256)),
    "Llama": Program(lambda d: language_training("Llama", d)),
    "BERT": Program(lambda d: language_training("Bert", d)),
    "Mixtral": Program(
        lambda d: language_training("Mixtral", d, num_local_experts=4, num_key_value_heads=2)
    ),
    "Mixtral, bf16": Program(mixtral_cast),
    "convolutions and BatchNorm": Program(convolutions),
    "LSTM": Program(lstm),
    "checkpoint": Program(functools.partial(checkpointed, reentrant=False)),
    "checkpoint, reentrant": Program(functools.partial(checkpointed, reentrant=True)),
    "autocast('cpu')": Program(lambda d: cast_training(d, torch.bfloat16, "cpu")),
    "autocast('cuda'), bf16": Program(lambda d: cast_training(d, torch.bfloat16), "cuda"),
    "autocast('cuda'), fp16": Program(lambda d: cast_training(d, torch.float16), "cuda"),
    "autocast('cuda'), encoder": Program(lambda d: encoder(d, dtype=torch.float16), "cuda"),
    "autocast('cuda'), Llama": Program(cast_llama, "cuda"),
    "autocast('cuda'), inference": Program(cast_inference, "cuda"),
    "GradScaler": Program(scaled),
    "torch.func.grad": Program(gradients_by_function),
    "torch.func.grad under no_grad, for CUDA": Program(gradients_by_function, "cuda", no_grad=True),
    "vmap of grad": Program(gradients_by_sample),
    "gradient penalty": Program(gradient_penalty),
    "enable_grad under no_grad, for CUDA": Program(enables_gradients, "cuda", no_grad=True),
    "own autograd.Function": Program(own_function),
    "accumulation and clipping": Program(accumulation),
    "LBFGS": Program(lbfgs),
    "optimizer that replaces its state": Program(replaced_state),
    "averaged weights": Program(averaged),
    "deepcopy of the model": Program(deep_copied, options=TRAINS),
    "p.data = ...": Program(replaced_data, options=TRAINS),
    "p.data = ..., on meta": Program(replaced_data, options=TRAINS, on_meta=True),
    "mask in an lru_cache": Program(cached_mask, options=TRAINS),
    "table in a dict of the module": Program(cached_table, options=TRAINS),
    "losses kept with their graphs": Program(kept_losses),
    "hooks that keep tensors": Program(hooked),
    "loader": Program(loaded),
    ".item() in a log": Program(logged),
    ".item() in an average": Program(averaged_log),
    "loss in an f-string": Program(printed),
    ".item() of a count": Program(accuracy),
    "branch on .item()": Program(stops_early),
    ".numpy()": Program(to_numpy),
    "x[mask]": Program(chosen_rows, options=TRAINS),
    "nonzero": Program(nonzero, options=TRAINS),
    "torch.equal": Program(compared, options=TRAINS),
    "trunc_normal_": Program(truncated),
    "weight[ids] without grad, for CUDA": Program(looked_up, "cuda"),
    "generate with a cache": Program(generation, no_grad=True),
}
