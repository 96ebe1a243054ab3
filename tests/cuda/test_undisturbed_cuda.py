"""What a body needs on a GPU, recorded, is what the allocator counts without a recording."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from pytest_torchmem import MiB
from tests.cuda.bodies import BODIES, record, run_bare


@pytest.mark.parametrize("name", BODIES)
def test_the_peak_is_that_of_an_unrecorded_run(cuda: torch.device, name: str) -> None:
    run = BODIES[name]
    run(cuda)  # what a first run alone makes is not there in the others
    bare = run_bare(run, cuda)
    result = record(run, cuda).profile_so_far().result()
    assert result.peak.total == bare
    assert run_bare(run, cuda) == bare
    assert result.unexplained_bytes == 0
    assert result.peak.unknown == 0
    assert result.retained.total == 0
    assert result.blind_spots == ()
    assert result.notes == ()


@pytest.mark.parametrize("name", ["training", "per_sample_gradients", "checkpointed"])
def test_the_same_body_has_one_number_ten_times(cuda: torch.device, name: str) -> None:
    run = BODIES[name]
    run(cuda)
    kept = [torch.ones(700 * (n + 1), device=cuda) for n in range(5)]
    numbers = set()
    for n in range(10):
        result = record(run, cuda).profile_so_far().result()
        numbers.add((result.peak.at_peak, result.peak.by_category, result.retained.by_category))
        if n % 2:
            torch.cuda.empty_cache()
            kept.append(torch.ones(MiB // (n + 1), device=cuda))
    assert len(numbers) == 1, numbers


class Keeping(torch.autograd.Function):
    """Holds memory in its node, which is the last one that autograd's thread works on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = torch.ones(2 * MiB, device=x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> None:
        return None


def test_what_autograds_thread_still_holds_is_gone_when_the_backward_pass_is(
    cuda: torch.device,
) -> None:
    def run(device: torch.device) -> None:
        x = torch.ones(1, device=device, requires_grad=True)
        Keeping.apply(x).backward()
        torch.ones(2 * MiB, device=device)

    interval = sys.getswitchinterval()
    # The thread needs Python to let go of the node, and does not get it while this one works.
    sys.setswitchinterval(60)
    try:
        run(cuda)
        totals = {record(run, cuda).profile_so_far().peak.total for _ in range(3)}
    finally:
        sys.setswitchinterval(interval)
    assert totals == {8 * MiB + 12}
