"""What the allocator tells by itself is what a recording says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pytest_torchmem import MiB
from pytest_torchmem.measuring.counted import CounterMeasurement
from pytest_torchmem.record.torch_api import allocator, autograd
from pytest_torchmem.values.results import Level, Result
from tests.cuda.bodies import BODIES, record, run_bare

Keeper = Callable[[torch.device, list[object]], object]
KEEPERS: dict[str, Keeper] = {}


def keeper(function: Keeper) -> Keeper:
    KEEPERS[function.__name__] = function
    return function


@keeper
def output_with_graph(device: torch.device, kept: list[object]) -> None:
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to(device)
    kept.append(net(torch.randn(64, 256, device=device)).sum())


@keeper
def trained_model(device: torch.device, kept: list[object]) -> None:
    net = nn.Linear(512, 512, device=device)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(64, 512, device=device)).sum().backward()
    optimizer.step()
    kept += [net, optimizer]


@keeper
def cycle(device: torch.device, kept: list[object]) -> None:
    own: list[object] = [torch.ones(MiB + 12, device=device)]
    own.append(own)


@keeper
def made_in_place_of_another(device: torch.device, kept: list[object]) -> None:
    kept[0] = torch.ones(3 * MiB, device=device)


@keeper
def of_another_thread(device: torch.device, kept: list[object]) -> None:
    thread = threading.Thread(target=lambda: kept.append(torch.ones(MiB, device=device)))
    thread.start()
    thread.join()


def counted(run: Callable[[], object], device: torch.device) -> tuple[Result, Result]:
    """The most and the least that the allocator's counters and history allow."""
    measurement = CounterMeasurement(str(device), Level.EVENTS)
    measurement.start()
    run()
    return measurement.stop(), measurement.least


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_keeps_nothing_retains_nothing(cuda: torch.device, name: str) -> None:
    run = BODIES[name]
    run(cuda)
    bare = run_bare(run, cuda)
    most, least = counted(lambda: run(cuda), cuda)
    assert most.retained.total == 0
    assert least.peak.total == bare <= most.peak.total


def test_what_the_engine_still_holds_was_not_there_before(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> None:
        held.clear()
        torch.ones(2 * MiB, device=cuda)

    # A thread of the engine's has it for a moment after a backward pass.
    held = [torch.ones(MiB, device=cuda)]
    monkeypatch.setattr(autograd, "await_engine", lambda _: held.clear())
    most, least = counted(run, cuda)
    assert most.peak.total >= least.peak.total == 8 * MiB


@pytest.mark.parametrize("name", KEEPERS)
def test_what_a_body_keeps_is_what_a_recording_says(cuda: torch.device, name: str) -> None:
    def run(device: torch.device) -> None:
        kept[:] = [torch.ones(2 * MiB, device=device)]
        KEEPERS[name](device, kept)

    kept: list[object] = []
    run(cuda)
    recorded = record(run, cuda).profile_so_far().result()
    most, least = counted(lambda: run(cuda), cuda)
    assert most.retained.total == least.retained.total == recorded.retained.total > 0


def test_the_history_is_left_as_it_was_found(cuda: torch.device) -> None:
    assert not allocator.history_is_recorded()
    counted(lambda: torch.ones(1, device=cuda), cuda)
    assert not allocator.history_is_recorded()
    allocator.record_history(True)
    try:
        most, _ = counted(lambda: torch.ones(1, device=cuda), cuda)
        assert most.retained.total == 0
        assert allocator.history_is_recorded()
    finally:
        allocator.record_history(False)
