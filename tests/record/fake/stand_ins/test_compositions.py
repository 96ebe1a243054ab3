"""Operators that are made of others in an estimate, however a program came to them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import dropout, group_norm, linear, scaled_dot_product_attention

from pytest_torchmem import estimate, measure
from pytest_torchmem.record.fake.stand_ins import compositions
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.values.errors import EstimateError

HEADS = (2, 4, 64, 32)
LINEAR = "torch.ops.aten.linear.default"


def attention(function):
    return lambda x: function(x, x, x, dropout_p=0.1)


BY_NAME = {
    "attention": (
        attention(scaled_dot_product_attention),
        attention(torch.ops.aten.scaled_dot_product_attention),
    ),
    "dropout": (lambda x: dropout(x, 0.5), lambda x: functional.dropout(x, 0.5)),
    "group_norm": (
        lambda x: group_norm(x.to(memory_format=torch.channels_last), 2),
        lambda x: torch.group_norm(x.to(memory_format=torch.channels_last), 2),
    ),
}


def operators_of(function, **how):
    x = torch.randn(HEADS, requires_grad=True)
    return [node.operator for node in estimate(function, x, **how).run.graph.nodes]


@pytest.mark.parametrize("name", BY_NAME)
def test_cudas_operators_are_used_however_a_function_was_imported(name):
    one, other = (operators_of(function, device="cuda") for function in BY_NAME[name])
    assert one == other
    assert one != operators_of(BY_NAME[name][0], device="cpu")


def test_inference_mode_has_the_operators_of_no_grad():
    x, weight, bias = torch.randn(4, 64, 48), torch.randn(80, 64), torch.randn(80)

    def step():
        return linear(x.transpose(-1, -2), weight, bias).softmax(-1) @ torch.ones(80, 3)

    with torch.no_grad():
        expected = estimate(step, backward=False)
    with torch.inference_mode():
        found = estimate(step, backward=False)
        with measure(device="cpu") as window:
            held = step()
        del held
    assert [n.operator for n in found.run.graph.nodes] == [
        n.operator for n in expected.run.graph.nodes
    ]
    assert abs(found.peak.total - window.result.peak.total) <= 64


def test_nothing_is_left_in_the_dispatcher():
    x = torch.randn(4, 64, 48)
    names = (*fake_tensors.DIFFERENT_ON_CUDA, *fake_tensors.MOVES)
    before = {name: kernels_of(name) for name in names}
    expected = linear(x.mT, torch.ones(80, 64), torch.ones(80))
    estimate(BY_NAME["attention"][0], torch.randn(HEADS, requires_grad=True), device="cuda")
    with pytest.raises(EstimateError):
        estimate(lambda x: x.nonzero(), x, device="cuda")
    assert {name: kernels_of(name) for name in before} == before
    assert torch.equal(linear(x.mT, torch.ones(80, 64), torch.ones(80)), expected)


def kernels_of(name: str) -> str:
    operator = name.removeprefix("torch.ops.aten.").removesuffix(".default")
    return torch._C._dispatch_dump_table(f"aten::{operator}")


def test_other_threads_keep_torchs_own_way():
    found = []

    def from_elsewhere(plain, *args):
        found.append(threading.get_ident())
        return plain(*args)

    def call():
        linear(torch.ones(2, 2), torch.ones(2, 2))

    with Installed() as patches:
        compositions.compose(patches, {LINEAR: from_elsewhere})
        other = threading.Thread(target=call)
        other.start()
        other.join()
        assert not found
        call()
        assert found == [threading.get_ident()]


def test_two_threads_estimate_at_a_time():
    with Installed() as patches:
        compositions.compose(patches, {LINEAR: lambda plain, *args: plain(*args)})
        found = []
        other = threading.Thread(target=lambda: found.append(operators_of(torch.relu)))
        other.start()
        other.join()
        assert found
        assert "Autograd" in kernels_of(LINEAR)


def test_where_calls_go_is_not_kept_beyond_an_estimate():
    model, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(EstimateError, match="traces a graph"):
        estimate(lambda: torch.export.export(model, (x,)).module()(x), backward=False)
    function = torch.compile(lambda: model(x).sum(), backend="aot_eager")
    assert torch.autograd.grad(function(), model.weight)[0].shape == (4, 4)
