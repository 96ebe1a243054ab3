"""A body does what it does without us: hooks, modes, children; see also ``undisturbed/``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd
from tests.measured import measured
from tests.record.undisturbed.state import seed, state

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


# --- what is left behind ----------------------------------------------------------------------


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
    with pytest.raises(error):
        measured(raising(error))  # the first one imports
    seed()
    before = state()
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with pytest.raises(error):
        raising(error)()
    changed = [key for key, value in state().items() if value != before[key]]
    getattr(measurement, end)()
    seed()
    assert state() == before
    # There was something to restore.
    assert {autograd.ENGINE, "torch.nn.Module.__setstate__"} <= set(changed)


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
