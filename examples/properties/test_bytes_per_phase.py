"""Four iterations, phase by phase: the first makes gradients and state, the others nothing new."""

import torch
from blocks import Block, inputs
from torch import nn

ITERATIONS = 4


def bytes_per_phase(torchmem, model, optimizer):
    """Return for each iteration what its phases made and left behind, by category."""
    table = []
    for number in range(ITERATIONS):
        x = inputs(torchmem.device)
        with torchmem.measure(f"forward {number}") as forward:
            loss = model(x).sum()
        with torchmem.measure(f"backward {number}") as backward:
            loss.backward()
        with torchmem.measure(f"step {number}") as step:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        table.append((forward.retained, backward.retained, step.retained))
        del loss
    return table


def test_only_the_first_iteration_leaves_anything_behind(torchmem):
    model = nn.Sequential(*(Block() for _ in range(4))).to(torchmem.device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    first, *others = bytes_per_phase(torchmem, model, optimizer)
    forward, backward, step = first
    assert forward.activation > 0
    assert (backward.gradient, backward.activation) == (weights, 0)
    assert 2 * weights <= step.optimizer_state <= 2 * weights + 1024  # and a counter each
    for later_forward, later_backward, later_step in others:
        assert later_forward.activation == forward.activation
        assert (later_backward.total, later_step.total) == (0, 0)
