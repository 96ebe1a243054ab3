"""``torchmem.estimate`` on the real engine: right, and without a trace in what is measured."""

from __future__ import annotations

import pytest

from pytest_torchmem.cli.main import Exit, main

pytest.importorskip("torch")

BODIES = """
import pytest
import torch
from torch import nn

MiB = 1 << 20


def net():
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


def train(model, batch):
    model(batch).sum().backward()


@pytest.mark.parametrize("estimates", [False, True])
def test_the_estimate_is_the_measured_peak_and_leaves_nothing(torchmem, estimates):
    model, batch = net(), torch.ones(512, 256)
    with torchmem.measure("step") as step:
        if estimates:
            estimate = torchmem.estimate(train, model, batch, backward=False)
        train(model, batch)
    if estimates:
        assert estimate.peak.total == step.peak.total
        assert estimate.simulate().peak == step.simulate().peak
    gradients = 2 * (256 * 256 + 256) * 4
    assert step.retained.total == step.retained.gradient == gradients
    del model, batch
    with torchmem.measure("after") as after:
        torch.ones(256, 256)
    assert after.peak.total == 256 * 256 * 4


@pytest.mark.memory_budget("64MiB", warmup=1)
def test_a_trace_can_be_saved(torchmem):
    torch.ones(256, 256)
    torchmem.save_trace("trace.npz")


@pytest.mark.memory_budget("64MiB", reserved="64MiB")
def test_a_model_without_data_is_over_its_limit(torchmem):
    with torch.device("meta"):
        model, batch = nn.Linear(4096, 4096), torch.empty(64, 4096)
    torchmem.estimate(model, batch, optimizer=torch.optim.AdamW, device="cuda")
"""


def test_real_estimates(torch_pytester):
    torch_pytester.makeini("[pytest]")
    torch_pytester.makepyfile(test_it=BODIES)
    result = torch_pytester.runpytest_inprocess("-otorchmem_device=cpu", "-rA")
    result.assert_outcomes(passed=3, failed=1)
    trace = str(torch_pytester.path / "trace.npz")
    assert main(["fits", trace, "--capacity=2MiB"]) == Exit.OK
    assert main(["fits", trace, "--capacity=1MiB"]) == Exit.DOES_NOT_FIT
    result.stdout.fnmatch_lines_random(
        [
            "in 'Linear (estimated)', reserved memory peaked at an estimated *, * over the limit*",
            "also: in 'Linear (estimated)', memory peaked at an estimated * (same cause)",
            "note: reserved memory is estimated: *, simulated over the allocations on cuda:0, *",
        ]
    )
