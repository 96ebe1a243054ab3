"""The calls around a compilation are not recorded; what is allocated in them is."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from functools import cache
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import CompilationWatch
from pytest_torchmem.record.torch_api import compiler
from pytest_torchmem.values.results import Result
from tests.measured import measured
from tests.record.patches.profiled import profiled

pytestmark = pytest.mark.filterwarnings("ignore")


def code_of(name: str) -> CodeType:
    function = inspect.unwrap(pkgutil.resolve_name(name))
    code: CodeType = function.__code__
    return code


def seen_beneath(codes: set[CodeType], body: Callable[[], object]) -> set[CodeType]:
    """Return those of some functions beneath which a profile function sees a call."""
    found: set[CodeType] = set()

    def note(frame: FrameType | None, event: str, _: object) -> None:
        while frame is not None and event == "call":
            found.update(codes & {frame.f_code})
            frame = frame.f_back

    profiled(note, body)
    return found


@cache
def search_of_backends() -> Any:
    """What looks, once per process, for all backends that are installed; before it is patched."""
    return importlib.import_module("torch._dynamo.backends.registry")._lazy_import


def compile_and_call() -> None:
    torch.compiler.reset()
    search_of_backends().cache_clear()
    torch._dynamo.list_backends()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def test_no_call_beneath_what_prepares_a_compilation_is_followed() -> None:
    codes = set(map(code_of, compiler.PREPARING))
    compile_and_call()
    assert seen_beneath(codes, compile_and_call) == codes
    with Installed() as patches:
        CompilationWatch(lambda: None).install(patches)
        assert seen_beneath(codes, compile_and_call) == set()


class Keeping(nn.Module):
    """Makes a tensor where dynamo asks for what a module of its own would have."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        self.made.append(torch.ones(256, 256))
        return super().__getattr__(name)


@pytest.fixture
def prepared() -> Result:
    """The numbers of a body that prepares a compilation, and makes tensors there."""
    torch.compile(nn.Linear(2, 2), backend="eager")
    module = Keeping()
    result = measured(lambda: torch.compile(module, backend="eager"))
    assert module.made
    assert result.peak.total == sum(made.nbytes for made in module.made)
    return result


def test_what_is_allocated_while_a_compilation_is_prepared_is_counted(prepared: Result) -> None:
    assert prepared.retained.total == prepared.peak.total


def test_what_is_allocated_there_has_the_users_line(prepared: Result) -> None:
    files = {cause.source and cause.source.file for cause in prepared.peak.live}
    assert files == {__file__}
