"""Programs whose recording is cut between their statements; see `test_cuts`."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import contextmanager
from functools import cache, reduce
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

KEPT: list[object] = []


class Cell(nn.Module):
    """A module whose operators are Python's own, between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        h = h * self.scale
        h = h + x
        h = torch.tanh(h)
        return h - x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        context.save_for_backward(y)
        return y

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (y,) = context.saved_tensors
        g = gradients[0] * 2
        return g + 0 * y


def operators_between_calls() -> None:
    x = torch.ones(64)
    y = x + 1
    y = y * 2
    for _ in range(4):
        y = y - x
        z = torch.cat([y, y])
        y = z[:64] + x
    KEPT.append(y)


def train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Cell(), nn.ReLU(), Cell())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        KEPT.append(loss.detach())


def recompute() -> None:
    model = Cell()
    x = torch.ones(8, 16, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=False)
    y = Doubled.apply(y)
    y = y + x
    y.sum().backward()
    KEPT.append(x.grad)


def hooks_and_cycles() -> None:
    x = torch.ones(32, requires_grad=True)
    x.register_hook(lambda g: g * 2)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 0, lambda t: t * 1):
        y = x.exp()
    cycle: list[object] = [y * 3]
    cycle.append(cycle)
    y = y + 1
    del cycle
    gc.collect()
    y.sum().backward()


def helper(x: torch.Tensor, depth: int) -> torch.Tensor:
    y = x + depth
    if depth:
        y = helper(y, depth - 1)
    return y * 2


def recursion_and_generators() -> None:
    def pieces(x: torch.Tensor) -> Any:
        for n in range(3):
            y = x + n
            yield y * 2

    x = helper(torch.ones(16), 3)
    for piece in pieces(x):
        x = x + piece
    x = x + torch.cat([p * 2 for p in pieces(x)]).sum()
    KEPT.append([helper(x, n) for n in range(2)])


def transforms() -> None:
    x = torch.ones(4, 4)
    y = torch.func.vmap(lambda row: row * 2 + 1)(x)
    z = torch.func.grad(lambda t: (t * y).sum())(x)
    KEPT.append(z + 1)


def annotated() -> None:
    x = torch.ones(16)
    with torch.profiler.record_function("part"):
        y = x + 1
        y = y * 2
    z = y - x
    with torch.no_grad():
        z = z * z
    KEPT.append(z)


def annotated_for_long() -> None:
    part = torch.profiler.record_function
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    with part("all"):
        for n in range(2):
            with part(f"step {n}"):
                loss = model(torch.ones(4, 16)).sum()
                with part("backward"):
                    loss.backward()
                optimizer.step()
            kept.append(helper(loss.detach(), 1))
        begun = part("begun")
        begun.__enter__()
        kept.append(kept[0] + 1)
    kept.append(kept[1] * 2)
    begun.__exit__(None, None, None)
    KEPT.append([*kept, kept[0] - 1])


def raising() -> None:
    x = torch.ones(16)
    try:
        y = x + 1
        raise ValueError(y)
    except ValueError:
        x = x * 2
    finally:
        x = x - 1


class Lookup(nn.Module):
    """Looks its parameters up in ``__getattr__``, a property, an index and a comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))

    @property
    def doubled(self) -> torch.Tensor:
        y = self.scale + self.scale
        return y * 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.doubled - index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, cell in enumerate(self.cells):
            x = cell(x) * self.scale + self[index]
            x = x - self.doubled * self[1]
        return x @ torch.eye(8) + x


class Scaled:
    """A block: what it makes when it begins and ends is made in functions that Python calls."""

    def __enter__(self) -> torch.Tensor:
        self.x = torch.ones(16) * 2
        return self.x + 1

    def __exit__(self, *_: object) -> None:
        self.x = self.x - 1


@contextmanager
def halved(x: torch.Tensor) -> Any:
    y = x / 2
    yield y - 1
    KEPT.append(y * 2)


def blocks_and_modules() -> None:
    model = Lookup()
    with torch.no_grad():
        y = model(torch.ones(4, 8)) + 1
        y = -y
    with Scaled() as x, halved(x) as half:
        y = x * half
        y += x
    z = y + x if y.sum() > 0 else y - x
    z[2:4] = z[:2] * 2
    KEPT.append([z, model(torch.ones(4, 8)).sum().item()])


def called_by_functions_of_c() -> None:
    x = torch.ones(16)
    total = sum(x * n for n in range(4)) + x
    total = total - x
    total = reduce(lambda a, b: a * b + x, [x, total, x]) - 1
    pieces = [p + 1 for p in map(x.sub, range(3))] + [total * 2]
    pieces.sort(key=lambda p: float((p * 2).sum()))
    largest = max(pieces, key=lambda p: float(p.sum() + 1)) + 1
    doubled = "doubled"
    shapes = {n: (x + n).shape for n in range(2)}
    KEPT.append([largest + len(shapes), getattr(Lookup(), doubled) + x[:8]])


async def waiting(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    await asyncio.sleep(0)
    return y * 2


async def pair(x: torch.Tensor) -> torch.Tensor:
    first = await waiting(x) + x
    async for part in parts(first):
        first = first - part
    both = await asyncio.gather(waiting(x), waiting(first))
    return both[0] + both[1]


async def parts(x: torch.Tensor) -> Any:
    for n in range(2):
        yield x * n
        await asyncio.sleep(0)


def asynchronous() -> None:
    x = torch.ones(16)
    KEPT.append(asyncio.run(pair(x)) + x)
    advance = waiting(x).send
    try:
        while True:
            advance(None)
    except StopIteration as error:
        KEPT.append(error.value + 1)


def loops_and_handlers() -> None:
    x, n = torch.ones(16), 0
    while n < 4:
        n += 1
        try:
            x = x + n
            if n == 2:
                continue
            if n == 4:
                raise ValueError(x * 2)
            x = x - 1
        except ValueError as error:
            x = error.args[0] + x
        else:
            x = x * 2
        finally:
            x = x / 2
    x = torch.where(x > 1, x + 1, torch.stack([x * 2, x])[0]) + (lambda y: y * 3)(x)
    KEPT.append(x)


def within_fast_range(x: torch.Tensor) -> torch.Tensor:
    with _RecordFunctionFast("fast"):
        y = x + 1
        return helper(y, 1)


def opened_by_a_helper() -> Any:
    return torch.ops.profiler._record_function_enter_new("raw", None)


def waiting_within_fast_range(x: torch.Tensor) -> Any:
    with _RecordFunctionFast("waiting"):
        yield x + 1


def ranges_of_other_kinds() -> None:
    x = torch.ones(16)
    opened = opened_by_a_helper()
    waiting = waiting_within_fast_range(x)
    y = next(waiting)
    for _ in range(3):
        x = within_fast_range(x) - y
    torch.ops.profiler._record_function_exit._RecordFunction(opened)
    x = x * 2
    waiting.close()
    KEPT.append(x)


class Numbers(Dataset[tuple[torch.Tensor, int]]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.ones(4) + index
        return x * 2, index


def loaded() -> None:
    total = torch.zeros(4)
    for x, n in DataLoader(Numbers(), batch_size=2):
        total = total + x.sum(0) * n.sum()
    KEPT.append(total - 1)


def forked() -> None:
    x = torch.ones(64, 64)
    waiting = [torch.jit.fork(torch.mm, x, x) for _ in range(3)]
    for part in waiting:
        x = x + torch.jit.wait(part)
    KEPT.append(x * 2)


@cache
def compiled_before() -> Any:
    function = torch.compile(lambda x: torch.tanh(x * 2) + 1, backend="aot_eager")
    function(torch.ones(16, requires_grad=True)).sum().backward()
    return function


def compiled() -> None:
    # There it has no sites, and was compiled for all.
    double = sys.modules[__name__].compiled_before()
    x = torch.ones(16, requires_grad=True)
    for _ in range(3):
        y = double(x) - x
        y.sum().backward()
        x = (x + y).detach().requires_grad_()
    KEPT.append(x)


def called_again() -> None:
    layer, x = nn.Linear(8, 8), torch.ones(2, 8)
    for _ in range(2):
        x = layer(x).detach()
    places = torch.arange(16.0)
    layer(places.view(2, 8)).sum().backward()


def made_anew() -> None:
    for size in (4, 8, 16):
        model = nn.Sequential(nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, size))
        x = model(torch.ones(2, size))
        KEPT.append(x + 1)
        del model


def softened(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y = torch.tanh(y)
    return y + x


def below_functions_of_torch() -> None:
    x = torch.ones(4)
    KEPT.append(torch.autograd.functional.vjp(softened, x, torch.ones(4)))
    model = Cell()
    doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
    KEPT.append(torch.func.functional_call(model, doubled, (torch.ones(8, 16),)))


PROGRAMS = [
    operators_between_calls,
    below_functions_of_torch,
    called_again,
    made_anew,
    hooks_and_cycles,
    recursion_and_generators,
    transforms,
    annotated,
    annotated_for_long,
    raising,
    blocks_and_modules,
    called_by_functions_of_c,
    ranges_of_other_kinds,
]
LONG_PROGRAMS = [train, recompute, compiled, loops_and_handlers, asynchronous, loaded, forked]
