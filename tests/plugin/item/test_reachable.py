"""A failure names no changed line that its test cannot reach."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_torchmem.plugin.item.reachable import reached_by
from pytest_torchmem.values.findings import CodeLines

NET = """
import functools

def shared(x):
    return x

def unused(x):
    return x

class Base:
    def step(self):
        return shared(1)

class Net(Base):
    def forward(self):
        return 2

@functools.lru_cache
def cached(x):
    return load("small.json")

def load(name):
    return name

SIZE = 4
"""
TEST = """
import net
from net import cached
from other import LIMIT as IGNORED

def weights():
    return 1

def test_net(weights):
    return net.Net().step()

def test_cached():
    return cached(1)

def test_late():
    import late
    return late.work()
"""
LATE = "def work():\n    return 1\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(tmp_path)
    texts = {"net": NET, "late": LATE, "other": "LIMIT = 1\n", "test_net": TEST}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    spec = importlib.util.spec_from_file_location("test_net", tmp_path / "test_net.py")
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["test_net"] = loaded
    spec.loader.exec_module(loaded)
    importlib.import_module("late")
    yield loaded
    for name in texts:
        sys.modules.pop(name, None)


def line_of(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


PLACES = {
    "shared": CodeLines("net.py", line_of(NET, "def shared") + 1, line_of(NET, "def shared") + 1),
    "unused": CodeLines("net.py", line_of(NET, "def unused") + 1, line_of(NET, "def unused") + 1),
    "forward": CodeLines("net.py", line_of(NET, "return 2"), line_of(NET, "return 2")),
    "cached": CodeLines("net.py", line_of(NET, "small.json"), line_of(NET, "small.json")),
    "size": CodeLines("net.py", line_of(NET, "SIZE"), line_of(NET, "SIZE")),
    "late": CodeLines("late.py", 2, 2),
    "other": CodeLines("other.py", 1, 1),
    "fixture": CodeLines("test_net.py", line_of(TEST, "return 1"), line_of(TEST, "return 1")),
    "json": CodeLines("conf/small.json", 1, 1),
    "yaml": CodeLines("conf/large.yaml", 1, 1),
}


def item_of(function: Any, *plugins: ModuleType, **others: object) -> Any:
    manager = SimpleNamespace(get_plugins=lambda: {object(), *plugins})
    path = Path(function.__code__.co_filename)
    config = SimpleNamespace(pluginmanager=manager)
    return SimpleNamespace(function=function, path=path, config=config, **others)


def reached(module: ModuleType, name: str, *fixtures: str) -> set[str]:
    definitions = {f: [SimpleNamespace(func=getattr(module, f))] for f in fixtures}
    info = SimpleNamespace(name2fixturedefs=definitions)
    item = item_of(getattr(module, name), _fixtureinfo=info)
    assert module.__file__
    found = reached_by(item, Path(module.__file__).parent, tuple(PLACES.values()))
    return {name for name, place in PLACES.items() if place in found}


def test_what_a_test_calls_is_reached_with_its_bases(module):
    assert reached(module, "test_net") == {"shared", "forward"}


def test_fixtures_are_reached(module):
    assert "fixture" in reached(module, "test_net", "weights")


def test_a_function_behind_a_cache_is_reached_with_the_settings_that_it_names(module):
    assert reached(module, "test_cached") == {"cached", "json"}


def test_a_module_that_the_test_itself_imports_is_reached(module):
    assert reached(module, "test_late") == {"late"}


def test_the_nearest_to_the_test_come_first(module):
    item = item_of(module.test_net)
    places = [PLACES["shared"], PLACES["forward"]]
    found = reached_by(item, Path(module.__file__).parent, places)
    assert [*found] == [PLACES["forward"], PLACES["shared"]]


CONFTEST = """
import gc
gc.isenabled()
LIMIT = 3

def pytest_runtest_setup(item):
    gc.isenabled()

def unused():
    return 1
"""


@pytest.mark.parametrize(("folder", "lines"), [(".", {3, 7}), ("elsewhere", set())])
def test_what_the_conftest_of_a_test_does_is_reached(module, folder, lines):
    start = Path(module.__file__).parent
    path = start / folder / "conftest.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(CONFTEST)
    spec = importlib.util.spec_from_file_location("conftest_of_test", path)
    assert spec
    assert spec.loader
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    file = path.relative_to(start).as_posix()
    places = [CodeLines(file, line, line) for line in (3, 4, 7, 10)]
    found = reached_by(item_of(module.test_net, conftest), start, places)
    assert {place.first for place in found} == lines


def test_what_is_no_function_reaches_everything(module):
    places = tuple(PLACES.values())
    item: Any = SimpleNamespace()
    assert reached_by(item, Path(module.__file__).parent, places) == places


AT_IMPORT = {
    "pack/__init__.py": "from .again import DEPTH\nSEED = 1\nimport settings\nsettings.set(1)\n",
    "pack/again.py": "from .sizes import *\nOTHER = 1\n",
    "pack/sizes.py": "BASE = 2\nDEPTH = BASE * 2\nUNUSED = 3\nGRID = {}\nGRID['a'] = 4\n",
    "pack/options.py": (
        "from dataclasses import dataclass\n\n@dataclass\nclass Options:\n    width: int = 8\n\n"
        "class Unused:\n    width = 8\n"
    ),
    "pack/build.py": (
        "from . import sizes\nKNOWN = {}\n\ndef register(name, rate=0.1):\n"
        "    def add(f):\n        KNOWN[name] = f\n        return f\n    return add\n\n"
        "@register('sgd', rate=0.2)\ndef sgd(momentum=sizes.BASE):\n    return 1\n\n"
        "if __name__ == '__main__':\n    print(1)\n"
    ),
    "pack/alone.py": "LATER = 1\n",
    "test_pack.py": (
        "import pack\nfrom pack.options import Options\nfrom pack.build import KNOWN\n\n"
        "def test_depth():\n    return pack.DEPTH\n\n"
        "def test_options():\n    return Options()\n\n"
        "def test_known():\n    return KNOWN['sgd']()\n\n"
        "def test_by_text():\n    return getattr(pack, 'DEPTH')\n\n"
        "def test_grid():\n    from pack.sizes import GRID\n    return GRID['a']\n"
    ),
    "settings.py": "def set(x): ...\n",
}


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    for name, text in AT_IMPORT.items():
        (tmp_path / name).write_text(text)
    yield importlib.import_module("test_pack")
    for name in [n for n in sys.modules if n.split(".")[0] in ("pack", "test_pack", "settings")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("test", "lines"),
    [
        # A constant behind a re-export and a star, and the one that it is computed of.
        ("test_depth", {"pack/sizes.py:1", "pack/sizes.py:2", "pack/__init__.py:1"}),
        ("test_by_text", {"pack/sizes.py:1", "pack/sizes.py:2", "pack/__init__.py:1"}),
        # What a class body gives its attributes.
        ("test_options", {f"pack/options.py:{n}" for n in (1, 3, 4, 5)}),
        # A registry: its decorator, with what that has by default, and a function's default.
        (
            "test_known",
            {f"pack/build.py:{n}" for n in (2, 4, 5, 6, 7, 8, 10, 11, 12)}
            | {"pack/build.py:1", "pack/sizes.py:1"},
        ),
        ("test_grid", {"pack/sizes.py:4", "pack/sizes.py:5"}),
    ],
)
def test_what_ran_at_import_is_reached_where_its_name_is_used(packed, test, lines):
    item = item_of(getattr(packed, test))
    places = [
        CodeLines(file, line, line)
        for file, text in AT_IMPORT.items()
        if file != "test_pack.py"
        for line, code in enumerate(text.splitlines(), 1)
        if code.strip()
    ]
    found = reached_by(item, Path(packed.__file__).parent, places)
    effects = {"pack/__init__.py:4"}
    assert {place.text for place in found} == lines | effects
