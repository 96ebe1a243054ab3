"""A body does what it does without us: results, randomness, hooks, modes, compilation, children."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd, compiler
from tests.measured import measured

pytestmark = [pytest.mark.slow, pytest.mark.compiles]


def both(body: Callable[[], Any]) -> tuple[Any, Any]:
    """What a body returns without a measurement and within one."""
    alone, within = body(), []
    measured(lambda: within.append(body()))
    return alone, within[0]


def hooks_for_saved_tensors() -> object:
    """The innermost pair that is active; None as well on releases that do not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top(True) if top else None


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 16))


# --- results ----------------------------------------------------------------------------------


def one_step(use: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(8, 16, requires_grad=True)
    if use == "checkpoint":
        hidden = checkpoint(model, x, use_reentrant=False)
    elif use == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(x)
    else:
        hidden = model(x)
    hidden.float().square().mean().backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [hidden.detach(), *gradients, *model.state_dict().values(), torch.get_rng_state()]


@pytest.mark.parametrize("use", ["plain", "checkpoint", "autocast"])
def test_results_gradients_and_random_numbers_are_the_same_bits(use: str) -> None:
    alone, within = both(lambda: one_step(use))
    assert len(alone) > 8
    assert all(torch.equal(a, b) for a, b in zip(alone, within, strict=True))


def test_measuring_takes_no_random_number() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measured(lambda: torch.ones(10))
    assert torch.equal(torch.get_rng_state(), before)


# --- hooks and modes --------------------------------------------------------------------------


def test_a_checkpoint_runs_its_function_as_often() -> None:
    def calls() -> int:
        seen = []

        def function(x: torch.Tensor) -> torch.Tensor:
            seen.append(1)
            return x.exp()

        x = torch.ones(8, requires_grad=True)
        checkpoint(function, x, use_reentrant=False).sum().backward()
        return len(seen)

    assert both(calls) == (2, 2)


class Logged(torch.Tensor):
    seen: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        cls.seen.append(str(getattr(func, "__name__", func)))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_with_functions_of_its_own_is_not_asked_behind_its_back() -> None:
    tensor = torch.ones(4).as_subclass(Logged)
    Logged.seen.clear()
    measured(lambda: torch.ones(4))
    assert Logged.seen == []
    tensor.sum()
    assert Logged.seen


def test_no_mode_of_ours_is_active_in_a_body() -> None:
    seen = []

    def body() -> None:
        seen.append(_get_current_dispatch_mode_stack())
        seen.append(torch._C._len_torch_function_stack())  # type: ignore[arg-type]
        seen.append(hooks_for_saved_tensors())  # type: ignore[arg-type]

    measured(body)
    assert seen == [[], 0, None]


# --- compilation ------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("warm", [True, False])
def test_compiled_code_stays_compiled(warm: bool) -> None:
    calls: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Callable[..., object]:
        calls["compiled"] += 1

        def run(*args: Any) -> object:
            calls["run"] += 1
            return graph.forward(*args)

        return run

    function = torch.compile(lambda x: x.exp().sum(), backend=backend)
    if warm:
        function(torch.ones(8))
    measured(lambda: [function(torch.ones(8)) for _ in range(3)])
    function(torch.ones(8))
    assert calls == {"compiled": 1, "run": 5 if warm else 4}
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


# --- processes --------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_works_and_changes_no_number() -> None:
    def body(fork: bool) -> None:
        x = torch.ones(1000)
        if fork:
            if (child := os.fork()) == 0:
                good = False
                try:
                    good = float((x + torch.ones(1000)).sum()) == 2000
                finally:
                    os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
        x.sum()

    assert measured(lambda: body(True)).peak.by_category == (
        measured(lambda: body(False)).peak.by_category
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_calls_and_operators_of_a_forked_child_are_not_recorded() -> None:
    """A data loader's workers would become slower and larger all the time."""

    def body() -> None:
        torch.ones(1000) + 1
        if (child := os.fork()) == 0:
            good = False
            try:
                torch.ones(1000).mul(3)
                now = Recorder.now
                assert now is not None
                names = {now.trace().strings[n] for n in now.trace().events["name"].tolist()}
                good = (
                    sys.getprofile() is None and "aten::add" in names and "aten::mul" not in names
                )
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0

    measured(body)


def total_of(queue: Any, count: int) -> None:
    # Nothing that torch would do on several threads: a forked child has none of them.
    queue.put(float(torch.ones(count).sum()))


# --- what is left behind ----------------------------------------------------------------------


def state() -> dict[str, object]:
    """Everything in Python and torch that a recording might leave changed."""
    module, optimizer = torch.nn.modules.module, sys.modules["torch.optim.optimizer"]
    handler = compiler.callbacks()
    found: dict[str, object] = {
        f"{where.__name__}.{name}": dict(value) if isinstance(value, dict) else value
        for where in (module, optimizer)
        for name, value in vars(where).items()
        if name.startswith("_global_")
    }
    assert len(found) > 8
    found |= {
        "engine": autograd.engine(),
        "set_state": torch.nn.Module.__setstate__,
        "collector": (gc.isenabled(), gc.get_threshold(), tuple(gc.callbacks)),
        "tracers": (sys.getprofile(), sys.gettrace(), threading.getprofile()),
        "imports": tuple(sys.meta_path),
        "compiler": (tuple(handler.start_callbacks), tuple(handler.end_callbacks)),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "anomalies": torch.is_anomaly_enabled(),
        "hooks": hooks_for_saved_tensors(),
        "modes": _get_current_dispatch_mode_stack(),
        "threads": torch.get_num_threads(),
    }
    return found


def raising(error: type[BaseException]) -> Callable[[], None]:
    def body() -> None:
        layer = nn.Linear(4, 4)
        layer.weight.register_hook(lambda gradient: throw())
        layer(torch.ones(4)).sum().backward()

    def throw() -> None:
        raise error

    return body


@pytest.mark.usefixtures("compiler_is_imported")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_an_exception_in_a_body_leaves_nothing_behind(error: type[BaseException], end: str) -> None:
    before = state()
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with pytest.raises(error):
        raising(error)()
    changed = [key for key, value in state().items() if value != before[key]]
    getattr(measurement, end)()
    assert state() == before
    # There was something to restore.
    assert {"engine", "set_state"} <= set(changed)


def test_nothing_of_a_body_stays_alive_when_it_failed() -> None:
    class Noted(nn.Linear):
        def __del__(self) -> None:
            gone.append(True)

    gone: list[bool] = []
    measurement = BodyMeasurement("cpu")
    measurement.start()
    model = Noted(4, 4)
    model(torch.ones(4)).sum().backward()
    measurement.cancel()
    del model
    assert gone
