"""What torch's compiler makes of a program is the same after an estimate as without one."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from pytest_torchmem import estimate, measure
from pytest_torchmem.values.errors import EstimateError

X = torch.ones(8, 4)


class Counting:
    """A backend that runs graphs as they are, and counts how many it was given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_compiled_function_is_compiled_after_an_estimate(fullgraph, ran_before):
    torch._dynamo.reset()
    backend = Counting()

    @torch.compile(backend=backend, fullgraph=fullgraph)
    def function(x):
        return x.sin() + 1

    if ran_before:
        function(X)
    before = backend.graphs
    with pytest.raises(EstimateError, match="compiles at"):
        estimate(function, X, backward=False)
    assert backend.graphs == before
    function(X.double())
    assert backend.graphs == before + 1


def compiled_function():
    return torch.compile(torch.sin, backend=Counting()), X


def compiled_module():
    return torch.compile(nn.Linear(4, 4), backend=Counting()), X


def module_compiled_in_place():
    model = nn.Linear(4, 4)
    model.compile(backend=Counting())
    return model, X


def part_of_a_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].compile(backend=Counting())
    return model, X


def compiled_update():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    update = torch.compile(optimizer.step, backend=Counting())

    def step():
        model(X).sum().backward()
        update()

    return (step,)


@pytest.mark.parametrize(
    "make",
    [compiled_function, compiled_module, module_compiled_in_place, part_of_a_module],
)
def test_what_is_compiled_is_refused_or_estimated_as_it_is_made_to_run(make):
    with pytest.raises(EstimateError, match=r"torch\.compile compiles"):
        estimate(*make(), backward=False)
    with torch.compiler.set_stance("force_eager"):
        program, *given = make()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = estimate(program, *given, backward=False)
        with measure(device="cpu") as measured:
            program(*given)
    assert result.peak.total == measured.result.peak.total


def test_a_refusal_names_the_line_that_calls_what_is_compiled():
    program = compiled_update()[0]
    line = program.__code__.co_firstlineno + 2
    with pytest.raises(EstimateError, match=rf"compiles at {Path(__file__).name}:{line},"):
        estimate(program, backward=False)


def test_a_program_may_say_itself_that_its_functions_run_as_written():
    program = compiled_update()[0]

    def step():
        with torch.compiler.set_stance("force_eager"):
            program()

    assert estimate(step, backward=False).peak.total > 0
    with pytest.raises(EstimateError, match="compiles at"):
        estimate(lambda: (step(), program()), backward=False)


def test_what_shall_not_be_compiled_is_estimated():
    program = torch.compiler.disable(nn.Linear(4, 4))
    assert estimate(program, X).peak.total > 0


def test_a_module_that_is_compiled_in_a_program_is_compiled_by_the_real_one():
    backend, model = Counting(), nn.Linear(4, 4)

    def program():
        return torch.compile(model, backend=backend)(X).sum()

    with pytest.raises(EstimateError, match="compiles at"):
        estimate(program, backward=False)
    assert backend.graphs == 0
    program()
    assert backend.graphs == 1


def cond():
    return torch.cond(X.sum() > 0, torch.sin, torch.cos, (X,))


def while_loop():
    from torch._higher_order_ops import while_loop

    start = torch.tensor(0), X
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x.sin()), start)[1]


def scan():
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, x: (carry + x, carry * x), torch.zeros(4), X, dim=0)[1]


def flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(1, 1, 128, 16)
    return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("program", [cond, while_loop, scan, flex_attention])
def test_functions_that_operators_call_are_refused_and_run_for_real_afterwards(
    program, gradients, ran_before
):
    torch._dynamo.reset()
    if ran_before:
        program()
    with torch.set_grad_enabled(gradients):
        match = f"{program.__name__}, .*--torchmem-simulate=H100"
        with pytest.raises(EstimateError, match=match):
            estimate(program, backward=False)
        assert program().shape[-1] in (4, 16)


def test_a_program_that_traces_a_graph_is_refused_in_words():
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.Linear(4, 4)
    for program in (
        lambda: make_fx(torch.sin)(X)(X),
        lambda: torch.export.export(model, (X,)).module()(X),
        lambda: torch.func.linearize(torch.sin, X)[1](X),
    ):
        with pytest.raises(EstimateError, match="traces a graph"):
            estimate(program, backward=False)
        program()


def test_what_was_traced_before_is_estimated():
    traced = torch.export.export(nn.Linear(4, 4), (X,)).module()
    with measure(device="cpu") as measured:
        traced(X)
    assert estimate(functools.partial(traced, X), backward=False).peak.total == (
        measured.result.peak.total
    )


def test_an_estimate_in_compiled_code_is_refused():
    # A frame that dynamo leaves alone, with dynamo looking at what it calls.
    @torch.compile(backend=Counting())
    def program():
        return estimate(nn.Linear(4, 4), X)

    with pytest.raises(EstimateError, match="call it outside"):
        program()
