"""Accumulating gradients: one micro-batch is in memory at a time, and leaves nothing behind."""

import pytest
import torch
from blocks import ROW_BYTES, Block, inputs
from torch import nn

MICRO_BATCHES = 6


@pytest.mark.memory_budget(growth="0B", activation=10 * 4 * ROW_BYTES)
def test_a_micro_batch_leaves_nothing_behind(torchmem):
    model = nn.Sequential(*(Block() for _ in range(4))).to(torchmem.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = torch.zeros((), device=torchmem.device)
    # The first micro-batch makes the gradients, the others add to them.
    for _ in torchmem.steps(MICRO_BATCHES - 1, warmup=1):
        loss = model(inputs(torchmem.device)).square().mean() / MICRO_BATCHES
        loss.backward()
        total += loss.detach()  # a list of the losses would keep one more for each micro-batch
    optimizer.step()
    optimizer.zero_grad()
    assert total > 0
