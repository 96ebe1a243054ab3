"""torch.compile's partitioner keeps no more for backward than the budget that it is given.

``activation_memory_budget`` is a share of what it would keep without one. The backend here compiles
no kernels: the partition is what is tested, and it is the same.
"""

import pytest
import torch
from blocks import Block, inputs
from torch import nn

functorch_config = pytest.importorskip("torch._functorch.config")

BUDGETS = (1.0, 0.5, 0.0)


def kept_for_backward(torchmem, budget):
    model = nn.Sequential(*(Block() for _ in range(4))).to(torchmem.device)
    x = inputs(torchmem.device)
    with functorch_config.patch(activation_memory_budget=budget):
        torch._dynamo.reset()
        step = torch.compile(model, backend="aot_eager_decomp_partition")
        step(x).sum().backward()  # compiles
        model.zero_grad()
        with torchmem.measure(f"forward at {budget:.0%}") as forward:
            loss = step(x).sum()
        loss.backward()
    return forward.retained.activation


@pytest.mark.skipif(not hasattr(functorch_config, "activation_memory_budget"), reason="new torch")
def test_the_partitioner_stays_within_its_budget(torchmem):
    kept = {budget: kept_for_backward(torchmem, budget) for budget in BUDGETS}
    assert kept[0.5] <= kept[1.0] / 2
    assert kept[0.0] == 0  # all of it is computed again
