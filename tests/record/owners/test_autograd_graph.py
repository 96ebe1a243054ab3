"""What an autograd graph holds, read without waking anything in it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import pytest_torchmem
from pytest_torchmem.record.holders.search import _held_by
from pytest_torchmem.record.owners.autograd_graph import graph_holdings, nodes_below
from pytest_torchmem.record.owners.places import places_of, tensors_within

pytestmark = pytest.mark.searches(with_optimizers=True)


def held_by(*roots: object) -> tuple[list[int], list[int]]:
    """Pointers of the saved tensors and of the leaves."""
    holdings = graph_holdings(roots)
    return [t.data_ptr() for t in holdings.saved], [t.data_ptr() for t in holdings.leaves]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(8, requires_grad=True)


def test_a_product_saves_what_the_other_side_needs_and_ends_in_its_leaf(x):
    y = torch.ones(8)
    saved, leaves = held_by((x * y).sum())
    assert saved == [y.data_ptr()]
    assert leaves == [x.data_ptr()]


def test_a_list_of_saved_tensors_is_held_whole(x):
    parts = [torch.ones(8) for _ in range(3)]
    # index_put keeps its indices as a list.
    index = torch.arange(8)
    saved, _ = held_by(torch.zeros(8).index_put((index,), x))
    assert index.data_ptr() in saved
    saved, leaves = held_by(torch.stack([x, *parts]).exp())
    assert len(saved) == 1
    assert leaves == [x.data_ptr()]


def test_a_graph_that_backward_has_freed_holds_its_leaves_alone(x):
    loss = (x * torch.ones(8)).sum()
    loss.backward()
    assert held_by(loss) == ([], [x.data_ptr()])


def test_a_graph_shared_by_several_roots_is_walked_once(x):
    shared = x.exp()
    saved, leaves = held_by(shared.sum(), shared.mean())
    assert saved == [shared.data_ptr()]
    assert leaves == [x.data_ptr()]


def test_roots_without_a_graph_hold_nothing(x):
    assert held_by(torch.ones(1), None, "text", x.detach()) == ([], [])


def test_a_view_of_which_torch_refuses_to_say_the_graph_ends_no_recording(x):
    def refused():
        base = x * 2
        view, _ = base.split([1, x.shape[0] - 1])
        base.mul_(2)
        return view

    before = refused()
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        _ = before.grad_fn
    with pytest_torchmem.measure(device="cpu") as measured:
        made = refused()
        (x * x).sum().backward()
    assert measured.result.retained.total >= made.untyped_storage().nbytes()
    assert list(nodes_below([before])) == []
    assert list(_held_by(before)) == [(place, "") for place in places_of(before)]


def test_a_packed_tensor_is_looked_at_and_not_unpacked(x):
    unpacked = []

    def unpack(packed: tuple[torch.Tensor, str]) -> torch.Tensor:
        unpacked.append(packed)
        return packed[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t, "packed"), unpack):
        loss = x.exp().sum()
    saved, _ = held_by(loss)
    assert len(saved) == 1
    assert not unpacked


def test_a_hook_that_keeps_something_else_keeps_no_tensor(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.tolist(), torch.tensor):
        loss = x.exp().sum()
    assert held_by(loss) == ([], [x.data_ptr()])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_is_not_run_again_because_we_look(x, use_reentrant):
    runs = []

    def block(value: torch.Tensor) -> torch.Tensor:
        runs.append(value)
        return value.exp().tanh()

    loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
    _, leaves = held_by(loss)
    assert len(runs) == 1
    assert leaves == [x.data_ptr()]


def test_what_a_custom_function_keeps_on_its_context_counts(x):
    kept = torch.ones(3)

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.extra = {"a": [kept]}
            ctx.save_for_backward(value)
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    saved, _ = held_by(Keeps.apply(x))
    assert sorted(saved) == sorted([kept.data_ptr(), x.data_ptr()])


def test_the_graph_within_a_function_transform_is_read():
    found = []

    def loss(value: torch.Tensor) -> torch.Tensor:
        result = value.exp().sum()
        found.append(graph_holdings([result]))
        return result

    torch.func.grad(loss)(torch.ones(8))
    assert len(found[0].saved) == 1


def test_a_deep_graph_does_not_recurse(x):
    value = x
    for _ in range(5000):
        value = value + 1
    assert held_by(value) == ([], [x.data_ptr()])


def test_tensors_are_found_in_nested_containers():
    a, b, c = (torch.ones(1) for _ in range(3))
    assert [id(t) for t in tensors_within({"k": [a, (b, "text")], "n": {"m": c}})] == [
        id(a),
        id(b),
        id(c),
    ]
    assert list(tensors_within("text")) == []
