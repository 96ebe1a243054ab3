"""Regressions that real projects shipped turn a green run red, and the first line names the cause.

These run real torch on the CPU. One run measures all six, so its results are shared by the tests.
"""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")

PROJECT = """
import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BROKEN = bool(os.environ.get("BROKEN"))
pytestmark = pytest.mark.memory_baseline

DIM, VOCABULARY, TOKENS = 64, 2048, 512
kept = []


class Block(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM, dtype=dtype)
        self.down = nn.Linear(4 * DIM, DIM, dtype=dtype)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, checkpointing=False, dtype=torch.float32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(6))
        self.head = nn.Linear(DIM, VOCABULARY, dtype=dtype)
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


@pytest.fixture
def tokens():
    torch.manual_seed(0)
    return torch.randn(TOKENS, DIM)


def test_logits(tokens):
    net = Net(dtype=torch.bfloat16)
    logits = net.head(net(tokens.bfloat16()))
    if BROKEN:
        logits = logits.float()  # logits-line
    logits.logsumexp(-1).sum().backward()


def test_checkpointing(tokens):
    net = Net(checkpointing=not BROKEN)
    net(tokens.repeat(8, 1)).sum().backward()


def test_running_loss(tokens):
    net = Net()
    total = 0
    for _ in range(3):
        loss = net(tokens).pow(2).mean()
        if BROKEN:
            total = total + loss
        else:
            total = total + loss.item()
        loss.backward(retain_graph=BROKEN)
    kept.append(total)


def test_optimizer_state():
    net = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    state = torch.float32 if BROKEN else torch.bfloat16
    optimizer = Momentum(net.parameters(), state)
    for _ in range(2):
        net(torch.ones(1, 1024, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()


class Momentum(torch.optim.Optimizer):
    def __init__(self, parameters, dtype):
        super().__init__(parameters, {})
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p]["momentum"] = torch.zeros_like(p, dtype=self.dtype)  # state-line
                self.state[p]["momentum"].add_(p.grad)
                p.sub_(self.state[p]["momentum"], alpha=0.01)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.float() if BROKEN else x)  # saved-line
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return (2 * x * gradient).to(gradient.dtype)


def test_custom_function(tokens):
    x = tokens.repeat(16, 1).bfloat16().requires_grad_()
    y = x
    for _ in range(4):
        y = Square.apply(y)
    y.sum().backward()


def test_hidden_states(tokens):
    net = Net()
    with torch.no_grad():
        x, hidden = tokens.repeat(16, 1), []
        for block in net.blocks:
            x = block(x)
            if BROKEN:
                hidden.append(x)
        net.head(x[:1])
"""

EXPECTED = {
    "test_logits": r"activation peaked .*test_it\.py:logits-line",
    "test_checkpointing": r"activation peaked .*blocks.*test_it\.py",
    "test_running_loss": r"retained .* of activation .*blocks.*test_it\.py",
    "test_optimizer_state": r"optimizer state peaked .*test_it\.py:state-line",
    "test_custom_function": r"activation peaked .*test_it\.py:saved-line",
    "test_hidden_states": r"temporary peaked .*blocks.*test_it\.py",
}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """The output of each run: storing, comparing, broken, accepting, comparing again."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(PROJECT)

    def run(*arguments, broken):
        environment = {**os.environ, "BROKEN": "1" if broken else ""}
        command = [sys.executable, "-m", "pytest", "-p", "no:asyncio", "--color=no", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        return done.stdout

    return {
        "stored": run("--torchmem-update-baseline", broken=False),
        "green": run("--torchmem-require-baseline", broken=False),
        "red": run("--torchmem-require-baseline", broken=True),
        "accepted": run("--torchmem-update-baseline", broken=True),
        "green again": run("--torchmem-require-baseline", broken=True),
    }


def test_the_run_is_green_before(story):
    assert "6 passed" in story["stored"]
    assert "6 passed" in story["green"]


@pytest.mark.parametrize("test", EXPECTED)
def test_the_first_line_names_the_category_and_the_source_line(story, test):
    lines = story["red"].splitlines()
    (heading,) = (i for i, line in enumerate(lines) if re.fullmatch(rf"_+ {test} _+", line))
    pattern = EXPECTED[test]
    for number, line in enumerate(PROJECT.splitlines(), start=1):
        if "# " in line:
            pattern = pattern.replace(line.rpartition("# ")[2], f"{number}\\b")
    assert re.search(pattern, lines[heading + 1])


def test_accepting_turns_it_green_again(story):
    assert "6 passed" in story["accepted"]
    assert "6 passed" in story["green again"]
