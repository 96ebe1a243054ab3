"""A training step, recorded for real: what other people's viewers are given."""

import pytest
import torch

from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.measuring.body_measurement import BodyMeasurement


def train_two_steps(measurement):
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(net.parameters())
    with measurement.region("both"):
        for _ in measurement.steps(2, 0):
            net(torch.ones(32, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="session")
def profile() -> MemoryProfile:
    measurement = BodyMeasurement("cpu")
    measurement.start()
    train_two_steps(measurement)
    measurement.stop()
    return measurement.profile_so_far()
