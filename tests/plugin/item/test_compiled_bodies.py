"""Code that was compiled before runs in a measured test as it does without the plugin."""

WARM = """
import pytest
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.count = 2

    def forward(self, x):
        for layer in self.layers[: self.count]:
            x = layer(x).relu()
        return x


model, x = Encoder(), torch.ones(2, 8)
optimizer = torch.optim.AdamW(model.layers[:2].parameters())
whole, parts = (
    torch.compile(model, backend="aot_eager", fullgraph=fullgraph) for fullgraph in (True, False)
)
step = torch.compile(optimizer.step, backend="aot_eager")


def train():
    whole(x).sum().backward()
    parts(x).sum().backward()
    step()
    optimizer.zero_grad()


train(), train()


@pytest.fixture(autouse=True)
def strict():
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


@pytest.mark.memory_budget("64MiB")
def test_marker():
    train()


def test_fixture(torchmem):
    train()


def test_not_measured():
    train()
"""


def test_a_marker_and_the_bare_fixture_leave_warm_code_compiled(pytester):
    pytester.makepyfile(WARM)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=3)
