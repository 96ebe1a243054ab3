"""Where bytes come from: operator, module, source line, phase and labels of real programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.analysis.events.op_tree import ModulePaths
from pytest_torchmem.values.contributors import Contributor, Phase
from tests.measured import profile_of

pytestmark = pytest.mark.slow

SIZE = 4096


def made(body: Callable[[], object]) -> tuple[Contributor, ...]:
    """Everything that a body made, whenever it was alive."""
    profile = profile_of(body)
    return profile.attribution.contributors(np.flatnonzero(profile.recording.made).tolist())


def line(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, text in enumerate(lines, 1) if text.endswith(f"  # {comment}"))


def lines_of(found: tuple[Contributor, ...], operator: str) -> list[int]:
    return sorted(c.source.line for c in found if c.operator == operator and c.source)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(SIZE)


# --- lines ------------------------------------------------------------------------------------


def test_a_python_operator_has_its_line(x):
    def body():
        a = x + 1  # plus
        b = a * 2  # times
        return -b  # minus

    found = made(body)
    assert lines_of(found, "aten::add") == [line("plus")]
    assert lines_of(found, "aten::mul") == [line("times")]
    assert lines_of(found, "aten::neg") == [line("minus")]


def test_operators_between_calls_and_in_a_loop_have_their_lines(x):
    def body():
        y = torch.relu(x)
        for _ in range(3):
            y = y + 1  # in the loop
            y = torch.relu(y)
            y = y / 2  # after the call
        return y

    found = made(body)
    assert lines_of(found, "aten::add") == [line("in the loop")]
    assert lines_of(found, "aten::div") == [line("after the call")]
    # Each makes a tensor of the number, too.
    assert [c.count for c in found if c.operator == "aten::add"] == [6]


def test_an_expression_over_several_lines_is_told_apart(x):
    def body():
        return (
            torch.exp(x)  # first part
            + torch.tanh(x)  # second part
        )

    found = made(body)
    assert lines_of(found, "aten::exp") == [line("first part")]
    assert lines_of(found, "aten::tanh") == [line("second part")]


def test_the_line_is_the_users_however_deep_the_library(x):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)

    def body():
        return layer(x.view(8, 64, 8))  # the only line

    for contributor in made(body):
        assert contributor.source is not None
        assert contributor.source.line == line("the only line")
        assert contributor.source.file == __file__


def test_a_gradient_has_the_line_of_what_it_is_the_gradient_of(x):
    x.requires_grad_()

    def body():
        y = x.exp()  # forward
        y.sum().backward()  # backward

    (product,) = [c for c in made(body) if c.operator == "aten::mul"]
    assert product.phase is Phase.BACKWARD
    assert product.source is not None
    assert product.source.line == line("forward")


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        return gradient * value.exp()  # in backward


def test_a_copy_into_a_gradient_has_the_line_of_what_handed_it_on(x):
    weight = torch.ones(4, SIZE, requires_grad=True)

    def body():
        copied = weight.t().contiguous()  # turned round
        (x @ copied).sum().backward()  # line of the pass
        weight.backward(torch.ones(4, SIZE))

    found = made(body)
    assert lines_of(found, "torch::autograd::AccumulateGrad") == [line("turned round")]


def test_what_a_backward_pass_in_python_makes_has_its_line_there(x):
    layer = nn.Linear(SIZE, 8)

    def body():
        Squared.apply(layer.weight).sum().backward()

    (grown,) = [c for c in made(body) if c.operator == "aten::exp"]
    assert grown.phase is Phase.BACKWARD
    assert grown.source is not None
    assert (grown.source.line, grown.source.function) == (line("in backward"), "backward")


def test_the_same_function_from_two_places_is_one_line_each(x):
    def doubled():
        return x + x  # in the function

    def body():
        return doubled(), doubled()

    (both,) = made(body)
    assert (both.count, both.size_bytes) == (2, 2 * SIZE * 4)
    assert both.source is not None
    assert (both.source.line, both.source.function) == (line("in the function"), "doubled")


# --- operators --------------------------------------------------------------------------------


def test_the_operator_is_the_one_with_a_reason_to_allocate(x):
    found = made(lambda: (x.double(), torch.zeros(SIZE), torch.cat([x, x]), torch.empty(SIZE)))
    assert {c.operator for c in found} == {
        "aten::to",
        "aten::zeros",
        "aten::cat",
        "aten::empty",
    }


def test_what_an_optimizer_makes_is_of_its_phase():
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=True)
    layer(torch.ones(1, 64)).sum().backward()
    found = made(optimizer.step)
    assert all(c.phase is Phase.OPTIMIZER for c in found)
    assert "aten::_foreach_sqrt" in {c.operator for c in found}


# --- modules ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.up(value).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:3]:
            value = layer(value)
        return value


def modules(found: tuple[Contributor, ...], operator: str) -> dict[str, int]:
    return {c.module: c.count for c in found if c.operator == operator}


@pytest.fixture
def batch() -> torch.Tensor:
    return torch.ones(512, 8)


def test_repeated_layers_are_one_and_a_slice_of_them_is_no_module(batch):
    net = Net()
    found = made(lambda: net(batch))
    assert modules(found, "aten::linear") == {"Net.layers.*.up": 3}
    assert modules(found, "aten::relu") == {"Net.layers.*": 3}


def test_a_backward_pass_belongs_to_the_module_of_its_forward(batch):
    net = Net()
    found = made(lambda: net(batch).sum().backward())
    assert set(modules(found, "aten::threshold_backward")) == {"Net.layers.*"}
    gradients = {c.module for c in found if c.category.value == "gradient"}
    assert gradients == {"Net.layers.*.up"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_runs_again_is_recomputed_in_its_module(batch, use_reentrant):
    net = Net()
    batch.requires_grad_()
    found = made(lambda: checkpoint(net, batch, use_reentrant=use_reentrant).sum().backward())
    again = {c.module for c in found if (c.operator, c.phase) == ("aten::linear", Phase.RECOMPUTE)}
    assert again == {"Net.layers.*.up"}


def test_a_copy_of_a_model_is_a_model_of_its_own(batch):
    net = Net()

    def body():
        twin = copy.deepcopy(net)
        twin(batch)
        return twin

    found = made(body)
    assert modules(found, "aten::linear") == {"Net.layers.*.up": 3}
    parameters = {c.module for c in found if c.category.value == "parameter"}
    assert parameters == {"Net.layers.*.up.weight", "Net.layers.*.up.bias"}


def test_a_model_in_another_one_is_known_by_the_outer_one(batch):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.inner(value)

    found = made(lambda: Outer()(batch))
    assert modules(found, "aten::linear") == {"Outer.inner.layers.*.up": 3}


def test_a_compiled_wrapper_is_no_part_of_the_path(batch):
    net = Net()
    wrapped = torch.compile(net, disable=True)
    assert modules(made(lambda: wrapped(batch)), "aten::linear") == {"Net.layers.*.up": 3}


def test_code_outside_every_module_has_none(x):
    (found,) = made(x.exp)
    assert found.module == ""


# --- labels -----------------------------------------------------------------------------------


def test_labels_are_the_users_annotations_outermost_first(x):
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

    def body():
        with record_function("step"), record_function("loss"):
            layer(torch.ones(512, 8)).sum().backward()
        optimizer.step()

    found = made(body)
    (product,) = [c for c in found if c.operator == "aten::linear"]
    assert product.labels == ("step", "loss")
    assert {c.labels for c in found if c.phase is Phase.OPTIMIZER} == {()}


def test_inserting_lines_changes_no_identity(tmp_path: Path):
    source = "def body(x):\n    return x.exp() + 1\n"
    identities = []
    for text in (source, f"\n\n# more\n{source}"):
        (tmp_path / "code.py").write_text(text)
        names: dict[str, Callable[[torch.Tensor], object]] = {}
        exec(compile(text, str(tmp_path / "code.py"), "exec"), names)
        ones = torch.ones(8)
        found = made(lambda body=names["body"], ones=ones: body(ones))  # type: ignore[misc]
        identities.append({c.identity for c in found})
    assert identities[0] == identities[1]
    assert {identity[1] for identity in identities[0]} >= {"aten::exp", "aten::add"}


@pytest.mark.parametrize("passes", [2, 8])
def test_what_modules_hold_is_named_once_however_often_it_is_noted(passes, x, monkeypatch):
    """Each backward pass notes all of it again, and a process may have hundreds of models."""
    named, path = [], ModulePaths.path
    model = nn.Linear(SIZE, 2)

    def naming(self: ModulePaths, module: int, rank: float, *since: int) -> str:
        # Modules that other tests left alive are noted, too.
        if module == id(model):
            named.extend(since)
        return path(self, module, rank, *since)

    monkeypatch.setattr(ModulePaths, "path", naming)

    def body() -> None:
        for _ in range(passes):
            model(x).sum().backward()

    made(body)
    # A weight and a bias, and a gradient of each.
    assert len(named) == 4
