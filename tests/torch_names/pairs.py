"""Twenty programs whose forward and backward graphs torch's partitioners make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812 - the name everybody knows

from tests.fx_graphs import partition_by, say_device

Program = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]


def _two_uses(x, w):
    y = x @ w
    return y.relu() + y.sigmoid() * y


def _attention(q, k, v):
    return F.softmax(q @ k.transpose(-1, -2) / 4, dim=-1) @ v


def _gated(x, up, gate, down):
    return (F.silu(x @ gate) * (x @ up)) @ down


def _convolutions(x, first, second):
    return F.conv2d(F.relu(F.conv2d(x, first, padding=1)), second, stride=2)


def _pooled(x, weight):
    return F.max_pool2d(F.conv2d(x, weight), 2).flatten(1)


def _normed(x, w, scale, shift):
    return F.layer_norm(x @ w, (32,), scale, shift) @ w.t()


def _losses(x, w):
    scores = x @ w
    return scores.logsumexp(-1).mean() - scores.diagonal().mean()


def _in_place(x, w):
    y = x @ w
    y.mul_(2)
    return y.exp_()


def _views(x, w):
    left, right = (x @ w).view(4, 4, 32).split(16, dim=-1)
    return left * right.transpose(0, 1)


def _two_outputs(x, w):
    y = torch.tanh(x @ w)
    return y, y.sum(dim=0)


def _recurrent(x, w, u):
    state = torch.zeros_like(x[0])
    for row in x:
        state = torch.tanh(row @ w + state @ u)
    return state


def _rotary(x, cosine, sine):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


SQUARE: Final = ((16, 32), (32, 32))
PROGRAMS: Final[dict[str, Program]] = {
    "product": (lambda x, w: x @ w, SQUARE),
    "chain": (lambda x, w: x @ w @ w @ w, SQUARE),
    "mlp": (lambda x, w, v: F.relu(x @ w) @ v, ((16, 32), (32, 64), (64, 8))),
    "gelu": (lambda x, w, v: F.gelu(x @ w) @ v, ((16, 32), (32, 64), (64, 8))),
    "residual": (lambda x, w: x + F.relu((x + x @ w) @ w), SQUARE),
    "two_uses": (_two_uses, SQUARE),
    "attention": (_attention, ((2, 8, 16), (2, 8, 16), (2, 8, 16))),
    "gated": (_gated, ((16, 32), (32, 64), (32, 64), (64, 32))),
    "convolutions": (_convolutions, ((2, 3, 12, 12), (8, 3, 3, 3), (4, 8, 3, 3))),
    "pooled": (_pooled, ((2, 3, 12, 12), (8, 3, 3, 3))),
    "normed": (_normed, ((16, 32), (32, 32), (32,), (32,))),
    "losses": (_losses, SQUARE),
    "in_place": (_in_place, SQUARE),
    "views": (_views, SQUARE),
    "two_outputs": (_two_outputs, SQUARE),
    "recurrent": (_recurrent, ((5, 4, 8), (8, 8), (8, 8))),
    "rotary": (_rotary, ((4, 16), (4, 8), (4, 8))),
    "embedding": (lambda table, w: F.embedding(torch.arange(6), table) @ w, ((20, 32), (32, 8))),
    "broadcast": (lambda x, b: (x * b + b).exp().sum(0), ((16, 32), (32,))),
    "reduced": (lambda x, w: F.normalize(x @ w, dim=-1).std(), SQUARE),
}


def pair_of(
    name: str, partition: str, device: str = "cuda:0"
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and backward graph of a program, said to be on a device once it is traced."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func

    program, shapes = PROGRAMS[name]
    graphs: list[torch.fx.GraphModule] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: object) -> Any:
        graphs.append(gm)
        return make_boxed_func(gm.forward)

    with FakeTensorMode():
        inputs = [torch.empty(shape, requires_grad=True) for shape in shapes]
        compiled = aot_function(
            program, fw_compiler=keep, bw_compiler=keep, partition_fn=partition_by(partition)
        )
        made = compiled(*inputs)
        sum(out.sum() for out in (made if isinstance(made, tuple | list) else (made,))).backward()
    for module in graphs:
        say_device(module, device)
    forward, backward = graphs
    return forward, backward
