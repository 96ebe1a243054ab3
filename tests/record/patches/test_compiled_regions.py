"""Compiled code runs as without a measurement: nothing compiled again, no frame of ours traced."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import pytest_torchmem
from tests.measured import measured

OURS = str(Path(pytest_torchmem.__file__).parent)
Program = Callable[[], Callable[[], torch.Tensor]]

pytestmark = [pytest.mark.slow, pytest.mark.compiles, pytest.mark.filterwarnings("ignore")]


class Encoder(nn.Module):
    """Slices its layers, as every Llama of transformers does: dynamo makes a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.count = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.count]:
            x = layer(x).relu()
        return x


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="aot_eager", **options)


def a_module(**options: Any) -> Program:
    def make() -> Callable[[], torch.Tensor]:
        model, x = compiled(Encoder(), **options), torch.ones(3, 8)

        def run() -> torch.Tensor:
            loss: torch.Tensor = model(x).sum()
            loss.backward()
            return loss

        return run

    return make


def an_optimizer() -> Callable[[], torch.Tensor]:
    model, x = Encoder(), torch.ones(3, 8)
    optimizer = torch.optim.AdamW(model.layers[:2].parameters())
    step = compiled(optimizer.step)

    def run() -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        step()
        optimizer.zero_grad()
        return loss

    return run


def a_step() -> Callable[[], torch.Tensor]:
    model, x = Encoder(), torch.ones(3, 8)
    optimizer = torch.optim.SGD(model.parameters())

    @compiled
    def run() -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def a_function(inner: Callable[[nn.Module, torch.Tensor], Any], **options: Any) -> Program:
    def make() -> Callable[[], torch.Tensor]:
        torch.manual_seed(0)
        model, x = Encoder(), torch.ones(3, 8)
        function = compiled(lambda: inner(model, x), **options)
        run: Callable[[], torch.Tensor] = function
        return run

    return make


def broken(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    torch._dynamo.graph_break()
    return nn.Linear(8, 2)(y)


def annotated(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("here"):
        return model(x)


def transformed(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.func.grad(lambda row: (row * row).sum()))(x)


PROGRAMS: dict[str, Program] = {
    "module": a_module(),
    "fullgraph": a_module(fullgraph=True),
    "dynamic": a_module(dynamic=True),
    "optimizer": an_optimizer,
    "step": a_step,
    "graph break": a_function(broken),
    "annotation": a_function(annotated),
    "transform": a_function(transformed),
    "checkpoint": a_function(lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "gradient": a_function(lambda m, x: torch.autograd.grad(m(x).sum(), m.layers[0].weight)[0]),
    "copy": a_function(lambda m, x: copy.deepcopy(m)(x)),
    "disabled": a_function(lambda m, x: torch.compiler.disable(m.forward)(x) + 1),
}


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The files of the frames that dynamo looks at; everything is compiled anew."""
    files: list[str] = []
    convert_frame = importlib.import_module("torch._dynamo.convert_frame")
    look = convert_frame.CatchErrorsWrapper.__call__

    def noted(self: Any, frame: Any, *rest: Any) -> Any:
        files.append(frame.f_code.co_filename)
        return look(self, frame, *rest)

    torch.compiler.reset()
    monkeypatch.setattr(convert_frame.CatchErrorsWrapper, "__call__", noted)
    yield files
    torch.compiler.reset()


@pytest.mark.nightly("dynamic", "fullgraph", "annotation", "transform", "gradient", "copy")
@pytest.mark.parametrize("name", PROGRAMS)
def test_warm_code_is_not_compiled_again(name: str, traced: list[str]) -> None:
    run = PROGRAMS[name]()
    expected = [run(), run()][-1]
    again = run()
    with torch._dynamo.config.patch(error_on_recompile=True):
        found: list[torch.Tensor] = []
        traced.clear()
        measured(lambda: found.append(run()))
        assert not [
            file for file in traced if not file.startswith(str(Path(torch.__file__).parent))
        ]
        run()
    if torch.equal(expected, again):
        assert torch.equal(found[0], expected)


@pytest.mark.nightly("dynamic", "fullgraph", "annotation", "transform", "gradient", "copy")
@pytest.mark.parametrize("name", PROGRAMS)
def test_code_that_is_first_compiled_while_measured_is_good_afterwards(
    name: str, traced: list[str]
) -> None:
    run = PROGRAMS[name]()
    measured(lambda: (run(), run()))
    assert traced
    assert not [file for file in traced if file.startswith(OURS)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        run()


def test_a_function_that_is_disabled_by_itself_is_not_compiled() -> None:
    """Dynamo looks at the frame around: ours must not be taken for it."""

    @torch.compiler.disable(recursive=False)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.extend(node.name for node in graph.graph.nodes)
        return graph.forward

    seen: list[str] = []
    torch.compiler.reset()
    function = torch.compile(lambda x: doubled(x + 1).sin(), backend=backend)
    measured(lambda: function(torch.ones(2)))
    assert {"add", "sin"} <= set(seen)
    assert "mul" not in seen


def test_dynamo_never_looks_at_what_stays_of_us(traced: list[str]) -> None:
    measured(lambda: torch.ones(2))

    def body(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        exec("1", {})
        return y.sin()

    compiled(body)(torch.ones(2))
    assert traced
    assert not [file for file in traced if file.startswith(OURS)]


def test_a_hook_that_stays_is_what_fails_warm_code(traced: list[str]) -> None:
    """The tests above can fail: any global hook more is a reason to compile again."""
    run = PROGRAMS["module"]()
    run()
    handle = nn_module.register_module_module_registration_hook(lambda *_: None)
    try:
        with (
            torch._dynamo.config.patch(error_on_recompile=True),
            pytest.raises(torch._dynamo.exc.RecompileError),
        ):
            run()
    finally:
        handle.remove()


def test_hooks_are_back_when_a_compilation_has_failed(traced: list[str]) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no backend")

    function = torch.compile(lambda x: x + 1, backend=fail)

    def body() -> None:
        with pytest.raises(Exception, match="no backend"):
            function(torch.ones(2))
        layer = nn.Linear(256, 256, bias=False)
        del layer

    assert measured(body).peak.parameter == 256 * 256 * 4


def test_what_a_compiled_step_makes_is_optimizer_state(traced: list[str]) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    step = compiled(optimizer.step)

    def body() -> None:
        model(torch.ones(1, 64)).sum().backward()
        step()

    result = measured(body)
    assert result.retained.optimizer_state >= 2 * 64 * 64 * 4


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first compiled in the body"])
def test_what_a_fused_kernel_alone_reads_is_in_the_footprint(warm: bool) -> None:
    function = torch.compile(lambda x, scale: (x * scale).relu().sum(-1))
    x, scale = torch.ones(512, 512), torch.ones(512, 512)
    body = torch.no_grad()(lambda: function(x, scale))
    if warm:
        body()
    peak = measured(body).peak
    assert peak.input == 2 * 512 * 512 * 4
    assert peak.total - peak.input < 64 * 1024  # the result, and the compiler's own


def test_a_release_that_sets_the_callback_in_one_way_only_is_measured(monkeypatch):
    """Its module has no name for the setter in C++."""
    monkeypatch.delattr("torch._dynamo.eval_frame.set_eval_frame", raising=False)
    assert measured(lambda: torch.ones(8)).peak.total == 32
