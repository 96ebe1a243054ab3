"""Six regressions that cost people days, in a project of their own.

The project stores its baselines and is green, regresses in all places at once and is red, accepts
the new numbers and is green again. Every test below asks what these runs said about one story.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Story:
    """A module of training code, its test, and the edit that makes it regress.

    Attributes:
        name: Of the module.
        code: The module before the regression.
        test: The test module, without its imports.
        before: The text of ``code`` that the regression replaces.
        after: What it is replaced by.
        subject: What the first line of the failure must say.
        blamed: Text of the one line of the regressed module that the failure must name.
    """

    name: str
    code: str
    test: str
    before: str
    after: str
    subject: str
    blamed: str

    @property
    def regressed(self) -> str:
        code = dedent(self.code)
        assert code.count(self.before) == 1
        return code.replace(self.before, self.after)

    @property
    def place(self) -> str:
        """The place that the failure must name, such as ``at logits.py:14``."""
        lines = self.regressed.splitlines()
        (number,) = (n for n, text in enumerate(lines, 1) if self.blamed in text)
        return f"at {self.name}.py:{number}"

    def write(self, folder: Path, code: str) -> None:
        imports = f"import pytest\nimport torch\n\nimport {self.name}\n"
        (folder / f"{self.name}.py").write_text(dedent(code))
        (folder / f"test_{self.name}.py").write_text(imports + dedent(self.test))


LOGITS = Story(
    name="logits",
    code="""
        import torch
        from torch import nn
        from torch.nn.functional import cross_entropy

        class Model(nn.Module):
            def __init__(self, vocabulary=4096, width=64):
                super().__init__()
                self.embed = nn.Embedding(vocabulary, width)
                self.head = nn.Linear(width, vocabulary, bias=False)

            def forward(self, tokens):
                return self.head(self.embed(tokens))

        def train_step(model, tokens):
            logits = model(tokens)
            loss = cross_entropy(logits, tokens)
            loss.backward()
            return loss.item()
    """,
    test="""
        @pytest.mark.memory_baseline
        def test_logits():
            model = logits.Model().to(torch.bfloat16)
            logits.train_step(model, torch.arange(512))
    """,
    before="model(tokens)\n",
    after="model(tokens).float()\n",
    # The copy itself is not kept for backward, so it is TEMPORARY.
    subject="of temporary",
    blamed=".float()",
)

LOGITS_IN_FORWARD = Story(
    name="logits_in_forward",
    code="""
        import torch
        from torch import nn
        from torch.nn.functional import cross_entropy

        class Model(nn.Module):
            def __init__(self, vocabulary=4096, width=64):
                super().__init__()
                self.embed = nn.Embedding(vocabulary, width)
                self.head = nn.Linear(width, vocabulary, bias=False)

            def forward(self, tokens):
                logits = self.head(self.embed(tokens))
                return cross_entropy(logits, tokens)
    """,
    test="""
        @pytest.mark.memory_baseline
        def test_logits_in_forward():
            model = logits_in_forward.Model().to(torch.bfloat16)
            model(torch.arange(512)).backward()
    """,
    before="self.head(self.embed(tokens))\n",
    after="self.head(self.embed(tokens))\n        logits = logits.float()\n",
    # The total peaks in the backward pass: the copy is gone, and what was made of it is there.
    subject="activation 4.0",
    blamed="return cross_entropy(logits, tokens)",
)

CHECKPOINTING = Story(
    name="checkpointing",
    code="""
        import torch
        from torch import nn
        from torch.utils.checkpoint import checkpoint

        class Block(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.up = nn.Linear(width, 4 * width)
                self.down = nn.Linear(4 * width, width)

            def forward(self, x):
                return x + self.down(torch.tanh(self.up(x)))

        class Model(nn.Module):
            def __init__(self, width=64, layers=6):
                super().__init__()
                self.layers = nn.ModuleList(Block(width) for _ in range(layers))
                self.checkpointing = True

            def forward(self, x):
                for layer in self.layers:
                    if self.checkpointing and self.training:
                        x = checkpoint(layer, x, use_reentrant=False)
                    else:
                        x = layer(x)
                return x

        def train_step(model, x):
            model(x).square().mean().backward()
    """,
    test="""
        @pytest.mark.memory_baseline
        def test_checkpointing():
            checkpointing.train_step(checkpointing.Model(), torch.ones(1024, 64))
    """,
    before="self.checkpointing = True",
    after="self.checkpointing = False",
    subject="of activation",
    blamed="torch.tanh(self.up(x))",
)

RUNNING_LOSS = Story(
    name="running_loss",
    code="""
        import torch
        from torch import nn

        class Trainer:
            def __init__(self, width=256):
                self.model = nn.Sequential(nn.Linear(width, width), Gate(), nn.Linear(width, 1))
                self.running_loss = 0.0

            def validate(self, batches):
                for batch in batches:
                    loss = self.model(batch).square().mean()
                    self.running_loss += loss.item()

        class Gate(nn.Module):
            def forward(self, x):
                return torch.sigmoid(x)
    """,
    test="""
        @pytest.fixture
        def trainer():
            return running_loss.Trainer()

        @pytest.mark.memory_baseline
        def test_running_loss(trainer):
            trainer.validate([torch.ones(2048, 256)] * 4)
    """,
    before="+= loss.item()",
    after="+= loss",
    subject="still held by the fixture",
    blamed="torch.sigmoid(x)",
)

OPTIMIZER_STATE = Story(
    name="optimizer_state",
    code="""
        import torch

        class Momentum(torch.optim.Optimizer):
            def __init__(self, params, lr=0.1, beta=0.9):
                super().__init__(params, {"lr": lr, "beta": beta})

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    for p in group["params"]:
                        state = self.state[p]
                        if not state:
                            state["average"] = torch.zeros_like(p)
                        state["average"].mul_(group["beta"]).add_(p.grad)
                        p.add_(state["average"], alpha=-group["lr"])
    """,
    test="""
        @pytest.fixture
        def model():
            layers = (torch.nn.Linear(512, 512) for _ in range(8))
            return torch.nn.Sequential(*layers).to(torch.bfloat16)

        @pytest.mark.memory_baseline
        def test_optimizer_state(model):
            optimizer = optimizer_state.Momentum(model.parameters())
            model(torch.ones(4, 512, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
    """,
    before="torch.zeros_like(p)",
    after="torch.zeros_like(p, dtype=torch.float32)",
    subject="of optimizer state",
    blamed="torch.zeros_like(p, dtype=torch.float32)",
)

CUSTOM_FUNCTION = Story(
    name="custom_function",
    code="""
        import torch

        class Cube(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x * x

            @staticmethod
            def backward(ctx, grad):
                (x,) = ctx.saved_tensors
                return (3 * x * x * grad).to(torch.bfloat16)

        def train_step(layers, x):
            for layer in layers:
                x = Cube.apply(layer(x))
            x.float().mean().backward()
    """,
    test="""
        @pytest.fixture
        def layers():
            return torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(6)).bfloat16()

        @pytest.mark.memory_baseline
        def test_custom_function(layers):
            custom_function.train_step(layers, torch.ones(8192, 64, dtype=torch.bfloat16))
    """,
    before="ctx.save_for_backward(x)",
    after="ctx.save_for_backward(x.float())",
    subject="of activation",
    blamed="ctx.save_for_backward(x.float())",
)

HIDDEN_STATES = Story(
    name="hidden_states",
    code="""
        import torch
        from torch import nn

        class Encoder(nn.Module):
            def __init__(self, width=128, layers=8):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

            def forward(self, x):
                hidden = []
                for layer in self.layers:
                    x = torch.relu_(layer(x))
                    hidden = [x]
                return hidden[-1]

        @torch.no_grad()
        def embed(model, x):
            return model(x).mean(0)
    """,
    test="""
        @pytest.mark.memory_baseline
        def test_hidden_states():
            hidden_states.embed(hidden_states.Encoder(), torch.ones(4096, 128))
    """,
    before="hidden = [x]",
    after="hidden.append(x)",
    subject="of temporary",
    blamed="torch.relu_(layer(x))",
)

STORIES = (
    LOGITS,
    LOGITS_IN_FORWARD,
    CHECKPOINTING,
    RUNNING_LOSS,
    OPTIMIZER_STATE,
    CUSTOM_FUNCTION,
    HIDDEN_STATES,
)


@dataclass(frozen=True)
class Runs:
    """The first line of each failure, by story; a story that passed is not in it."""

    stored: Mapping[str, str]
    regressed: Mapping[str, str]
    accepted: Mapping[str, str]
    afterwards: Mapping[str, str]


@pytest.fixture(scope="module")
def found() -> list[Runs]:
    """The runs, once they were made."""
    return []


@pytest.fixture
def runs(found: list[Runs], torch_pytester: pytest.Pytester) -> Runs:
    """What four runs of a project said: before, after and after accepting the regressions."""
    if not found:
        project = torch_pytester
        project.makeini("[pytest]\n")
        for story in STORIES:
            story.write(project.path, story.code)
        stored = run(project, "--torchmem-update-baseline")
        for story in STORIES:
            story.write(project.path, story.regressed)
        regressed = run(project)
        accepted, afterwards = run(project, "--torchmem-update-baseline"), run(project)
        found.append(Runs(stored, regressed, accepted, afterwards))
    return found[0]


def run(project: pytest.Pytester, *options: str) -> dict[str, str]:
    """Run the project's tests; return the first lines of failures."""
    arguments = ("-p", "no:cacheprovider", "--junitxml=report.xml", "-otorchmem_device=cpu")
    project.runpytest_inprocess(*arguments, *options)
    cases = list(ElementTree.parse(project.path / "report.xml").iter("testcase"))
    assert len(cases) == len(STORIES)
    failures = ((case.get("name", ""), case.find("failure")) for case in cases)
    return {
        name.removeprefix("test_"): (failure.text or "").partition("\n")[0]
        for name, failure in failures
        if failure is not None
    }


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
class TestStory:
    def test_it_is_green_before(self, runs: Runs, story: Story) -> None:
        assert story.name not in runs.stored

    def test_the_first_line_names_category_and_source(self, runs: Runs, story: Story) -> None:
        line = runs.regressed[story.name]
        assert story.subject in line
        assert " over the baseline of " in line
        assert story.place in line

    def test_an_update_accepts_it(self, runs: Runs, story: Story) -> None:
        assert story.name not in runs.accepted
        assert story.name not in runs.afterwards
