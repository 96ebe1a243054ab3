"""Edits that move or rename and change no memory: a failure would be a false alarm."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs.case import Harmless

_BEFORE: Final = """\
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""

_TEST: Final = """\
import pytest
import torch

import {name}


@pytest.fixture
def model():
    return {name}.Model()


@pytest.mark.memory_baseline
def test_{name}(model):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        {name}.step(model, optimizer, torch.ones(1024, 64))
"""


def _edit(name: str, *replaced: tuple[str, str]) -> Harmless:
    after = _BEFORE
    for old, new in replaced:
        assert old in after, (name, old)
        after = after.replace(old, new)
    return Harmless(name, _BEFORE, after, _TEST.format(name=name))


EDITS: Final = (
    _edit("comments", ("class Block", "# A block.\n#\n# It widens.\n\n\nclass Block")),
    _edit("class_renamed", ("Block", "FeedForward")),
    _edit("attributes_renamed", ("self.up", "self.expand"), ("self.down", "self.contract")),
    _edit("blocks_renamed", ("self.blocks", "self.layers")),
    _edit(
        "loop_rewritten", ("for block in self.blocks:", "for _, block in enumerate(self.blocks):")
    ),
    _edit(
        "method_extracted",
        ("return x + self.down(F.gelu(self.up(x)))", "return x + self.feed(x)"),
        (
            "class Model",
            "    def feed(self, x):\n        return self.down(F.gelu(self.up(x)))\n\n\nclass Model",
        ),
    ),
    _edit(
        "method_of_tensor", ("self.down(F.gelu(self.up(x)))", "self.down(F.gelu(input=self.up(x)))")
    ),
    _edit(
        "activation_as_module",
        ("        self.down = nn", "        self.act = nn.GELU()\n        self.down = nn"),
        ("F.gelu(", "self.act("),
    ),
    _edit(
        "sum_turned_round",
        ("x + self.down(F.gelu(self.up(x)))", "self.down(F.gelu(self.up(x))) + x"),
    ),
    _edit(
        "function_moved",
        (
            "model(x).square().mean().backward()",
            "loss = model(x).square().mean()\n    loss.backward()\n    del loss",
        ),
    ),
)
