"""What an operator makes lies in memory on fake tensors as it does on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from pytest_torchmem import estimate

Tensor = torch.Tensor


def normed(x: Tensor) -> Tensor:
    ones = torch.ones(x.shape[1])
    return functional.batch_norm(x, ones.clone(), ones.clone(), ones, ones, training=True)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_norm": normed,
    "bce": lambda x: functional.binary_cross_entropy(
        x.sigmoid(), torch.ones(x.shape), reduction="none"
    ),
    "elu": functional.elu,
    "glu": lambda x: functional.glu(x, 1),
    "hardsigmoid": functional.hardsigmoid,
    "hardswish": functional.hardswish,
    "hardtanh": functional.hardtanh,
    "huber": lambda x: functional.huber_loss(x, torch.ones(x.shape), reduction="none"),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "log_sigmoid": functional.logsigmoid,
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "mse": lambda x: functional.mse_loss(x, torch.ones(x.shape), reduction="none"),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "roll": lambda x: x.roll(1, 1),
    "smooth_l1": lambda x: functional.smooth_l1_loss(x, torch.ones(x.shape), reduction="none"),
    "softmax": lambda x: functional.softmax(x, -1),
    "softplus": functional.softplus,
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.rand(4, 6, 8).transpose(1, 2),
    "batch second": lambda: torch.rand(6, 4, 8).transpose(0, 1),
    "permuted": lambda: torch.rand(4, 6, 8, 10).permute(0, 2, 3, 1),
    "channels last": lambda: torch.rand(4, 8, 6, 10).to(memory_format=torch.channels_last),
    "rows": lambda: torch.rand(4, 8, 6, 10),
}


def strides(operator: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> list[object]:
    """The strides of what an operator makes, and of its gradient before it is accumulated."""
    y = operator(x)
    (found,) = torch.autograd.grad(y, x, grad)
    return [y.stride(), found.stride()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_made_and_its_gradient_lie_as_on_the_cpu(name: str, layout: str) -> None:
    operator = OPERATORS[name]
    if name in ("reflect", "replicate") and LAYOUTS[layout]().dim() == 3:
        pytest.skip("pads images alone")
    shape = operator(LAYOUTS[layout]()).shape
    turned = torch.ones(shape[::-1]).permute(*reversed(range(len(shape))))
    for grad in (torch.ones(shape), turned, torch.ones(()).expand(shape)):
        x = LAYOUTS[layout]().requires_grad_()
        on_the_cpu = strides(operator, x, grad)

        def program(x: Tensor, grad: Tensor, expected: list[object]) -> Tensor:
            assert strides(operator, x, grad) == expected
            return x * 1

        estimate(program, x, grad, on_the_cpu, backward=False)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "name", ["binary_cross_entropy", "huber_loss", "mse_loss", "smooth_l1_loss"]
)
def test_a_loss_that_is_one_number_is_one_in_an_estimate(name: str, reduction: str) -> None:
    loss, x = getattr(functional, name), torch.rand(4, 6, requires_grad=True)

    def program(x: Tensor) -> None:
        loss(x.sigmoid(), torch.ones(x.shape), reduction=reduction).backward()

    assert estimate(program, x, backward=False).peak.total > 0
