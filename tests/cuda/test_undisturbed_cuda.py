"""What a body needs on a GPU, recorded, is what the allocator counts without a recording."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from pytest_torchmem import MiB
from pytest_torchmem.record.torch_api import autograd
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
    assert [spot for spot in result.blind_spots if "pinned" not in spot] == []
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


def test_the_thread_that_autograd_has_for_a_device_can_be_waited_for(cuda: torch.device) -> None:
    begun, over = threading.Event(), []

    def work_slowly(gradient: torch.Tensor) -> None:
        begun.set()
        time.sleep(0.5)
        over.append(threading.get_ident())

    loss = torch.ones(1, device=cuda, requires_grad=True) * 2
    loss.register_hook(work_slowly)
    backward = threading.Thread(target=loss.backward)
    backward.start()
    begun.wait()
    before = torch.cuda.memory_stats(cuda)["allocation.all.allocated"]
    autograd.await_engine(cuda)
    assert over
    assert over != [backward.ident]
    backward.join()
    # One gradient of the slow pass; waiting itself allocates nothing.
    assert torch.cuda.memory_stats(cuda)["allocation.all.allocated"] - before <= 1


FORK = """
import os

import torch

import pytest_torchmem

held = torch.ones(3, device="cuda")
with pytest_torchmem.measure():
    held + 1
child = os.fork()
if not child:
    status = 1
    try:
        torch.ones(3, requires_grad=True).sum().backward()
        status = 0
    finally:
        os._exit(status)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_autograd_works_in_a_fork_of_a_process_in_which_it_has_not_worked(
    cuda: torch.device,
) -> None:
    assert subprocess.run([sys.executable, "-c", FORK], timeout=120, check=False).returncode == 0
