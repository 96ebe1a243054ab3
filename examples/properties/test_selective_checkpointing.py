"""Selective checkpointing keeps of each layer what its policy names, and nothing else.

The bytes per layer are the slope over the depth: what the model's ends take cancels out.
"""

import pytest
import torch
from blocks import ROW_BYTES, Block, inputs
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def keep_products(context, operator, *args, **kwargs):
    """Keep what matrix products made, which are dear; compute the rest again."""
    is_product = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def plain(block, x):
    return block(x)


def full(block, x):
    # Each checkpoint would keep the state of the random generators, too: here nothing draws.
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def selective(block, x):
    def contexts():
        return create_selective_checkpoint_contexts(keep_products)

    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def kept_by_forward(torchmem, run_block, depth):
    model = nn.ModuleList(Block() for _ in range(depth)).to(torchmem.device)
    x = inputs(torchmem.device)
    with torchmem.measure(f"forward through {depth} blocks") as forward:
        for block in model:
            x = run_block(block, x)
    x.sum().backward()
    return forward.retained.total


@pytest.mark.parametrize(
    ("run_block", "rows"),
    [
        (plain, 9),  # the input, four times the input before GELU and after it
        (full, 1),  # the input alone
        (selective, 6),  # the input, and what the two products made: four times, and once
    ],
)
def test_a_layer_keeps_so_many_times_its_input(torchmem, run_block, rows):
    kept = {depth: kept_by_forward(torchmem, run_block, depth) for depth in (2, 6)}
    assert (kept[6] - kept[2]) / 4 == rows * ROW_BYTES
