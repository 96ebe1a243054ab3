"""Labels, masks and lengths that were there before decide sizes as they do for real."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_torchmem import estimate, measure
from pytest_torchmem.analysis.estimated.static import largest_possible
from pytest_torchmem.record.fake.known_values import LARGEST_COUNT, NOTE
from pytest_torchmem.values.errors import EstimateError

SCALARS = 512

layer = nn.Linear(64, 20)
x = torch.randn(96, 64)
labels = torch.randint(0, 20, (96,))
chosen = torch.arange(96) % 3 == 0
counts = torch.arange(96) % 4
frames, words = torch.full((6,), 16), torch.full((6,), 5)
targets = torch.randint(1, 20, (6, 5))


def one_hot():
    return (functional.one_hot(labels).float() * layer(x).log_softmax(-1)).sum(-1)


def masked():
    return layer(x[chosen]).square()


def filled_by_mask():
    made = layer(x)
    made[chosen] = x[chosen][:, :20]
    made[chosen] = 0.0
    return made


def of_each_label():
    parts = [layer(x[labels == label]).square().sum() for label in labels.unique()]
    return torch.stack(parts)


def repeated():
    return torch.repeat_interleave(layer(x), counts, 0)


def split():
    rows = layer(x).repeat(2, 1)[: int(counts.sum())]
    return torch.stack([part.square().sum() for part in rows.split([int(c) for c in counts])])


def padded():
    width = int(words.max()) + 3
    return functional.pad(layer(x), (0, width))


def aligned():
    logits = layer(x).view(16, 6, 20).log_softmax(-1)
    return functional.ctc_loss(logits, targets, frames, words)


def aligned_by_lists():
    logits = layer(x).view(16, 6, 20).log_softmax(-1)
    return torch.ctc_loss(logits, targets, [16] * 6, [5] * 6)


@pytest.mark.parametrize(
    "program",
    [
        one_hot,
        masked,
        filled_by_mask,
        of_each_label,
        repeated,
        split,
        padded,
        aligned,
        aligned_by_lists,
    ],
)
def test_the_estimate_is_what_is_measured(program):
    def step():
        layer.zero_grad()
        program().sum().backward()

    step()
    result = estimate(step, backward=False)
    with measure() as window:
        step()
    measured, most = window.result.peak.total, largest_possible(result.run)
    near = abs(result.peak.total - measured) <= SCALARS
    assert near or result.peak.total < measured <= most
    assert NOTE in result.notes


many = torch.arange(60_000) * 7919 % 97


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.repeat_interleave(many),
        many.nonzero,
        many.unique,
        lambda: many.unique(return_inverse=True, return_counts=True),
        lambda: many[many > 50],
    ],
)
def test_what_such_kernels_take_for_themselves_is_counted(program):
    program()
    result = estimate(program, backward=False)
    with measure() as window:
        held = program()
    del held
    measured = window.result.peak.total
    near = abs(result.peak.total - measured) <= SCALARS
    assert near or result.peak.total < measured <= largest_possible(result.run)


flag = torch.tensor(1)


def written_from_what_nobody_knows():
    flag.copy_(x.sum() > 0)
    return x * int(flag)


def written_through_a_view():
    counted = torch.arange(4)
    counted[1:] = labels.float().mul(x[:, 0]).long()[:3]
    return torch.ones(int(counted[0]) + 1)


def written_without_versions():
    with torch.inference_mode():
        return written_through_a_view()


def of_random_numbers():
    return x[torch.randint(0, 2, (96,)).bool()]


def of_too_many():
    return torch.ones(LARGEST_COUNT + 1, dtype=torch.bool).nonzero()


@pytest.mark.parametrize(
    "program",
    [
        written_from_what_nobody_knows,
        written_through_a_view,
        written_without_versions,
        of_random_numbers,
        of_too_many,
    ],
)
def test_what_is_no_longer_known_is_refused(program):
    with pytest.raises(EstimateError, match="needs the value"):
        estimate(program, backward=False)


@pytest.mark.parametrize(
    "write", [lambda: flag.mul_(0), lambda: torch._foreach_mul_([flag], 0)], ids=["one", "several"]
)
def test_writes_of_known_values_are_followed_and_leave_the_real_ones(write):
    def program():
        write()
        return x if flag.item() else x.repeat(50, 1)

    assert estimate(program, backward=False).peak.total >= 50 * x.nbytes
    assert flag == 1


def test_a_given_value_that_the_program_changes_counts_as_changed_in_its_second_step():
    seen = torch.zeros((), dtype=torch.int64)

    def step(given):
        seen.add_(1)
        return layer(given).sum() * int(seen)

    estimate(step, x, optimizer=lambda _: torch.optim.AdamW(layer.parameters()))
    assert seen == 0


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("weights", [(), ("pos_weight",), ("weight", "pos_weight")])
def test_the_gradient_of_a_loss_of_logits_is_computed_in_place(reduction, weights):
    given: dict[str, Any] = {name: torch.rand(64) for name in weights}
    logits = x.repeat(20, 1).requires_grad_()
    wanted = torch.rand(96 * 20, 64)

    def step():
        logits.grad = None
        loss = functional.binary_cross_entropy_with_logits
        loss(logits, wanted, reduction=reduction, **given).neg().sum().backward()

    step()
    estimated = estimate(step, backward=False).peak.total
    with measure() as window:
        step()
    assert abs(estimated - window.result.peak.total) <= SCALARS
