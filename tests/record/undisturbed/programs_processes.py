"""Programs that start others, listen to Python's tools, and hold odd objects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

import torch
from torch import nn

from tests.record.undisturbed.state import prepared, program


def step():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# --- tasks and processes ----------------------------------------------------------------------


@program
def closes_a_generator_of_tasks():
    closed = []

    async def batches():
        try:
            for _ in range(5):
                await asyncio.sleep(0)
                yield step()[0]
        finally:
            closed.append(step()[0])

    async def main():
        found = []
        async with contextlib.aclosing(batches()) as waiting:
            async for batch in waiting:
                found.append(batch)
                if len(found) == 2:
                    break
        return found, await asyncio.to_thread(lambda: len(step()))

    return asyncio.run(main(), debug=True), closed


# --- objects ----------------------------------------------------------------------------------


class Unfriendly(nn.Module):
    """Raises whatever it is asked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __eq__(self, other):
        raise RuntimeError("==")

    __hash__ = object.__hash__

    def __bool__(self):
        raise RuntimeError("bool")

    def __len__(self):
        raise RuntimeError("len")

    def __repr__(self):
        raise RuntimeError("repr")

    def forward(self, x):
        return self.layer(x)


@prepared
def calls_modules_that_answer_nothing():
    there = Unfriendly()

    def run():
        made = Unfriendly()
        there(made(torch.ones(1, 2))).sum().backward()
        return made.layer.weight.grad, there.layer.weight.grad

    return run


class UnreadableState(dict):
    def __iter__(self):
        raise RuntimeError("iter")

    def items(self):
        raise RuntimeError("items")

    def values(self):
        raise RuntimeError("values")


@program
def keeps_a_state_that_cannot_be_read():
    leaf = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], 0.1, momentum=0.9)
    (leaf * 2).sum().backward()
    optimizer.step()
    optimizer.state = UnreadableState(optimizer.state)  # type: ignore[assignment]
    return leaf.detach()


# --- torch's own tools ------------------------------------------------------------------------

_numbers = itertools.count()


@program
def defines_an_operator_with_a_gradient():
    name = f"undisturbed_{next(_numbers)}::twice"

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    operator = torch.library.custom_op(name, twice, mutates_args=())
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda _, gradient: gradient * 2)
    x = torch.ones(3, requires_grad=True)
    operator(x).sum().backward()
    torch.library.opcheck(operator, (torch.ones(3, requires_grad=True),))
    return x.grad
