"""An optimizer's ``foreach`` updates all parameters at once: faster, with scratch for all of them.

The loop needs scratch for one parameter at a time. Who is short of memory turns ``foreach`` off,
and this test says what that is worth.
"""

import torch
from blocks import Block
from torch import nn


def measured_step(torchmem, **options):
    model = nn.Sequential(*(Block() for _ in range(8))).to(torchmem.device)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state
    with torchmem.measure(f"step with {options}") as step:
        optimizer.step()
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    return step, sizes


def test_foreach_takes_scratch_for_all_parameters_and_the_loop_for_one(torchmem):
    loop, sizes = measured_step(torchmem, foreach=False)
    foreach, _ = measured_step(torchmem, foreach=True)
    assert loop.peak.temporary <= 3 * max(sizes)
    assert foreach.peak.temporary >= sum(sizes)
    assert foreach.peak.optimizer_state == loop.peak.optimizer_state
    # Neither leaves anything behind: the update is in place.
    assert loop.retained.total == foreach.retained.total == 0
