"""Checkpointing saves the memory that it is there to save, and gives the same gradients."""

import pytest
import torch
from blocks import ROW_BYTES, Block, inputs
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

DEPTH = 8


@pytest.fixture
def model(torchmem):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(DEPTH))).to(torchmem.device)


def gradients(model, loss):
    loss.backward()
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.memory_budget(unknown="0B")
def test_checkpointing_takes_less_and_changes_nothing(torchmem, model):
    x = inputs(torchmem.device)
    with torchmem.measure("plain") as plain:
        expected = gradients(model, model(x).sum())
    with torchmem.measure("checkpointed") as checkpointed:
        out = checkpoint_sequential(model, DEPTH, x, use_reentrant=False)
        found = gradients(model, out.sum())
    torch.testing.assert_close(found, expected)
    assert plain.peak.activation >= (9 * DEPTH - 1) * ROW_BYTES  # the first input is `input`
    # One input for each block, and one block as a whole while it is computed again.
    assert checkpointed.peak.activation <= (DEPTH + 9) * ROW_BYTES
    assert checkpointed.peak.total < 0.6 * plain.peak.total
