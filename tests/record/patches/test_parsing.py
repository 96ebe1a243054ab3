"""Parsers run as without a recording, and their calls are not recorded: TorchScript's, jinja2's."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, FunctionType

import jinja2
import pytest
import torch
from torch import nn

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import ParsingWatch
from tests.measured import measured
from tests.record.patches.profiled import profiled

pytestmark = pytest.mark.filterwarnings("ignore")


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() > 1:
            x = self.inner(x)
        return x + 1


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.dim() > 1 else x


def another_function() -> FunctionType:
    """What was parsed once is not parsed again."""
    made = FunctionType(doubled.__code__, globals(), "doubled")
    made.__annotations__ = doubled.__annotations__
    return made


def calls_of_the_parser(folder: str, parse: Callable[[], object]) -> int:
    """The calls in a folder that a profile function sees."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and folder in frame.f_code.co_filename:
            seen.append(frame.f_code.co_name)

    profiled(note, parse)
    return len(seen)


@pytest.mark.parametrize("make", [Scripted, another_function], ids=["module", "function"])
def test_the_calls_of_the_parser_are_not_followed(make) -> None:
    torch.jit.script(make())
    first, second = make(), make()
    alone = calls_of_the_parser("/torch/jit/", lambda: torch.jit.script(first))
    with Installed() as patches:
        ParsingWatch().install(patches)
        within = calls_of_the_parser("/torch/jit/", lambda: torch.jit.script(second))
    assert within < alone / 4


def test_the_calls_of_the_parser_of_templates_are_not_followed() -> None:
    environment, template = jinja2.Environment(), "{% for x in xs %}{{ x + 1 }}{% endfor %}"
    environment.from_string("{{ x }}")
    alone = calls_of_the_parser("/jinja2/", lambda: environment.from_string(template))
    made: list[jinja2.Template] = []
    with Installed() as patches:
        ParsingWatch().install(patches)
        within = calls_of_the_parser(
            "/jinja2/", lambda: made.append(environment.from_string(template))
        )
    assert within < alone / 4
    assert made[0].render(xs=[1, 2]) == "23"


def test_what_is_scripted_in_a_body_is_what_is_scripted_without() -> None:
    model, x, made = Scripted(), torch.randn(3, 4), []
    measured(lambda: made.append(torch.jit.script(model)))
    alone = torch.jit.script(model)
    assert made[0].code == alone.code
    assert torch.equal(made[0](x), alone(x))


def test_what_a_scripted_module_makes_is_counted() -> None:
    scripted = torch.jit.script(Scripted())
    assert measured(lambda: scripted(torch.ones(256, 4))).peak.total > 2 * 4096
