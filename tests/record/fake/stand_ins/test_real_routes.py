"""Functions that take another way for fake tensors, estimated beside what they measure."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from pytest_torchmem import estimate, measure

NOTHING = 64  # numbers that C++ wraps in tensors


def measured(step) -> int:
    step()
    with measure(device="cpu") as window:
        held = step()
    del held
    return window.result.peak.total


def estimated(step):
    return estimate(step, backward=False)


@pytest.mark.parametrize("shape", [(4, 64, 48), (2, 3, 64, 48)])
def test_a_bias_is_added_in_place_to_what_is_not_laid_out_as_rows(shape):
    x, weight, bias = torch.randn(shape), torch.randn(80, 64), torch.randn(80)

    def step():
        return functional.linear(x.transpose(-1, -2), weight, bias)

    with torch.no_grad():
        assert abs(estimated(step).peak.total - measured(step)) <= NOTHING


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_mask_is_added_in_place_to_the_scores_of_attention(wrapped):
    query, mask = torch.randn(2, 4, 64, 8, requires_grad=True), torch.randn(4, 64, 64)
    attend = functional.scaled_dot_product_attention

    def step():
        if wrapped:  # a transform's tensors are added to none
            return torch.func.vmap(lambda q: attend(q, q, q, attn_mask=mask))(query)
        return attend(query, query, query, attn_mask=mask)

    step()
    with measure(device="cpu") as window:
        step().sum().backward()
    found = estimate(step).peak
    assert abs(found.temporary - window.result.peak.temporary) <= NOTHING


def test_whoever_reads_a_mask_as_transformers_does_reads_it_in_an_estimate(monkeypatch):
    library: Any = ModuleType("transformers.utils.import_utils")
    library.is_fake_tensor = lambda tensor: isinstance(tensor, torch._subclasses.FakeTensor)
    for name in ("transformers", "transformers.utils", library.__name__):
        monkeypatch.setitem(sys.modules, name, library)
    library.utils = library.import_utils = library
    x, mask = torch.randn(2, 64, 64), torch.ones(2, 64, 64, dtype=torch.bool)

    def step():
        masks = library.is_fake_tensor(mask) or not bool((mask == 1).all())
        return x[:, None].expand(2, 8, 64, 64).clone() if masks else x + 1

    before = library.is_fake_tensor
    assert abs(estimated(step).peak.total - measured(step)) <= NOTHING
    assert library.is_fake_tensor is before


@pytest.mark.parametrize("function", ["svdvals", "eigvalsh"])
def test_vectors_are_computed_for_a_gradient_alone(function):
    x = torch.eye(64)

    def step():
        return getattr(torch.linalg, function)(x)

    with torch.no_grad():
        result = estimated(step)
        assert result.peak.total <= measured(step) <= result.at_most


@pytest.mark.parametrize("zeros", [0, 1, 64])
@pytest.mark.parametrize("dims", [(), (0,)])
def test_the_gradient_of_a_product_is_an_interval_as_zeros_decide(dims, zeros):
    x = torch.rand(64, 64) + 1
    x[:zeros, 0] = 0
    x.requires_grad_()

    def step():
        x.grad = None
        x.prod(*dims).sum().backward()

    result = estimated(step)
    assert result.peak.total <= measured(step) <= result.at_most


@pytest.mark.parametrize("zeros", [0, 1, 64])
def test_the_gradient_of_a_running_product_is_an_interval_as_zeros_decide(zeros):
    x = torch.rand(64, 64) + 1
    x[:zeros, 0] = 0
    x.requires_grad_()

    def step():
        x.grad = None
        x.cumprod(0).sum().backward()

    result = estimated(step)
    assert result.peak.total <= measured(step) <= result.at_most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("of_all", [torch.max, torch.min, torch.median, torch.nanmedian])
def test_the_gradient_of_one_value_of_all_is_filled_in_where_it_is(of_all, dtype):
    x = torch.randn(300, 40).to(dtype).requires_grad_()

    def step():
        x.grad = None
        of_all(x).backward()

    assert abs(estimated(step).peak.total - measured(step)) <= 64


def test_the_gradient_of_what_is_taken_is_put_into_zeros():
    x, places = torch.randn(64, 64, requires_grad=True), torch.arange(100)

    def step():
        x.grad = None
        x.take(places).sum().backward()

    assert abs(estimated(step).peak.total - measured(step)) <= 64
