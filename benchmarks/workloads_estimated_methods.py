"""Ways to train, to see and to generate, for an estimate, on both devices.

Optimizers with second derivatives, own functions, flows, points, shapes; tricks with memory.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from workloads_estimated import Step, on_both, training

_Tensor = torch.Tensor


def _random(device: str, *sizes: int) -> _Tensor:
    return torch.randn(sizes, device=device)


def _mlp(device: str, *widths: int, between: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    parts: list[nn.Module] = []
    for i, o in itertools.pairwise(widths):
        parts += [nn.Linear(i, o), between()]
    return nn.Sequential(*parts[:-1]).to(device)


# Optimizers.


class _Own(torch.optim.Optimizer):
    """An optimizer whose update is a function of a parameter, its gradient and its state."""

    def __init__(self, parameters: Iterable[_Tensor], update: Callable[..., None]) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group["lr"])


def _lamb(p: _Tensor, grad: _Tensor, state: dict[str, _Tensor], lr: float) -> None:
    if not state:
        state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
    state["mean"].mul_(0.9).add_(grad, alpha=0.1)
    state["square"].mul_(0.999).addcmul_(grad, grad, value=1e-3)
    update = state["mean"] / state["square"].sqrt().add(1e-6) + 0.01 * p
    norms = p.norm(), update.norm()
    ratio = torch.where(norms[1] > 0, norms[0] / norms[1], torch.ones_like(norms[0]))
    p.sub_(update * (ratio * lr))


def _adan(p: _Tensor, grad: _Tensor, state: dict[str, _Tensor], lr: float) -> None:
    if not state:
        state.update(
            {k: torch.zeros_like(p) for k in ("mean", "change", "square")}, before=grad.clone()
        )
    change = grad - state["before"]
    state["mean"].lerp_(grad, 0.02)
    state["change"].lerp_(change, 0.08)
    state["square"].lerp_((grad + 0.92 * change).square(), 0.01)
    state["before"].copy_(grad)
    p.sub_(lr * (state["mean"] + 0.92 * state["change"]) / state["square"].sqrt().add_(1e-8))


def _soap(p: _Tensor, grad: _Tensor, state: dict[str, _Tensor], lr: float) -> None:
    """Adam in the basis of Shampoo's matrices."""
    if p.dim() != 2:
        p.sub_(lr * grad.sign())
        return
    if not state:
        for n, size in enumerate(p.shape):
            state[f"sum{n}"] = torch.zeros(size, size, device=p.device)
            state[f"basis{n}"] = torch.eye(size, device=p.device)
        state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
    turned = state["basis0"].t() @ grad @ state["basis1"]
    state["mean"].lerp_(grad, 0.05)
    state["square"].lerp_(turned.square(), 0.05)
    mean = state["basis0"].t() @ state["mean"] @ state["basis1"]
    update = mean / state["square"].sqrt().add_(1e-8)
    p.sub_(lr * (state["basis0"] @ update @ state["basis1"].t()))
    state["sum0"].lerp_(grad @ grad.t(), 0.05)
    state["sum1"].lerp_(grad.t() @ grad, 0.05)
    for n in (0, 1):
        state[f"basis{n}"] = torch.linalg.qr(state[f"sum{n}"] @ state[f"basis{n}"])[0]


def by_own(device: str, update: Callable[..., None]) -> Step:
    model, x = _mlp(device, 96, 160, 96), _random(device, 64, 96)
    return training(
        device, model, lambda: model(x).square().mean(), optimizer=_Own(model.parameters(), update)
    )


def lamb(device: str) -> Step:
    return by_own(device, _lamb)


def adan(device: str) -> Step:
    return by_own(device, _adan)


def soap(device: str) -> Step:
    return by_own(device, _soap)


def sophia(device: str) -> Step:
    """The Hessian's diagonal by Hutchinson, with products of it and random signs."""
    model, x = _mlp(device, 64, 128, 10), _random(device, 64, 64)
    labels = torch.randint(0, 10, (64,), device=device)
    parameters = [*model.parameters()]
    means, curves = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    def step() -> None:
        loss = functional.cross_entropy(model(x), labels)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in parameters]
        products = torch.autograd.grad(grads, parameters, grad_outputs=signs)
        with torch.no_grad():
            torch._foreach_lerp_(means, [g.detach() for g in grads], 0.1)
            torch._foreach_lerp_(curves, torch._foreach_mul(products, signs), 0.01)
            for p, mean, curve in zip(parameters, means, curves, strict=True):
                p.sub_(1e-3 * (mean / curve.clamp(min=1e-8)).clamp(-1, 1))

    return step


def factored_curvature(device: str) -> Step:
    """K-FAC: hooks take the inputs and gradients of layers, whose matrices precondition."""
    model, x = _mlp(device, 64, 96, 10, between=nn.ReLU), _random(device, 128, 64)
    labels = torch.randint(0, 10, (128,), device=device)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    inputs, outputs = (
        {m: torch.eye(n, device=device) for m, n in zip(layers, sizes, strict=True)}
        for sizes in ((64, 96), (96, 10))
    )

    def before(layer: nn.Module, given: tuple[_Tensor, ...]) -> None:
        inputs[layer].lerp_(given[0].t() @ given[0] / len(given[0]), 0.05)

    def after(layer: nn.Module, _: object, grads: tuple[_Tensor, ...]) -> None:
        outputs[layer].lerp_(grads[0].t() @ grads[0], 0.05)

    for layer in layers:
        layer.register_forward_pre_hook(torch.no_grad()(before))
        layer.register_full_backward_hook(after)

    def step() -> None:
        functional.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            for layer in layers:
                left = torch.linalg.inv(
                    outputs[layer] + 0.1 * torch.eye(len(outputs[layer]), device=device)
                )
                right = torch.linalg.inv(
                    inputs[layer] + 0.1 * torch.eye(len(inputs[layer]), device=device)
                )
                layer.weight.sub_(1e-2 * left @ layer.weight.grad @ right)
        model.zero_grad()

    return step


# Learning.


def reptile(device: str) -> Step:
    """Copies learn tasks with their own optimizers, and the model moves towards them."""
    model = _mlp(device, 16, 64, 64, 1, between=nn.Tanh)
    x, y = _random(device, 3, 32, 16), _random(device, 3, 32, 1)

    def step() -> None:
        moves = [torch.zeros_like(p) for p in model.parameters()]
        for task in range(3):
            learner = copy.deepcopy(model)
            optimizer = torch.optim.SGD(learner.parameters(), 0.02)
            for _ in range(2):
                optimizer.zero_grad()
                functional.mse_loss(learner(x[task]), y[task]).backward()
                optimizer.step()
            for move, new, old in zip(moves, learner.parameters(), model.parameters(), strict=True):
                move.add_(new.detach() - old.detach(), alpha=1 / 3)
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moves, alpha=0.1)

    return step


def tasks_at_once(device: str) -> Step:
    """Inner steps for all tasks at once, by ``vmap`` of ``grad``."""
    model = _mlp(device, 16, 32, 1, between=nn.Tanh)
    x, y = _random(device, 4, 32, 16), _random(device, 4, 32, 1)

    def of(given: dict[str, _Tensor], x: _Tensor, y: _Tensor) -> _Tensor:
        return functional.mse_loss(torch.func.functional_call(model, given, (x,)), y)

    def learned(x: _Tensor, y: _Tensor) -> _Tensor:
        given = dict(model.named_parameters())
        grads = torch.func.grad(of)(given, x[:16], y[:16])
        return of({k: p - 0.1 * grads[k] for k, p in given.items()}, x[16:], y[16:])

    return training(device, model, lambda: torch.func.vmap(learned)(x, y).mean())


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: _Tensor, weight: float) -> _Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: _Tensor) -> Any:
        return -ctx.weight * grad, None


def domains(device: str) -> Step:
    """Features that a judge of domains cannot use, by gradients that are turned round."""
    body, head, judge = _mlp(device, 64, 128, 64), _mlp(device, 64, 10), _mlp(device, 64, 32, 2)
    x, labels = _random(device, 128, 64), torch.randint(0, 10, (64,), device=device)
    domain = torch.arange(128, device=device) // 64

    def loss_of() -> _Tensor:
        h = body(x)
        told = judge(_Reversed.apply(h, 0.3))
        return functional.cross_entropy(head(h[:64]), labels) + functional.cross_entropy(
            told, domain
        )

    return training(device, nn.ModuleList([body, head, judge]), loss_of)


def paired_signs(device: str) -> Step:
    """SigLIP: each pair of picture and text is its own question."""
    image, text = _mlp(device, 128, 96), _mlp(device, 64, 96)
    scale = nn.Parameter(torch.tensor([2.3, -10.0], device=device))
    x, y = _random(device, 192, 128), _random(device, 192, 64)

    def loss_of() -> _Tensor:
        a, b = functional.normalize(image(x), dim=-1), functional.normalize(text(y), dim=-1)
        logits = a @ b.t() * scale[0].exp() + scale[1]
        signs = 2 * torch.eye(192, device=device) - 1
        return -functional.logsigmoid(signs * logits).sum() / 192

    every = [*image.parameters(), *text.parameters(), scale]
    return training(device, image, loss_of, optimizer=torch.optim.AdamW(every))


def margins(device: str) -> Step:
    """ArcFace: angles to classes, with a margin for the right one."""
    body, centers = _mlp(device, 64, 128, 64), nn.Parameter(_random(device, 1000, 64))
    x, labels = _random(device, 96, 64), torch.randint(0, 1000, (96,), device=device)

    def loss_of() -> _Tensor:
        cosines = functional.linear(functional.normalize(body(x)), functional.normalize(centers))
        cosines = cosines.clamp(-1 + 1e-6, 1 - 1e-6)
        right = cosines.gather(1, labels[:, None])
        shifted = torch.cos(torch.acos(right) + 0.5)
        return functional.cross_entropy(64 * cosines.scatter(1, labels[:, None], shifted), labels)

    return training(
        device, body, loss_of, optimizer=torch.optim.SGD([*body.parameters(), centers], 0.1, 0.9)
    )


def whitened(device: str) -> Step:
    """Barlow twins: two views whose features shall be the same, and nothing else."""
    model, x = _mlp(device, 64, 128, 256), _random(device, 128, 64)

    def loss_of() -> _Tensor:
        a, b = (model(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        a, b = ((t - t.mean(0)) / (t.std(0) + 1e-5) for t in (a, b))
        c = a.t() @ b / 128
        off = c.flatten()[:-1].view(255, 257)[:, 1:]
        return (c.diagonal() - 1).square().sum() + 5e-3 * off.square().sum()

    return training(device, model, loss_of)


# Generation.


def coupled(device: str) -> Step:
    """A flow of couplings and of mixing matrices, with their determinants."""
    nets = nn.ModuleList(_mlp(device, 16, 64, 32) for _ in range(3))
    mixes = nn.ParameterList([torch.linalg.qr(torch.randn(32, 32))[0] for _ in range(3)]).to(device)
    x = _random(device, 128, 32)

    def loss_of() -> _Tensor:
        h, logs = x, torch.zeros(128, device=device)
        for net, mix in zip(nets, mixes, strict=True):
            h = h @ mix
            a, b = h.chunk(2, 1)
            scale, shift = net(a).chunk(2, 1)
            h = torch.cat([a, b * torch.tanh(scale).exp() + shift], 1)
            logs = logs + torch.tanh(scale).sum(1) + torch.linalg.slogdet(mix)[1]
        return (0.5 * h.square().sum(1) - logs).mean()

    return training(device, nn.ModuleList([nets, mixes]), loss_of)


def mean_flow(device: str) -> Step:
    """Average speeds, whose target needs a derivative along the way."""
    model, x = _mlp(device, 34, 128, 32), _random(device, 64, 32)

    def speed(z: _Tensor, r: _Tensor, t: _Tensor) -> _Tensor:
        return model(torch.cat([z, r, t], 1))

    def loss_of() -> _Tensor:
        noise, t = torch.randn_like(x), torch.rand(64, 1, device=device)
        r, v = t * torch.rand_like(t), noise - x
        z = (1 - t) * x + t * noise
        along = (v, torch.zeros_like(r), torch.ones_like(t))
        u, change = torch.func.jvp(speed, (z, r, t), along)
        return (u - (v - (t - r) * change).detach()).square().mean()

    return training(device, model, loss_of)


def denoised(device: str) -> Step:
    """DDIM with guidance: each step asks with and without a condition."""
    layers = [
        nn.Conv2d(4, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.Conv2d(32, 4, 3, padding=1),
    ]
    model, labels = nn.Sequential(*layers).to(device), nn.Embedding(11, 4).to(device)
    alphas = torch.linspace(0.99, 0.1, 8, device=device)

    def step() -> _Tensor:
        x = torch.randn(4, 4, 16, 16, device=device)
        kinds = torch.cat([torch.arange(4, device=device), torch.full((4,), 10, device=device)])
        for now, then in zip(alphas.flip(0)[:-1], alphas.flip(0)[1:], strict=True):
            given, free = model(torch.cat([x, x]) + labels(kinds)[:, :, None, None]).chunk(2)
            noise = free + 3.0 * (given - free)
            clean = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
            x = then.sqrt() * clean + (1 - then).sqrt() * noise
        return x

    return step


def two_judges(device: str) -> Step:
    """A GAN in turns: a judge with a penalty at real samples, a maker, and its average."""
    maker, judge = _mlp(device, 16, 128, 64), _mlp(device, 64, 128, 1)
    average = copy.deepcopy(maker).requires_grad_(False)
    of_maker = torch.optim.Adam(maker.parameters(), 1e-4, (0.0, 0.99))
    of_judge = torch.optim.Adam(judge.parameters(), 1e-4, (0.0, 0.99))
    x = _random(device, 96, 64)

    def step() -> None:
        real = x.detach().requires_grad_()
        told, noise = judge(real), torch.randn(96, 16, device=device)
        (slope,) = torch.autograd.grad(told.sum(), real, create_graph=True)
        off = functional.softplus(-told) + functional.softplus(judge(maker(noise).detach()))
        of_judge.zero_grad(set_to_none=True)
        (off.mean() + 5 * slope.square().sum(1).mean()).backward()
        of_judge.step()
        of_maker.zero_grad(set_to_none=True)
        judge.requires_grad_(False)
        functional.softplus(-judge(maker(noise))).mean().backward()
        judge.requires_grad_(True)
        of_maker.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), maker.parameters(), strict=True):
                kept.lerp_(new, 0.01)

    return step


# Space.


def sines(device: str) -> Step:
    """A field of sines that is fitted by its slopes."""
    layers = nn.ModuleList(nn.Linear(i, o) for i, o in ((2, 64), (64, 64), (64, 1))).to(device)
    places, slopes = torch.rand(512, 2, device=device), _random(device, 512, 2)

    def loss_of() -> _Tensor:
        at = places.detach().requires_grad_()
        h = at
        for layer in layers[:-1]:
            h = torch.sin(30 * layer(h))
        (found,) = torch.autograd.grad(layers[-1](h).sum(), at, create_graph=True)
        return (found - slopes).square().mean()

    return training(device, layers, loss_of)


def edges_of_points(device: str) -> Step:
    """DGCNN: edges to the nearest points in features, twice."""
    layers = nn.ModuleList(
        nn.Sequential(nn.Conv2d(2 * i, o, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2))
        for i, o in ((3, 16), (16, 32))
    )
    head = nn.Linear(32, 10)
    model, x = nn.ModuleList([layers, head]).to(device), _random(device, 2, 3, 128)
    labels = torch.randint(0, 10, (2,), device=device)

    def loss_of() -> _Tensor:
        h = x
        for layer in layers:
            rows = h.transpose(1, 2)
            near = torch.cdist(rows.detach(), rows.detach()).topk(8, largest=False).indices
            flat = (near + 128 * torch.arange(2, device=device)[:, None, None]).flatten()
            others = rows.reshape(256, -1)[flat].view(2, 128, 8, -1)
            own = rows[:, :, None].expand_as(others)
            h = layer(torch.cat([others - own, own], 3).permute(0, 3, 1, 2)).amax(-1)
        return functional.cross_entropy(head(h.amax(-1)), labels)

    return training(device, model, loss_of)


def farthest(device: str) -> Step:
    """Points that are far from each other, then the distance between two clouds."""
    model, x = _mlp(device, 3, 64, 3), _random(device, 2, 256, 3)

    def loss_of() -> _Tensor:
        far = torch.full((2, 256), 1e9, device=device)
        last, chosen = torch.zeros(2, dtype=torch.long, device=device), []
        for _ in range(16):
            chosen.append(last)
            middle = x.gather(1, last[:, None, None].expand(-1, 1, 3))
            far = torch.minimum(far, (x - middle).square().sum(-1))
            last = far.argmax(-1)
        few = x.gather(1, torch.stack(chosen, 1)[..., None].expand(-1, -1, 3))
        apart = (model(few)[:, :, None] - x[:, None]).square().sum(-1)
        return apart.amin(1).mean() + apart.amin(2).mean()

    return training(device, model, loss_of)


def fine_rays(device: str) -> Step:
    """Samples along rays, and more of them where the first found something."""
    field, rays = _mlp(device, 39, 64, 4, between=nn.ReLU), _random(device, 64, 6)
    colors = torch.rand(64, 3, device=device)

    def seen(depths: _Tensor) -> tuple[_Tensor, _Tensor]:
        at = rays[:, None, :3] + rays[:, None, 3:] * depths[..., None]
        waves = [f(at * 2.0**n) for n in range(6) for f in (torch.sin, torch.cos)]
        out = field(torch.cat([at, *waves], -1))
        steps = functional.pad(depths.diff(dim=1), (0, 1), value=1e3)
        alpha = 1 - torch.exp(-functional.relu(out[..., 3]) * steps)
        passed = torch.cumprod(functional.pad(1 - alpha + 1e-10, (1, 0), value=1.0), 1)[:, :-1]
        weights = alpha * passed
        return (weights[..., None] * out[..., :3].sigmoid()).sum(1), weights

    def loss_of() -> _Tensor:
        depths = torch.linspace(2, 6, 32, device=device).expand(64, 32)
        first, weights = seen(depths)
        with torch.no_grad():
            sums = functional.normalize(weights + 1e-5, p=1, dim=-1).cumsum(-1)
            wanted = torch.rand(64, 16, device=device)
            places = torch.searchsorted(sums, wanted).clamp(max=31)
            more = torch.cat([depths, depths.gather(1, places)], 1).sort(1).values
        second = seen(more)[0]
        return (first - colors).square().mean() + (second - colors).square().mean()

    return training(device, field, loss_of)


def masks_of_queries(device: str) -> Step:
    """Queries make masks by a product with pixels, which are compared at random points."""
    pixels = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1))
    queries, attend = nn.Embedding(10, 32), nn.MultiheadAttention(32, 4, batch_first=True)
    model, x = nn.ModuleList([pixels, queries, attend]).to(device), _random(device, 2, 3, 32, 32)
    wanted = (torch.rand(2, 10, 16, 16, device=device) > 0.5).float()

    def loss_of() -> _Tensor:
        h = pixels(x)
        q = queries.weight[None].expand(2, -1, -1)
        rows = h.flatten(2).transpose(1, 2)
        q = q + attend(q, rows, rows)[0]
        masks = torch.einsum("bqc,bchw->bqhw", q, h)
        at = 2 * torch.rand(2, 64, 1, 2, device=device) - 1
        found, right = (
            functional.grid_sample(m, at, align_corners=False)[..., 0] for m in (masks, wanted)
        )
        dice = 1 - (2 * (found.sigmoid() * right).sum(-1) + 1) / (
            found.sigmoid().sum(-1) + right.sum(-1) + 1
        )
        return functional.binary_cross_entropy_with_logits(found, right) + dice.mean()

    return training(device, model, loss_of)


def kept_boxes(device: str) -> Step:
    """Boxes are put in order and those that overlap a better one are left out, without values."""
    head, x = nn.Conv2d(16, 5, 1).to(device), _random(device, 1, 16, 12, 12)

    def step() -> _Tensor:
        out = head(x).flatten(2)[0].t()
        scores, order = out[:, 0].sigmoid().sort(descending=True)
        corners = out[order, 1:]
        low, high = corners[:, :2] - corners[:, 2:].exp(), corners[:, :2] + corners[:, 2:].exp()
        common = (torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)).clamp(
            min=0
        )
        area, both = (high - low).prod(1), common.prod(2)
        overlap = both / (area[:, None] + area - both)
        worse = torch.triu(overlap > 0.5, diagonal=1)
        keep = ~worse.any(0)
        return torch.where(keep, scores, 0.0).topk(10).values

    return step


# Tricks.


class _Scaled(torch.Tensor):
    """A tensor that carries a name along."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def carried(device: str) -> Step:
    """A subclass of tensors goes through a model."""
    model, x = _mlp(device, 64, 128, 10), _random(device, 64, 64)

    def loss_of() -> _Tensor:
        return model(x.as_subclass(_Scaled)).square().mean().as_subclass(torch.Tensor)

    return training(device, model, loss_of)


def in_place(device: str) -> Step:
    """Activations, sums and masks that write into what is there, and results by ``out``."""
    layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3)).to(device)
    drop, x = nn.Dropout(0.1, inplace=True), _random(device, 128, 128)
    room = torch.empty(128, 128, device=device)

    def loss_of() -> _Tensor:
        h = x
        for layer in layers:
            h = drop(functional.relu(layer(h), inplace=True).mul(2)).add_(0.1)
        with torch.no_grad():
            torch.mul(h.detach(), 2, out=room)
            room.sub_(room.mean(0)).masked_fill_(room > 1, 1)
        return (h * room).mean()

    return training(device, layers, loss_of)


def windows(device: str) -> Step:
    """Overlapping windows of a signal as a view, and their spectra."""
    model, x = _mlp(device, 65, 32, 1), _random(device, 8, 1024)
    scale = nn.Parameter(torch.ones(1024, device=device))

    def loss_of() -> _Tensor:
        signal = x * scale
        frames = signal.as_strided((8, 29, 128), (1024, 32, 1)) * torch.hann_window(
            128, device=device
        )
        spectra = torch.fft.rfft(frames).abs().clamp(min=1e-5).log()
        moving = signal.unfold(1, 64, 16).mean(-1)
        return model(spectra).square().mean() + moving.square().mean()

    return training(
        device, model, loss_of, optimizer=torch.optim.SGD([*model.parameters(), scale], 0.01)
    )


def nested_checkpoints(device: str) -> Step:
    """Checkpoints in checkpoints, with dropout, recomputed to the end."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128))
        for _ in range(4)
    )
    blocks.to(device)
    x = _random(device, 64, 128)

    def pair(h: _Tensor, begin: int) -> _Tensor:
        for block in blocks[begin : begin + 2]:
            h = h + checkpoint(block, h, use_reentrant=False)
        return h

    def loss_of() -> _Tensor:
        h = x
        with set_checkpoint_early_stop(False):
            for begin in (0, 2):
                h = checkpoint(pair, h, begin, use_reentrant=False)
            return h.square().mean()

    return training(device, blocks, loss_of)


def kept_small(device: str) -> Step:
    """What is saved waits in 8 bits with a scale."""
    model, x = _mlp(device, 128, 256, 256, 128), _random(device, 128, 128)

    def pack(t: _Tensor) -> Any:
        if t.numel() < 1024 or not t.is_floating_point() or isinstance(t, nn.Parameter):
            return t
        scale = t.detach().abs().amax() / 127
        return (t.detach() / scale).round().to(torch.int8), scale

    def unpack(kept: Any) -> _Tensor:
        return kept[0].float() * kept[1] if isinstance(kept, tuple) else kept

    def loss_of() -> _Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return model(x).square().mean()

    return training(device, model, loss_of)


def on_the_host(device: str) -> Step:
    """All that is saved waits on the host."""
    model, x = _mlp(device, 128, 512, 512, 128), _random(device, 256, 128)

    def loss_of() -> _Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(x).square().mean()

    return training(device, model, loss_of)


def phases(device: str) -> Step:
    """Spectra of pictures, by magnitude and phase, with complex weights."""
    weights = nn.Parameter(torch.randn(8, 8, 16, 9, dtype=torch.complex64, device=device) * 0.02)
    x = _random(device, 4, 8, 16, 16)

    def loss_of() -> _Tensor:
        spectrum = torch.fft.rfft2(x, norm="ortho")
        mixed = torch.einsum("bixy,ioxy->boxy", spectrum, weights)
        turned = torch.polar(mixed.abs() + 1e-4, mixed.angle() * 0.9)
        back = torch.fft.irfft2(turned, s=(16, 16), norm="ortho")
        return (back - x).square().mean() + 1e-4 * weights.abs().sum()

    return training(device, nn.ParameterList([weights]), loss_of)


def averaged_weights(device: str) -> Step:
    """Two averages of weights, and BatchNorm's statistics for one of them."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)
    ).to(device)
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    swa = torch.optim.swa_utils.AveragedModel(model)
    x, labels = _random(device, 64, 64), torch.randint(0, 10, (64,), device=device)

    def after(_: _Tensor) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        ema.update_parameters(model)
        swa.update_parameters(model)
        swa.train()
        with torch.no_grad():
            swa(x)

    return training(device, model, lambda: functional.cross_entropy(model(x), labels), after)


def shifted(device: str) -> Step:
    """Spectra that are moved to the middle along each of three axes."""
    weights, x = nn.Parameter(_random(device, 16, 64, 64)), _random(device, 16, 64, 64)
    back = torch.fft.ifftshift
    return training(
        device,
        nn.ParameterList([weights]),
        lambda: (back(torch.fft.fftshift(weights) * x) - x).square().mean(),
    )


def apart(device: str) -> Step:
    """Points that are pushed apart, by sums of differences and by a third norm."""
    points, centres = nn.Parameter(_random(device, 128, 64)), _random(device, 96, 64)

    def loss_of() -> torch.Tensor:
        near = torch.cdist(points, centres, p=1.0).min(dim=1).values
        return near.mean() - functional.pdist(points, 3.0).mean()

    return training(device, nn.ParameterList([points]), loss_of)


def overlapping(device: str) -> Step:
    """Means of windows that overlap, whose gradients are added up."""
    scale, signal = nn.Parameter(_random(device, 4096)), _random(device, 4, 4096)
    return training(
        device,
        nn.ParameterList([scale]),
        lambda: (signal * scale).unfold(1, 64, 16).square().mean(-1).amax(-1).sum(),
    )


def filled_by_masks(device: str) -> Step:
    """Features that take the place of what a triangle leaves out."""
    features = nn.Parameter(_random(device, 256, 256))
    mask = torch.ones(256, 256, dtype=torch.bool, device=device).tril()
    return training(
        device,
        nn.ParameterList([features]),
        lambda: torch.zeros_like(features).masked_scatter(mask, features).square().mean(),
    )


_BUILT = {
    "LAMB": lamb,
    "Adan": adan,
    "SOAP": soap,
    "Sophia": sophia,
    "K-FAC": factored_curvature,
    "Reptile": reptile,
    "tasks by vmap": tasks_at_once,
    "reversed gradients": domains,
    "SigLIP": paired_signs,
    "ArcFace": margins,
    "Barlow twins": whitened,
    "flow of couplings": coupled,
    "mean flow": mean_flow,
    "GAN in turns": two_judges,
    "SIREN, slopes": sines,
    "DGCNN": edges_of_points,
    "farthest points": farthest,
    "rays, fine": fine_rays,
    "masks of queries": masks_of_queries,
    "subclass": carried,
    "written in place": in_place,
    "windows of a signal": windows,
    "nested checkpoints": nested_checkpoints,
    "saved in 8 bits": kept_small,
    "saved on the host": on_the_host,
    "phases": phases,
    "two averages": averaged_weights,
    "shifted spectra": shifted,
    "points apart": apart,
    "windows that overlap": overlapping,
    "filled by masks": filled_by_masks,
}
METHODS = on_both(_BUILT) | on_both(
    {"DDIM, guided": denoised, "kept boxes": kept_boxes}, no_grad=True
)
