"""The worked examples in the docstrings of `analysis` are true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

from pytest_torchmem import analysis

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(analysis.__path__, f"{analysis.__name__}.")
]


def examples_in(module: ModuleType) -> list[doctest.DocTest]:
    return [test for test in doctest.DocTestFinder().find(module) if test.examples]


@pytest.mark.parametrize("module", [*filter(examples_in, MODULES)], ids=lambda m: m.__name__)
def test_a_worked_example_is_true(module: ModuleType) -> None:
    runner = doctest.DocTestRunner()
    said: list[str] = []
    for example in examples_in(module):
        runner.run(example, out=said.append)
    assert not said


def test_examples_are_found() -> None:
    names = {example.name for module in MODULES for example in examples_in(module)}
    assert any(name.endswith("data_flow._versions") for name in names)
