"""Peaks of small programs, counted by malloc_tracker.c and by a measurement; printed as JSON.

Started by test_undisturbed_peaks.py with the tracker in ``LD_PRELOAD``.
"""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable

import torch
from odd_programs import ODD_PROGRAMS
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.measuring.body_measurement import BodyMeasurement

tracker = ctypes.CDLL(None)
tracker.tracker_now.restype = tracker.tracker_peak.restype = ctypes.c_int64


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def training() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation() -> None:
    model = mlp()
    for _ in range(3):
        model(torch.ones(16, 64)).sum().backward()


def checkpointing() -> None:
    x = torch.ones(16, 64, requires_grad=True)
    checkpoint(mlp(), x, use_reentrant=False).sum().backward()


def a_gradient_of_a_gradient() -> None:
    x = torch.ones(16, 64, requires_grad=True)
    (slope,) = torch.autograd.grad(x.exp().sin().sum(), [x], create_graph=True)
    slope.norm().backward()


def attention() -> None:
    q, k, v = (torch.ones(2, 4, 32, 16, requires_grad=True) for _ in range(3))
    nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def inference() -> None:
    with torch.inference_mode():
        mlp()(torch.ones(16, 64)).softmax(-1)


def in_place() -> None:
    x = torch.ones(16, 64, requires_grad=True)
    (x * 2).add_(1).relu_().sum().backward()


def storages_that_change_size() -> None:
    x = torch.ones(1000)
    x.resize_(5000)
    x.untyped_storage().resize_(0)
    torch.ones(3000)


def an_exception() -> None:
    try:
        torch.ones(1000) @ torch.ones(3, 1000)
    except RuntimeError:
        torch.ones(2000)


class Cycle:
    def __init__(self) -> None:
        self.tensor = torch.ones(1000)
        self.me = self


def cycles_that_the_collector_frees() -> None:
    """What they hold is freed after so and so many new objects: ours must not be among them."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    for _ in range(60):
        Cycle()
        model(torch.ones(1, 4)).sum().backward()
        model.zero_grad()


PROGRAMS: tuple[Callable[[], None], ...] = (
    training,
    accumulation,
    checkpointing,
    a_gradient_of_a_gradient,
    attention,
    inference,
    in_place,
    storages_that_change_size,
    an_exception,
    cycles_that_the_collector_frees,
    *ODD_PROGRAMS,
)


def peak_of(program: Callable[[], None]) -> int:
    before: int = tracker.tracker_now()
    tracker.tracker_reset()
    program()
    peak: int = tracker.tracker_peak() - before
    return peak


def main() -> None:
    found = {}
    for program in PROGRAMS:
        program()  # libraries set themselves up
        gc.collect()
        alone = peak_of(program)
        gc.collect()
        measurement = BodyMeasurement("cpu")
        measurement.start()
        profiled = peak_of(program)
        result = measurement.stop()
        if alone != result.peak.total:
            # Under load a library's thread asks for a few aligned bytes now and then.
            gc.collect()
            alone = min(alone, peak_of(program))
        found[program.__name__] = {
            "alone": alone,
            "profiled": profiled,
            "measured": result.peak.total,
            "unknown": result.peak.unknown,
            "unexplained": result.unexplained_bytes,
            "blind_spots": result.blind_spots,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
