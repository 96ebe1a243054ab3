"""Whatever a program under an estimate sets for a process, or counts, is as it was afterwards."""

from __future__ import annotations

import collections
import contextlib
import gc
import os
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.backends.opt_einsum  # torch 2.6 does not import it by itself
from torch import nn
from torch.nn.modules import module as hooks
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pytest_torchmem import estimate
from pytest_torchmem.values.errors import EstimateError

X = torch.ones(8, 16)


@pytest.fixture(scope="module", autouse=True)
def _torch_has_imported_what_an_estimate_needs():
    estimate(lambda: X * 2, backward=False)


def setting(owner: object, name: str, value: object) -> tuple[Callable, Callable]:
    return lambda: setattr(owner, name, value), lambda: getattr(owner, name)


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise NotImplementedError


BACKENDS = torch.backends
# What a program does, and where it can be seen.
CHANGES: dict[str, tuple[Callable[[], object], Callable[[], Any]]] = {
    "cudnn.benchmark": setting(BACKENDS.cudnn, "benchmark", True),
    "cudnn.deterministic": setting(BACKENDS.cudnn, "deterministic", True),
    "cudnn.enabled": setting(BACKENDS.cudnn, "enabled", False),
    "cudnn.allow_tf32": setting(BACKENDS.cudnn, "allow_tf32", False),
    "matmul.allow_tf32": setting(BACKENDS.cuda.matmul, "allow_tf32", True),
    "mkldnn.deterministic": setting(BACKENDS.mkldnn, "deterministic", True),
    "opt_einsum": setting(BACKENDS.opt_einsum, "enabled", False),
    "filled": setting(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "warns always": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "casts' cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
    ),
    "casts entered": (
        lambda: torch.autocast("cpu").__enter__(),
        lambda: (torch.is_autocast_enabled("cpu"), torch.autocast_decrement_nesting()),
    ),
    "flash": (
        lambda: BACKENDS.cuda.enable_flash_sdp(False),
        BACKENDS.cuda.flash_sdp_enabled,
    ),
    "math": (lambda: BACKENDS.cuda.enable_math_sdp(False), BACKENDS.cuda.math_sdp_enabled),
    "fast paths": (
        lambda: BACKENDS.mha.set_fastpath_enabled(False),
        BACKENDS.mha.get_fastpath_enabled,
    ),
    "one thread": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
    ),
    "checks": (
        lambda: torch.distributions.Distribution.set_default_validate_args(False),
        lambda: torch.distributions.Distribution._validate_args,
    ),
    "hooks of modules": (
        lambda: hooks.register_module_forward_hook(lambda *_: None),
        lambda: len(hooks._global_forward_hooks),
    ),
    "hooks of optimizers": (
        lambda: optimizer.register_optimizer_step_post_hook(lambda *_: None),
        lambda: len(optimizer._global_optimizer_post_hooks),
    ),
    "function mode": (
        lambda: Function().__enter__(),
        torch._C._len_torch_function_stack,
    ),
    "dispatch mode": (
        lambda: Dispatch().__enter__(),
        torch._C._len_torch_dispatch_stack,
    ),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "default type": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "environment": (
        lambda: os.environ.update(OF_THE_ESTIMATE="1"),
        lambda: dict(os.environ),
    ),
    "filters": (lambda: warnings.simplefilter("error", UserWarning), lambda: [*warnings.filters]),
    "collector": (gc.disable, gc.isenabled),
    "recursion": (lambda: sys.setrecursionlimit(5000), sys.getrecursionlimit),
    "numpy's errors": (lambda: np.seterr(all="raise"), np.geterr),
}
# Before torch 2.8 nobody can ask which of these were entered.
if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):
    CHANGES["saved tensors"] = (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__(),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


def seen() -> dict[str, Any]:
    # Leaving casts is the only way to ask how many were entered.
    torch.autocast_increment_nesting()
    return {name: look() for name, (_, look) in CHANGES.items()}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_program_switches_is_as_it_was(name: str) -> None:
    before = seen()
    estimate(lambda: (X * 2, CHANGES[name][0]()), backward=False)
    assert seen() == before


@pytest.mark.parametrize("seed", range(6))
def test_any_of_them_in_any_order_are_as_they_were_also_after_a_refusal(seed: int) -> None:
    # These modes take whatever the program goes on to call.
    names = sorted(CHANGES.keys() - {"function mode", "dispatch mode"})
    chosen = random.Random(seed).sample(names, 8)

    def program(fails: bool) -> torch.Tensor:
        out = X * 2
        if fails:
            for name in chosen:
                CHANGES[name][0]()
            bool(out.sum() > 0)
        return out

    before = seen()
    with pytest.raises(EstimateError):
        estimate(program, True, backward=False)
    assert seen() == before
    assert estimate(program, False, backward=False).peak.total == 2 * X.nbytes


def test_options_of_the_compiler_are_as_they_were() -> None:
    from torch._dynamo import config

    def program() -> torch.Tensor:
        config.suppress_errors = not before
        return X * 2

    before = config.suppress_errors
    estimate(program, backward=False)
    assert config.suppress_errors is before


class Buffer:
    """What a loop of reinforcement learning keeps between its steps."""

    def __init__(self) -> None:
        self.steps, self.place = 0, {"next": 0}
        self.kept: collections.deque[Any] = collections.deque([X], maxlen=3)
        self.losses: list[float] = []
        self.seen: set[int] = set()
        self.best: float | None = None
        self.random = np.random.default_rng(0)
        self.python = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)

    def add(self, loss: torch.Tensor) -> None:
        self.steps += 1
        self.place["next"] = self.steps % 3
        self.kept.extend([loss.detach(), X])
        self.losses.append(loss.item())
        self.seen.add(self.steps)
        self.best = 0.5
        self.random.random()
        self.python.random()
        torch.rand(2, generator=self.generator)

    def state(self) -> list[Any]:
        drawn = self.random.bit_generator.state, self.python.getstate()
        states = [drawn, self.generator.get_state().tolist(), self.best, [id(x) for x in self.kept]]
        return [self.steps, dict(self.place), list(self.losses), set(self.seen), *states]


class Logged(nn.Linear):
    """A module that logs and counts."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.norms: list[float] = []
        self.calls = 0
        self.last: collections.deque[Any] = collections.deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.norms.append(out.norm().item())
        self.last.append(out)
        self.calls += 1
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_a_buffer_for_replay_and_a_module_that_counts_are_as_they_were(fails: bool) -> None:
    buffer, model = Buffer(), Logged()
    features: collections.deque[Any] = collections.deque(maxlen=4)
    model.register_forward_hook(lambda *given: features.append(given[-1]))

    def step() -> None:
        loss = model(X).square().mean()
        loss.backward()
        buffer.add(loss)
        if fails:
            bool(loss > 0)

    before = buffer.state()
    if fails:
        with pytest.raises(EstimateError):
            estimate(step, backward=False)
    else:
        estimate(step, backward=False)
    assert buffer.state() == before
    assert (model.norms, model.calls, len(model.last), len(features)) == ([], 0, 0, 0)


REGISTERED: dict[str, object] = {}


@pytest.mark.parametrize("fails", [False, True])
def test_arrays_and_iterators_are_as_they_were(fails: bool) -> None:
    ages, one = np.arange(4), np.zeros(())
    batches = iter([X, X + 1, X + 2])
    numbers = iter(range(5, 9))
    next(numbers)

    def step() -> torch.Tensor:
        ages[next(numbers) % 4] += 10
        one[...] = 1
        if fails:
            raise RuntimeError
        return next(batches) * int(ages.sum())

    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        estimate(step, backward=False)
    assert ages.tolist() == [0, 1, 2, 3]
    assert one == 0
    assert next(batches) is X
    assert next(numbers) == 6


def test_what_a_program_registers_for_good_stays() -> None:
    """A library that is imported in an estimate fills its tables once."""

    def program() -> torch.Tensor:
        REGISTERED.setdefault("kind", Buffer)
        return X * 2

    estimate(program, backward=False)
    assert {"kind": Buffer} == REGISTERED


class Fixed(dict[str, Any]):
    """What a model puts out: nobody can take anything from it."""

    def __delitem__(self, key: str) -> None:
        raise TypeError("fixed")


def test_an_output_that_nobody_can_take_from_hides_no_refusal() -> None:
    def program() -> None:
        out = Fixed(last=X * 2)
        if out["last"].sum() > 0:
            out.clear()

    with pytest.raises(EstimateError, match="needs the value of a tensor"):
        estimate(program, backward=False)
