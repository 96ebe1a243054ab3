"""The examples' numbers are the same however they are run, and their baselines fit any machine."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from examples import repeat
from examples.repeat import arguments, collected, differences

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
BASELINES = sorted((ROOT / "examples" / "__torchmem__").rglob("*.json"))
ORIGINS = [path.with_suffix(".origins") for path in BASELINES]
MODULES = [path.relative_to(ROOT).as_posix() for path in repeat.MODULES]
DIGITS = "examples/test_digits.py"


def measure(folder: Path, *tests: str) -> dict[str, bytes]:
    repeat.measure(list(tests), folder)
    return repeat.stored(folder)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return measure(tmp_path_factory.mktemp("first"), DIGITS)


@pytest.mark.nightly
def test_numbers_do_not_depend_on_the_order_of_tests(
    measured: dict[str, bytes], tmp_path: Path
) -> None:
    node_ids = collected(Path(DIGITS))
    (shuffled,) = arguments(node_ids, 2)
    assert shuffled != node_ids
    assert sorted(shuffled) == sorted(node_ids)
    assert measure(tmp_path, *shuffled) == measured


def totals(content: bytes) -> dict[str, int]:
    """The total of each entry of a baseline file, which is a list of rows."""
    rows = json.loads(content)["entries"]
    return {row[0]: row[2] for row in rows if row[1:2] == ["work"]}


def test_a_baseline_in_a_folder_of_its_own_says_what_one_beside_the_module_says(
    measured: dict[str, bytes],
) -> None:
    ((name, content),) = measured.items()
    beside = ROOT / "examples" / "__torchmem__" / name.replace("examples/", "")
    if not beside.exists():
        pytest.skip("the examples have no baselines for this torch or device")
    found = totals(content)
    assert found
    assert found == totals(beside.read_bytes())


def test_the_other_examples_pass_with_the_baselines_beside_them() -> None:
    """In a process of their own: what they import makes each search of the heap longer."""
    assert DIGITS in MODULES
    others = [module for module in MODULES if module != DIGITS]
    assert " passed" in repeat.run_pytest(*others)


def test_a_number_that_differs_is_shown() -> None:
    reference = {"a.json": b'{\n"total": 1\n}'}
    assert differences(reference, {"a.json": b'{\n"total": 1\n}'}) == []
    lines = differences(reference, {"a.json": b'{\n"total": 2\n}'})
    assert '-"total": 1' in lines
    assert '+"total": 2' in lines


@pytest.mark.parametrize("path", ORIGINS, ids=lambda path: path.name)
def test_a_baseline_holds_no_path_of_a_machine(path: Path) -> None:
    files = re.findall(r'"source": \["([^"]*)"', path.read_text())
    assert files
    assert [file for file in files if file.startswith(("/", "..")) or ":" in file] == []


def test_every_example_has_a_committed_baseline() -> None:
    modules = {module.stem for module in (ROOT / "examples").glob("test_*.py")}
    assert {path.stem for path in BASELINES} == modules


def test_examples_run_without_what_only_tests_install() -> None:
    """README's first command installs the examples' packages; their conftest needs no other.

    xdist is imported by a hook that only xdist calls.
    """

    names: set[str] = set()
    for file in (ROOT / "conftest.py", ROOT / "tests/project.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(str(node.module))
    roots = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
    # Two come with the package itself.
    assert roots <= {"_pytest", "pytest", "pytest_torchmem", "xdist", "filelock", "tabulate"}
