"""Programs that train: loops, optimizers, schedulers, lower precision, checkpoints."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.record.undisturbed.state import nightly, prepared, program


def net(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2))


@program
def fits_with_lbfgs():
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append(loss.detach())
        return loss

    optimizer.step(closure)
    return calls, model.state_dict()


@program
def checkpoints_activations():
    model, x = net(), torch.randn(4, 8, requires_grad=True)
    kept = checkpoint(model, x, use_reentrant=False)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    kept.sum().backward()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@program
def checkpoints_selectively():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    model, x = net(), torch.randn(4, 8, requires_grad=True)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return x.grad


@program
def steps_within_the_backward_pass():
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    model(torch.randn(4, 8)).sum().backward()
    for handle in handles:
        handle.remove()
    return model.state_dict(), [p.grad for p in model.parameters()]


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.randn(5, 2)


@program
def loads_noise_and_a_stream():
    return list(DataLoader(Noise(), 2)), list(DataLoader(Stream(), 2))


@nightly
@program
def loads_with_workers():
    return list(DataLoader(Noise(), 2, num_workers=2, timeout=60))


@prepared
def runs_backward_through_a_graph_of_before():
    model, x = net(), torch.randn(4, 8, requires_grad=True)
    loss = model(x).exp().sum()

    def run():
        loss.backward()
        return x.grad, [p.grad for p in model.parameters()]

    return run
