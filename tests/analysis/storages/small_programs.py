"""Small programs of every kind that people write, for comparing labels.

Each function makes what is there before, and returns the body. Sizes differ by what they stand for:
a batch is 32 x 64 floats, a weight 64 x 64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 32, 64

Body = Callable[[], object]
PROGRAMS: dict[str, Callable[[], Body]] = {}


def program(make: Callable[[], Body]) -> Callable[[], Body]:
    PROGRAMS[make.__name__] = make
    return make


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def batch() -> Tensor:
    return torch.ones(ROWS, WIDTH)


def labels() -> Tensor:
    return torch.zeros(ROWS, dtype=torch.long)


def differentiated(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Body:
    return lambda: loss(model(x)).backward()


def summed(output: Tensor) -> Tensor:
    return output.sum()


def squared(output: Tensor) -> Tensor:
    return output.square().mean()


# --- optimizers -------------------------------------------------------------------------------


def trained(optimizer: Any, steps: int = 1, **options: Any) -> Body:
    model, x = mlp(), batch()
    made = optimizer(model.parameters(), lr=0.1, **{"foreach": False, **options})

    def body() -> None:
        for _ in range(steps):
            made.zero_grad()
            squared(model(x)).backward()
            made.step()

    return body


@program
def sgd() -> Body:
    return trained(torch.optim.SGD)


@program
def sgd_with_momentum() -> Body:
    return trained(torch.optim.SGD, momentum=0.9)


@program
def two_steps_of_sgd() -> Body:
    return trained(torch.optim.SGD, steps=2)


@program
def adamw() -> Body:
    return trained(torch.optim.AdamW)


@program
def adam_over_all_at_once() -> Body:
    return trained(torch.optim.Adam, foreach=True)


@program
def rmsprop() -> Body:
    return trained(torch.optim.RMSprop)


@program
def adagrad() -> Body:
    return trained(torch.optim.Adagrad)


# --- gradients --------------------------------------------------------------------------------


@program
def gradients_zeroed_in_place() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()

    return body


@program
def accumulation() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        for _ in range(3):
            model(x).sum().backward()
        model.zero_grad()

    return body


@program
def clipped_gradients() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)

    return body


@program
def retained_graph() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        loss = squared(model(x))
        loss.backward(retain_graph=True)
        loss.backward()

    return body


@program
def losses_kept_for_one_backward_pass() -> Body:
    model, x = mlp(), batch()
    losses: list[Tensor] = []

    def body() -> None:
        losses.clear()
        losses.extend(squared(model(x)) for _ in range(2))
        (losses[0] + losses[1]).backward()

    return body


@program
def returned_gradients() -> Body:
    model, x = mlp(), batch()
    return lambda: torch.autograd.grad(squared(model(x)), list(model.parameters()))


@program
def gradient_of_a_gradient() -> Body:
    w, x = torch.ones(WIDTH, WIDTH, requires_grad=True), batch()

    def body() -> None:
        (g,) = torch.autograd.grad(torch.tanh(x @ w).sum(), w, create_graph=True)
        g.square().sum().backward()

    return body


@program
def squared_gradients_of_a_model() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(squared(model(x)), parameters, create_graph=True)
        torch.stack([g.square().sum() for g in gradients]).sum().backward()

    return body


def norm_of_the_gradient(critic: nn.Module, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(torch.tanh(critic(x)).sum(), x, create_graph=True)
    return (g.norm(2, dim=1) - 1).square().mean()


@program
def gradient_penalty() -> Body:
    critic, x = nn.Linear(WIDTH, WIDTH), batch().requires_grad_()

    def body() -> None:
        x.grad = None
        norm_of_the_gradient(critic, x).backward()

    return body


@program
def gradient_penalty_at_a_mixture() -> Body:
    generator, critic = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    real, noise = batch(), batch()

    def body() -> None:
        mixed = (0.3 * real + 0.7 * generator(noise).detach()).requires_grad_()
        norm_of_the_gradient(critic, mixed).backward()

    return body


@program
def hook_on_a_gradient() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: gradient * 2)
        model[2](hidden).sum().backward()

    return body


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


@program
def custom_function() -> Body:
    return differentiated(nn.Linear(WIDTH, WIDTH), batch(), lambda out: Cube.apply(out).sum())


# --- layers and losses ------------------------------------------------------------------------


@program
def batch_norm() -> Body:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return differentiated(model, batch(), summed)


@program
def layer_norm_and_gelu() -> Body:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    return differentiated(model, batch(), summed)


@program
def dropout() -> Body:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    return differentiated(model, batch(), summed)


@program
def convolution() -> Body:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    return differentiated(model, torch.ones(2, 3, 16, 16), summed)


@program
def embedding() -> Body:
    model = nn.Sequential(nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH))
    return differentiated(model, labels(), summed)


@program
def attention() -> Body:
    projection, x = nn.Linear(WIDTH, 3 * WIDTH), torch.ones(2, 16, WIDTH)

    def body() -> None:
        query, key, value = projection(x).chunk(3, -1)
        ((query @ key.transpose(1, 2)).softmax(-1) @ value).sum().backward()

    return body


@program
def residual() -> Body:
    layer, x = nn.Linear(WIDTH, WIDTH), batch()

    def body() -> None:
        hidden = layer(x)
        (hidden + torch.tanh(layer(hidden))).sum().backward()

    return body


@program
def one_layer_twice() -> Body:
    layer = nn.Linear(WIDTH, WIDTH)
    return differentiated(layer, batch(), lambda out: layer(torch.tanh(out)).sum())


@program
def frozen_first_layer() -> Body:
    model = mlp()
    model[0].requires_grad_(False)
    return differentiated(model, batch(), squared)


@program
def cross_entropy() -> Body:
    target = labels()
    return differentiated(mlp(), batch(), lambda out: functional.cross_entropy(out, target))


@program
def mean_squared_error() -> Body:
    target = batch()
    return differentiated(mlp(), batch(), lambda out: functional.mse_loss(out, target))


@program
def target_without_gradients() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        with torch.no_grad():
            target = model(x)
        functional.mse_loss(model(x), target).backward()

    return body


@program
def two_losses() -> Body:
    return differentiated(mlp(), batch(), lambda out: out.square().mean() + out.abs().mean())


# --- tensors ----------------------------------------------------------------------------------


@program
def in_place() -> Body:
    return differentiated(nn.Linear(WIDTH, WIDTH), batch(), lambda out: out.mul_(2.0).relu_().sum())


@program
def views() -> Body:
    return differentiated(
        nn.Linear(WIDTH, WIDTH),
        batch(),
        lambda out: out.view(ROWS, 4, 16).transpose(1, 2).contiguous().exp().sum(),
    )


@program
def gathered() -> Body:
    index = torch.zeros(ROWS, 1, dtype=torch.long)
    return differentiated(mlp(), batch(), lambda out: out.gather(1, index).sum())


@program
def indexed() -> Body:
    index = torch.arange(8)
    return differentiated(mlp(), batch(), lambda out: out[index].sum())


@program
def masked() -> Body:
    mask = torch.ones(ROWS, WIDTH, dtype=torch.bool)
    return differentiated(mlp(), batch(), lambda out: out.masked_fill(mask, 0.0).sum())


@program
def chosen_with_where() -> Body:
    return differentiated(mlp(), batch(), lambda out: torch.where(out > 0, out, out * 0.1).sum())


@program
def plain_tensors() -> Body:
    w, x = torch.ones(WIDTH, WIDTH, requires_grad=True), batch()
    return lambda: torch.tanh(x @ w).sum().backward()


@program
def plain_tensors_forward() -> Body:
    w, x = torch.ones(WIDTH, WIDTH), batch()
    return lambda: torch.tanh(x @ w).sum()


# --- the whole body ---------------------------------------------------------------------------


@program
def inference_without_gradients() -> Body:
    model, x = mlp(), batch()

    @torch.no_grad()
    def body() -> None:
        model(x).relu().sum()

    return body


@program
def a_graph_is_left() -> Body:
    model, x = mlp(), batch()
    held: list[Tensor] = []

    def body() -> None:
        held[:] = [model(x).relu()]

    return body


@program
def preprocessing() -> Body:
    model, raw = mlp(), torch.ones(ROWS, WIDTH, dtype=torch.uint8)
    return lambda: model((raw.float() / 255 - 0.5) / 0.25).sum().backward()


@program
def random_input() -> Body:
    model = mlp()
    return lambda: model(torch.rand(ROWS, WIDTH)).sum().backward()


@program
def model_made_in_the_body() -> Body:
    x = batch()
    return lambda: nn.Linear(WIDTH, WIDTH)(x).sum().backward()


@program
def moving_average_of_a_model() -> Body:
    model, average, x = mlp(), mlp(), batch()

    def body() -> None:
        model(x).sum().backward()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(parameter, alpha=0.1)

    return body


@program
def noise_on_gradients() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        model(x).sum().backward()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            if parameter.grad is not None:
                parameter.grad += noise

    return body


@program
def autocast() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = squared(model(x).float())
        loss.backward()

    return body


def checkpointed(use_reentrant: bool) -> Body:
    model, x = mlp(), batch().requires_grad_(use_reentrant)

    def body() -> None:
        x.grad = None
        out = checkpoint(model, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        squared(out).backward()

    return body


@program
def checkpoint_that_is_reentrant() -> Body:
    return checkpointed(True)


@program
def checkpoint_that_is_not_reentrant() -> Body:
    return checkpointed(False)


@program
def per_row_with_vmap() -> Body:
    w, x = torch.ones(WIDTH, WIDTH), batch()
    return lambda: torch.func.vmap(lambda row: torch.tanh(row @ w))(x).sum()


@program
def gradient_function() -> Body:
    w, x = torch.ones(WIDTH, WIDTH), batch()
    return lambda: torch.func.grad(lambda w: torch.tanh(x @ w).sum())(w)


# --- other things that people do to a model's tensors --------------------------------------------


@program
def weights_exchanged_with_an_average() -> Body:
    model, x = mlp(), batch()
    average = [p.detach().clone() for p in model.parameters()]

    def exchange() -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.data, average[i] = average[i], parameter.data

    def body() -> None:
        for _ in range(2):
            model(x).square().mean().backward()
            model.zero_grad()
            exchange()
            with torch.no_grad():
                model(x)
            exchange()

    return body


@program
def weights_exchanged_in_a_model_of_the_body() -> Body:
    def body() -> None:
        model = mlp()
        average = [p.detach().clone() for p in model.parameters()]
        squared(model(batch())).backward()
        for i, parameter in enumerate(model.parameters()):
            parameter.data, average[i] = average[i], parameter.data
        with torch.no_grad():
            model(batch())

    return body


@program
def weights_loaded_from_a_state() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        squared(model(x)).backward()
        model.load_state_dict(state, assign=True)
        squared(model(x)).backward()

    return body


@program
def weights_set_anew() -> Body:
    layers, x = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), batch()
    model = nn.Sequential(*layers)

    def body() -> None:
        squared(model(x)).backward()
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
        squared(model(x)).backward()

    return body


@program
def gradients_exchanged() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        squared(model(x)).backward()
        kept = [p.grad for p in model.parameters()]
        model.zero_grad()
        squared(model(x)).backward()
        for parameter, grad in zip(model.parameters(), kept, strict=True):
            parameter.grad = grad

    return body


@program
def buffer_that_moves() -> Body:
    norm, x = nn.BatchNorm1d(WIDTH), batch()

    def body() -> None:
        norm(x).sum().backward()
        norm.running_mean = torch.zeros(WIDTH) if norm.running_mean is None else +norm.running_mean

    return body


@program
def optimizer_made_in_the_body() -> Body:
    model, x = mlp(), batch()

    def body() -> None:
        made = torch.optim.AdamW(model.parameters(), foreach=False)
        squared(model(x)).backward()
        made.step()

    return body


@program
def recurrent() -> Body:
    cell, x = nn.LSTM(WIDTH, WIDTH), torch.ones(4, ROWS, WIDTH)
    return lambda: cell(x)[0].sum().backward()


@program
def generated_with_a_cache() -> Body:
    layer, x = nn.Linear(WIDTH, WIDTH), batch()

    def body() -> None:
        cache = torch.zeros(0, WIDTH)
        with torch.no_grad():
            for _ in range(4):
                cache = torch.cat([cache, layer(x)])

    return body
