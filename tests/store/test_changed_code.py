"""Of changed Python code those statements count that do something else than before."""

from __future__ import annotations

import pytest

from pytest_torchmem.store.changed_code import changed_statements, renamed_functions

BEFORE = '''\
"""Nets."""
import torch
from torch import nn

LIMIT = 4


@torch.no_grad()
def run(net, x):
    """Run it."""
    try:
        y = net(x)
    except ValueError:
        y = None
    return y


class Net(nn.Module):
    def forward(self, x, scale=1):
        match scale:
            case 1:
                return x
        return x * scale
'''


def changed(old: str, new: str) -> tuple[list[int], list[int]]:
    """The lines that are gone and those that came where ``old`` became ``new``."""
    assert BEFORE.count(old) == 1
    found = changed_statements(BEFORE, BEFORE.replace(old, new))
    assert found is not None
    return sorted(found[0]), sorted(found[1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Run it."""', '"""Run the net."""'),
        ('    """Run it."""\n', ""),
        ("x * scale", "(x  *  # for now\n                scale)"),
        ("LIMIT = 4\n", "LIMIT = 4\nFLOOR: int = 3\n"),
        ("LIMIT = 4\n", ""),
        ("import torch\n", "import math\nimport torch\n\ndef up(x):\n    return math.ceil(x)\n"),
        ("from torch import nn\n", "from torch import fx, nn\n"),
        ("class Net", "def more(x):\n    return x.clone()\n\n\nclass Net"),
        ("class Net", "@parametrize\ndef test_more(x):\n    assert x\n\n\nclass Net"),
        ("class Net", "class TestNet:\n    def test(self):\n        run(1, 2)\n\n\nclass Net"),
    ],
)
def test_what_is_only_said_or_defined_is_no_change(old: str, new: str) -> None:
    assert changed(old, new) == ([], [])


@pytest.mark.parametrize(
    ("old", "new", "gone", "came"),
    [
        ("x * scale", "x.double() * scale", [23], [23]),
        ("scale=1", "scale=2", [19], [19]),
        ("@torch.no_grad()\n", "", [8, 9], [8]),
        ("case 1", "case 2", [21], [21]),
        ("except ValueError", "except TypeError", [13], [13]),
        ("    return y\n", "    CACHE.append(y)\n    return y\n", [], [15]),
        ("LIMIT = 4", "LIMIT = 5", [5], [5]),
        ("LIMIT = 4", "LIMIT = 4\ntorch.set_num_threads(1)", [], [6]),
        ("from torch import nn", "from torch import fx as nn", [3], [3]),
        ("from torch import nn", "from torch import nn\nimport nets.patches", [], [4]),
        ("LIMIT = 4", "LIMIT = 4\npytestmark = mark", [], [6]),
        ("LIMIT = 4", "LIMIT = 4\n__all__ = []", [], [6]),
        ("LIMIT = 4", "LIMIT = 4\nfor SIZE in ():\n    pass", [], [6, 7]),
        ("LIMIT = 4", "LIMIT = 4\nKEPT = torch.ones(3)", [], [6]),
        ("LIMIT = 4", "LIMIT = 4\n\ndef __getattr__(name):\n    return 1\n", [], [7, 8]),
        ("class Net", "@fixture(autouse=True)\ndef f():\n    x()\n\n\nclass Net", [], [18, 19, 20]),
        ("class Net", "def setup_module():\n    run(1, 2)\n\n\nclass Net", [], [18, 19]),
        ("class Net", "def run(net, x):\n    return x\n\n\nclass Net", [], [18, 19]),
        ("    def forward", "    keep = True\n\n    def forward", [], [19]),
    ],
)  # fmt: skip
def test_a_change_of_what_is_done_has_its_lines(
    old: str, new: str, gone: list[int], came: list[int]
) -> None:
    assert changed(old, new) == (gone, came)


def test_a_statement_that_moved_within_its_function_has_changed() -> None:
    was = "def f(x):\n    del x\n    g()\n    return 1\n"
    now = "def f(x):\n    g()\n    del x\n    return 1\n"
    found = changed_statements(was, now)
    assert found is not None
    assert found[0] or found[1]


def test_what_is_no_python_is_not_compared() -> None:
    assert changed_statements(BEFORE, "def (") is None


def test_a_function_is_known_by_its_code_where_no_other_is_as_near():
    was = """
class TestNet:
    def test_old(self, size):
        model = Net(size)
        model(torch.ones(3)).sum().backward()

def test_kept(): use(1)
def test_a(): use(1)
def test_b(): use(1)
def test_gone(): return [x for x in range(9) if x]
"""
    now = """
class TestNet:
    def test_new(self, size):
        model = Net(size)
        model(torch.ones(4)).sum().backward()

def test_kept(): return 5
def test_c(): use(1)
def test_d(): use(1)
def test_came():
    with open("file") as file: pass
"""
    assert renamed_functions(was, now) == {"TestNet::test_old": "TestNet::test_new"}
    assert renamed_functions(was, "def (") == {}


def test_of_functions_that_are_alike_each_is_the_one_that_is_nearest():
    was = "def test_a(): use(net, 4)\ndef test_b(): use(net, 4).relu()\n"
    now = "def test_d(): use(net, 8).relu()\ndef test_c(): use(net, 8)\n"
    assert renamed_functions(was, now) == {"test_a": "test_c", "test_b": "test_d"}
