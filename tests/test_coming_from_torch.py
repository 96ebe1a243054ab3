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
SOURCES = (
    "torch.profiler._memory_profiler",
    "torch._inductor.fx_passes.memory_estimator",
    "torch.profiler._utils",
    "torch.autograd.profiler",
    "torch.autograd.profiler_util",
    "torch.profiler.profiler",
)
"""The modules that the page has a table of."""

PUBLIC = {*pytest_torchmem.__all__, "allocator", "hooks", "torch_names", "types"}

NAME = re.compile(r"`([\w.]+)`")
TORCHS_OWN = "torch's own"
"""How the cell of a name begins that has nothing to do with memory."""


def rows_of(source: str) -> dict[str, str]:
    """Return the counterpart of each name of a module: the same name here, or a row's text."""
    section = PAGE.partition(f"\n### {source}\n")[2].partition("\n#")[0]
    found: dict[str, str] = {}
    for module, same in re.findall(r"^The same names in `(.*?)`: (.*)\.$", section, re.MULTILINE):
        found |= {name: f"`{module}.{name}`" for name in NAME.findall(same)}
    for names, here in re.findall(r"^\| (`.*?`) \| (.*?) \|$", section, re.MULTILINE):
        found |= dict.fromkeys(NAME.findall(names), here)
    return found


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
def test_every_public_name_of_torchs_source_is_in_the_table_and_no_other(source):
    torch = pytest.importorskip("torch")
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the table is that of torch 2.13")
    spec = importlib.util.find_spec(source)
    assert spec is not None
    assert spec.origin is not None
    told, there = set(rows_of(source)), public_names(Path(spec.origin).read_text())
    assert there <= told
    # A class has methods of a private one that it is made from.
    assert [name for name in told - there if not is_there(f"{source}.{name}")] == []


@pytest.mark.parametrize("source", SOURCES)
def test_every_counterpart_can_be_imported(source):
    pytest.importorskip("torch")
    for name, here in rows_of(source).items():
        counterparts = NAME.findall(here)
        assert counterparts or here.startswith(TORCHS_OWN), name
        assert [path for path in counterparts if not is_there(f"pytest_torchmem.{path}")] == [], (
            name
        )
        # What is private may change in any release, and no row names it.
        assert {path.partition(".")[0] for path in counterparts} <= PUBLIC, name


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
