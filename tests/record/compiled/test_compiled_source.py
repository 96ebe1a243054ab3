"""Compiled code in a recording: its allocations belong to the model's own lines."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.profiled.from_profiler import trace_of
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import compiler
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.contributors import Contributor, Phase
from tests.measured import profile_of

pytestmark = [pytest.mark.slow, pytest.mark.compiles]

# The second is a debugging backend: it runs a graph's Python code.
BACKENDS = ["eager", "aot_eager", "inductor"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)  # up
        h = nn.functional.gelu(h)  # gelu
        return self.down(h)  # down


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * 3).exp().sum()  # loss


def line(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(n for n, text in enumerate(lines, 1) if text.endswith(f"  # {comment}"))


@pytest.fixture(autouse=True, scope="module")
def _compiled_afresh() -> Iterator[None]:
    """Code from the compiler's cache on disk comes without the graph that it was made from."""
    config = importlib.import_module("torch._inductor.config")
    with config.patch(force_disable_caches=True):
        yield


def made(profile: MemoryProfile) -> tuple[Contributor, ...]:
    """Everything that the body made, whenever it was alive."""
    return profile.attribution.contributors(np.flatnonzero(profile.recording.made).tolist())


def step(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    model(x).backward()


@cache
def compiled_before(backend: str) -> tuple[Contributor, ...]:
    """What a training step makes, compiled before the recording."""
    torch.compiler.reset()
    model = torch.compile(Net(), backend=backend)
    x = torch.ones(32, 16)
    step(model, x)
    return made(profile_of(lambda: step(model, x)))


def one(found: tuple[Contributor, ...], operator: str, module: str, phase: Phase) -> Contributor:
    (only,) = [
        c for c in found if (c.operator, c.module, c.phase) == (operator, module, phase)
    ] or [None]  # type: ignore[list-item]
    assert only is not None, [(c.operator, c.module, c.phase.value) for c in found]
    return only


@pytest.mark.nightly("inductor")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_allocation_names_operator_module_and_line(backend: str) -> None:
    found = compiled_before(backend)
    operator = "aten::linear" if backend == "eager" else "aten::addmm"  # what the line stands for
    product = one(found, operator, "Net.blocks.*.up", Phase.FORWARD)
    assert str(product.source) == f"test_compiled_source.py:{line('up')}"
    assert product.size_bytes == 2 * 32 * 64 * 4
    gelu = one(found, "aten::gelu", "Net.blocks.*", Phase.FORWARD)
    assert str(gelu.source) == f"test_compiled_source.py:{line('gelu')}"
    assert gelu.size_bytes == 2 * 32 * 64 * 4


@pytest.mark.nightly("inductor")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_allocation_names_the_line_it_is_the_gradient_of(backend: str) -> None:
    found = [
        c
        for c in compiled_before(backend)
        if (c.operator, c.module, c.phase) == ("aten::mm", "Net.blocks.*.down", Phase.BACKWARD)
    ]
    assert {str(c.source) for c in found} == {f"test_compiled_source.py:{line('down')}"}
    # The gradients of the weights of both blocks, and of the input of at least one.
    assert sum(c.size_bytes for c in found) >= (2 * 64 * 16 + 32 * 64) * 4


@pytest.mark.nightly("compiled_again")
@pytest.mark.parametrize("again", [True, False], ids=["compiled_again", "same_code"])
def test_a_model_that_is_gone_is_not_mistaken_for_the_living_one(again: bool) -> None:
    torch.compiler.reset()
    with gc_paused():
        for _ in range(2):
            if again:
                torch.compiler.reset()
            model = torch.compile(Net(), backend="inductor")
            x = torch.ones(32, 16)
            step(model, x)
        found = made(profile_of(partial(step, model, x)))
    assert one(found, "aten::addmm", "Net.blocks.*.up", Phase.FORWARD).count == 2


def test_a_fused_kernel_names_all_that_it_computes() -> None:
    fused = one(compiled_before("inductor"), "aten::exp+mul+sum", "Net", Phase.FORWARD)
    assert str(fused.source) == f"test_compiled_source.py:{line('loss')}"


@pytest.mark.nightly("inductor")
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_blamed_on_the_compiler(backend: str) -> None:
    for contributor in compiled_before(backend):
        words = (contributor.operator, contributor.module, *contributor.labels)
        for own in ("Compiled", "GraphModule", "Optimized", "_orig_mod"):
            assert not any(own in word for word in words), contributor


def test_a_model_compiled_and_dropped_in_the_body_is_known() -> None:
    torch.compiler.reset()
    x = torch.ones(32, 16)

    def body() -> None:
        step(torch.compile(Net(), backend="aot_eager"), x)

    profile = profile_of(body)
    product = one(made(profile), "aten::addmm", "Net.blocks.*.up", Phase.FORWARD)
    assert str(product.source) == f"test_compiled_source.py:{line('up')}"


def test_few_of_the_compilers_own_calls_are_recorded() -> None:
    torch.compiler.reset()
    trace = profile_of(lambda: torch.compile(Net(), backend="eager")(torch.ones(32, 16))).tree.trace
    assert any(text.startswith("<eval_with_key>") for text in trace.strings)
    # Those that led to an operator alone: it makes millions.
    assert len(trace.events) < 20_000


def test_lines_are_right_in_and_after_a_backward_pass_that_compiles() -> None:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="aot_eager")
    x = torch.ones(32, 16)

    def body() -> None:
        # Directly, so that a call too many of the tracer's would hold what follows.
        model(x).backward()
        torch.ones(1000)  # after

    found = made(profile_of(body))
    (after,) = [c for c in found if c.operator == "aten::ones"]
    assert after.source is not None
    assert str(after.source) == f"test_compiled_source.py:{line('after')}"
    assert after.source.function == "body"
    sums = [c for c in found if (c.operator, c.phase) == ("aten::sum", Phase.BACKWARD)]
    assert {str(c.source) for c in sums} == {
        f"test_compiled_source.py:{line(layer)}" for layer in ("up", "down")
    }


def test_a_saved_trace_needs_no_compiler_to_be_explained(tmp_path: Path) -> None:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="aot_eager")
    profile = profile_of(lambda: model(torch.ones(32, 16)))
    profile.tree.trace.save(tmp_path / "trace.npz")
    assert made(analyze_trace(load_trace(tmp_path / "trace.npz"))) == made(profile)
    assert len(profile.tree.trace.compiled_lines)


def test_a_finished_profile_of_somebody_else_is_explained_as_well() -> None:
    torch.compiler.reset()
    model = torch.compile(Net(), backend="aot_eager")
    x = torch.ones(32, 16)
    model(x)
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as done:
        model(x)
    found = made(analyze_trace(trace_of(done)))
    product = next(c for c in found if c.operator == "aten::addmm" and c.size_bytes == 2 * 8192)
    assert str(product.source) == f"test_compiled_source.py:{line('up')}"


def test_the_compilers_callbacks_are_as_they_were() -> None:
    callbacks = compiler.callbacks()
    before = [*callbacks.start_callbacks], [*callbacks.end_callbacks]
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    assert (callbacks.start_callbacks, callbacks.end_callbacks) != before
    recorder.stop()
    assert (callbacks.start_callbacks, callbacks.end_callbacks) == before


def test_uncompiled_code_is_not_looked_at_twice() -> None:
    net = Net()
    profile = profile_of(lambda: step(net, torch.ones(32, 16)))
    assert len(profile.tree.trace.compiled_lines) == 0
    assert one(made(profile), "aten::linear", "Net.blocks.*.up", Phase.FORWARD)
