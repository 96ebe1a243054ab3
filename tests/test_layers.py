"""The architecture, held by its imports: who may import whom, and what is never imported early."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "pytest_torchmem"

# Modules directly in the package that hold plain values, and may be imported by every room.
VALUES = {"units", "errors", "contexts", "trace", "static_graph"}
# Modules directly in the package that wire rooms together.
WIRING = {
    "collecting",
    "estimates",
    "exports",
    "measurement",
    "measuring",
    "provenance",
    "ranks",
    "result_files",
}
ALLOWED = {
    "record": VALUES,
    "analysis": VALUES,
    "report": VALUES | {"analysis"},
    "plugin": VALUES | WIRING | {"analysis", "report", "record"},
    "cli": VALUES | WIRING | {"analysis", "report", "plugin"},
}
THIRD_PARTY = {"torch": "record", "pytest": "plugin", "_pytest": "plugin"}


def imported(source: str) -> Iterator[str]:
    """Every module that a source imports, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
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
        if THIRD_PARTY.get(top, room) != room:
            broken.append(f"{room} imports {name}")
        inner = rest.partition(".")[0]
        if top == PACKAGE.name and inner in rooms - {room} - ALLOWED[room]:
            broken.append(f"{room} imports {name}")
    return broken


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    for file in files:
        assert not broken_rules(room, file.read_text()), file


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("analysis", "import torch"),
        ("analysis", "from pytest_torchmem.record import kineto"),
        ("report", "import pytest"),
        ("record", "from pytest_torchmem.analysis.results import Result"),
        ("analysis", "def late():\n    from pytest_torchmem import plugin"),
    ],
)
def test_a_forbidden_import_is_found(room: str, line: str) -> None:
    assert broken_rules(room, line)


def test_modules_between_the_rooms_import_torch_nowhere() -> None:
    for file in PACKAGE.glob("*.py"):
        tops = {name.partition(".")[0] for name in imported(file.read_text())}
        assert not tops & THIRD_PARTY.keys(), file


def loaded_after(code: str) -> set[str]:
    """Which of torch and numpy a fresh interpreter has loaded after running some code."""
    code += "\nimport sys; print(*({'torch', 'numpy'} & sys.modules.keys()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


UNUSED_PLUGIN = """
import pathlib, tempfile, pytest
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "test_plain.py").write_text("def test_nothing(): pass")
assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", str(folder)]) == 0
"""


@pytest.mark.parametrize("code", ["import pytest_torchmem", UNUSED_PLUGIN])
def test_what_nobody_asked_for_is_not_imported(code: str) -> None:
    assert loaded_after(code) == set()


def test_an_early_import_would_be_noticed() -> None:
    assert loaded_after("import pytest_torchmem; pytest_torchmem.analyze") >= {"numpy"}
