"""The table of torch's names: it has each of the installed torch, and what it names is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import pytest_torchmem
from tests.documents import DOCS

PAGE = (DOCS / "coming-from-torch.md").read_text(encoding="utf-8")
SOURCES = {
    "torch.profiler._memory_profiler": "memory_profiler",
    "torch._inductor.fx_passes.memory_estimator": "memory_estimator",
    "torch.profiler._utils": "utils",
    "torch.autograd.profiler": "profiler",
    "torch.autograd.profiler_util": "",
    "torch.profiler.profiler": "profiler",
}
"""The modules that the page has a table of, and ours with the same names."""

PUBLIC = {*pytest_torchmem.__all__, "allocator", "hooks", "torch_names", "types"}

NAME = re.compile(r"`([\w.]+)`")
PATTERN = re.compile(r"`([\w.]+?(?:\.\*)?)`")
TORCHS_OWN = "torch's own"
"""How the cell of a name begins that has nothing to do with memory."""


def rows_of(source: str) -> dict[str, str]:
    """Return the counterpart of each name in a module's table; `A.*` is all of a class."""
    section = PAGE.partition(f"\n### {source}\n")[2].partition("\n#")[0]
    found: dict[str, str] = {}
    for names, here in re.findall(r"^\| (`.*?`) \| (.*?) \|$", section, re.MULTILINE):
        found |= dict.fromkeys(PATTERN.findall(names), here)
    return found


def counterpart(name: str, rows: dict[str, str], module: str) -> str:
    """Return what the page says of a name: a row's text, or the same name in our module."""
    if name in rows:
        return rows[name]
    of_class = f"{name.partition('.')[0]}.*"
    return rows.get(of_class, f"`torch_names.{module}.{name}`")


def names_in(source: str) -> set[str]:
    """Return the public names of a module of the installed torch."""
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table is that of torch 2.13")
    spec = importlib.util.find_spec(source)
    assert spec is not None
    assert spec.origin is not None
    return public_names(Path(spec.origin).read_text())


def public_names(text: str) -> set[str]:
    """The public functions and classes of a source, and the public methods of the latter."""
    defined = (ast.ClassDef, ast.FunctionDef)
    found = set(re.findall(r"^([a-z]\w*) = functools\.partial\(", text, re.MULTILINE))
    for node in ast.parse(text).body:
        if isinstance(node, defined) and not node.name.startswith("_"):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {
                f"{node.name}.{method.name}"
                for method in inner
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
            }
    return found


def is_there(path: str) -> bool:
    """Whether a dotted path leads to something."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name) and name not in getattr(found, "__annotations__", {}):
                return False
            found = getattr(found, name, None)
        return True
    return False


@pytest.mark.parametrize("source", SOURCES)
def test_every_public_name_of_torchs_source_has_a_counterpart(source):
    for name in names_in(source):
        here = counterpart(name, rows_of(source), SOURCES[source])
        counterparts = NAME.findall(here)
        assert counterparts or here.startswith(TORCHS_OWN), name
        assert [path for path in counterparts if not is_there(f"pytest_torchmem.{path}")] == [], (
            name
        )
        # What is private may change in any release, and no row names it.
        assert {path.partition(".")[0] for path in counterparts} <= PUBLIC, name


@pytest.mark.parametrize("source", SOURCES)
def test_every_name_in_a_table_is_torchs(source):
    names_in(source)
    told = {name.removesuffix(".*") for name in rows_of(source)}
    assert [name for name in told if not is_there(f"{source}.{name}")] == []


def test_a_name_without_a_row_has_the_same_name_here():
    assert counterpart("Key", {"Value": "`load`"}, "utils") == "`torch_names.utils.Key`"
    assert counterpart("Key.of", {"Key.*": "`load`"}, "utils") == "`load`"


def test_a_name_that_leads_nowhere_is_found():
    assert is_there("pytest_torchmem.estimate")
    assert is_there("pytest_torchmem.values.results.Result.peak")
    assert not is_there("pytest_torchmem.estimates")
    assert not is_there("pytest_torchmem.torch_names.memory_profiler.OpTree.bfs")
    assert not is_there("nowhere.at_all")


def test_public_names_are_those_of_functions_classes_and_methods():
    text = (
        "class A:\n    def b(self): ...\n    def _c(self): ...\ndef d(): ...\ndef _e(): ...\nF = 1"
    )
    assert public_names(text) == {"A", "A.b", "d"}
