"""The architecture, held by its imports: who may import whom, and what is never imported early."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tools.house import in_circles, modules_in_circles

PACKAGE = Path(__file__).resolve().parent.parent / "pytest_torchmem"

# What each room may import beside itself: only rooms that stand above it here.
ALLOWED = {
    "contexts": set(),
    "values": {"contexts"},
    "building": set(),
    "simulate": {"values", "contexts", "building"},
    "record": {"values", "contexts", "building"},
    "analysis": {"values", "contexts"},
    "store": {"values", "contexts", "analysis"},
    "report": {"values", "contexts", "analysis", "store"},
    "measuring": {"values", "contexts", "simulate", "record", "analysis", "store", "report"},
    "torch_names": {"values", "contexts", "record", "analysis", "report", "measuring"},
    "plugin": {
        *("values", "contexts", "simulate", "record", "analysis", "report", "store", "measuring"),
    },
    "cli": {"values", "contexts", "simulate", "analysis", "report", "store", "measuring"},
    # Public names alone, from where they are made.
    "allocator": {"values", "analysis"},
    "hooks": {"analysis", "plugin"},
    "types": {"values", "analysis", "measuring"},
}
THIRD_PARTY = {"torch": {"record", "torch_names"}, "pytest": {"plugin"}, "_pytest": {"plugin"}}


# Each file of the package is asked about four times.
parsed = cache(ast.parse)


@pytest.fixture(scope="module", autouse=True)
def _no_source_stays_parsed() -> Iterator[None]:
    # Half a million nodes, which each look at all objects would find in all tests after these.
    yield
    parsed.cache_clear()


def imported(source: str) -> Iterator[str]:
    """Every module that a source imports, wherever the import stands."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide where a name comes from"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def broken_rules(room: str, source: str) -> list[str]:
    """What the imports of a source in a room are not allowed to be."""
    rooms = {path.name for path in PACKAGE.iterdir()} | {path.stem for path in PACKAGE.iterdir()}
    broken = []
    for name in imported(source):
        top, _, rest = name.partition(".")
        if room not in THIRD_PARTY.get(top, {room}):
            broken.append(f"{room} imports {name}")
        inner = rest.partition(".")[0]
        # The top level hands on what the rooms have; only commands stand above it.
        at_top = not inner and room != "cli"
        if top == PACKAGE.name and (at_top or inner in rooms - {room} - ALLOWED[room]):
            broken.append(f"{room} imports {name}")
    return broken


def test_the_rooms_have_an_order() -> None:
    """No room may import one that may import it, by whatever way."""
    above: set[str] = set()
    for room, allowed in ALLOWED.items():
        assert allowed <= above, room
        above.add(room)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
    for file in files:
        assert not broken_rules(room, file.read_text()), file


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("analysis", "import torch"),
        ("analysis", "from pytest_torchmem.record import kineto"),
        ("report", "import pytest"),
        ("record", "from pytest_torchmem.analysis.pipeline import MemoryProfile"),
        ("analysis", "def late():\n    from pytest_torchmem import plugin"),
        ("store", "from pytest_torchmem import __version__"),
    ],
)
def test_a_forbidden_import_is_found(room: str, line: str) -> None:
    assert broken_rules(room, line)


def test_the_top_level_wires_nothing() -> None:
    """Only the public names and the lowest rooms, of one file each, stand beside the rooms."""
    public = {"__init__", "__main__", "allocator", "hooks", "types"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*public, "building", "contexts"}


def in_a_circle(sources: dict[str, str]) -> set[str]:
    """Return the modules that import themselves, by way of others."""
    return in_circles({name: ast.parse(source) for name, source in sources.items()})


def test_no_module_is_in_a_circle_of_imports() -> None:
    trees = {file: parsed(file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert not modules_in_circles(trees)


def test_a_circle_is_found() -> None:
    circle = {
        "a": "from b import x",
        "b": "def late():\n    from c import y",
        "c": "from a import z",
    }
    assert in_a_circle({**circle, "d": "from a import x"}) == {"a", "b", "c"}
    checked = "if TYPE_CHECKING:\n    from a import x"
    assert in_a_circle({"a": "from b import y", "b": checked}) == {"a", "b"}


def test_a_folder_has_at_most_a_dozen_files() -> None:
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    counts = {folder.name: len(set(folder.glob("*.py"))) for folder in folders}
    # A room's own docstring stands in its __init__.py.
    assert not {name: count for name, count in counts.items() if count > 12 + 1}


def test_each_folder_of_the_package_has_one_of_tests() -> None:
    folders = {file.parent.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py")}
    tests = Path(__file__).parent
    assert not {folder for folder in folders if not any((tests / folder).glob("**/test_*.py"))}


def class_names_used_twice(sources: dict[str, str]) -> set[str]:
    found = [
        node.name.lstrip("_")
        for source in sources.values()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.ClassDef)
    ]
    return {name for name in found if found.count(name) > 1}


def test_a_module_has_one_name_in_the_whole_package() -> None:
    """But for the modules that have torch's names, and for those that have public names alone."""
    ours = (
        path
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "torch_names" and path.parent != PACKAGE
    )
    names = [path.stem for path in ours if not path.stem.startswith("__")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_class_has_one_name_in_the_whole_package() -> None:
    """But for those that have torch's names."""
    ours = (file for file in PACKAGE.rglob("*.py") if file.parent.name != "torch_names")
    assert not class_names_used_twice({str(f): f.read_text() for f in ours})


def test_a_class_name_used_twice_is_found() -> None:
    assert class_names_used_twice({"a": "class Span: ...", "b": "class _Span: ..."}) == {"Span"}


def public_functions_named_twice(sources: dict[str, str]) -> set[str]:
    """The public functions of modules that have a namesake in another module."""
    found = [
        name
        for source in sources.values()
        for name in {n.name for n in parsed(source).body if isinstance(n, ast.FunctionDef)}
        if not name.startswith("_")
    ]
    return {name for name in found if found.count(name) > 1}


def test_a_public_function_has_one_name_in_the_whole_package() -> None:
    found = public_functions_named_twice({str(f): f.read_text() for f in PACKAGE.rglob("*.py")})
    assert found == set()


def test_a_public_function_named_twice_is_found() -> None:
    sources = {"a": "def find(): ...\ndef _own(): ...", "b": "def find(): ...\ndef _own(): ..."}
    assert public_functions_named_twice(sources) == {"find"}


def loaded_after(code: str) -> set[str]:
    """Which of torch and numpy a fresh interpreter has loaded after running some code."""
    code += "\nimport sys; print(*({'torch', 'numpy'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


UNUSED_PLUGIN = """
import pathlib, tempfile, pytest
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "test_plain.py").write_text("def test_nothing(): pass")
assert pytest.main(["-q", "-p", "no:cacheprovider", str(folder)]) == 0
"""


@pytest.mark.parametrize("code", ["import pytest_torchmem", UNUSED_PLUGIN])
def test_what_nobody_asked_for_is_not_imported(code: str) -> None:
    assert loaded_after(code) == set()


def test_an_early_import_would_be_noticed() -> None:
    assert loaded_after("import pytest_torchmem; pytest_torchmem.analyze") >= {"numpy"}


def uses_of_any(source: str) -> int:
    """How often a source says that it does not know a type."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(parsed(source)))


def test_types_are_known_outside_the_room_of_torchs_private_names() -> None:
    """What a user's program takes and returns is left, and what a JSON document holds.

    The modules with torch's names take events of torch, whose classes have no public names.
    """
    torchs = {"torch_api", "torch_names"}
    files = [file for file in PACKAGE.rglob("*.py") if file.parent.name not in torchs]
    assert sum(uses_of_any(file.read_text()) for file in files) < 100
    assert uses_of_any("def f(a: Any, b: list[Any]) -> int: ...") == 2


#: torch's compiler and what brings half of it along: with it in memory each look at everything that
#: is alive takes twice as long.
HEAVY = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.fx.experimental.symbolic_shapes",
    "torch.onnx",
    "transformers",
)


def heavy_imports(source: str) -> list[str]:
    """What a source imports of these when it is itself imported."""
    if not any(name.rpartition(".")[2] in source for name in HEAVY):
        return []  # to parse all tests takes a second
    return [
        name
        for node in ast.parse(source).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(ast.unparse(node))
        if name.startswith(HEAVY)
    ]


def test_no_module_of_tests_imports_torchs_compiler() -> None:
    """pytest imports them all before the first test; a test imports what it needs."""
    tests = PACKAGE.parent / "tests"
    # Those of stress are run in processes of their own.
    files = [file for file in tests.rglob("*.py") if file.parent.name != "stress"]
    assert {file.name: heavy for file in files if (heavy := heavy_imports(file.read_text()))} == {}
    assert heavy_imports("from torch._dynamo import config\nimport torch")
    assert not heavy_imports("def f():\n    import torch._dynamo")


def test_no_call_in_a_module_of_tests_has_torch_import_its_compiler(
    imported_before_a_test: frozenset[str],
) -> None:
    """As ``@torch.compiler.disable`` does to a function of a module."""
    assert "pytest" in imported_before_a_test
    assert "torch._dynamo" not in imported_before_a_test
