"""The tool that changes the code and asks which tests notice."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tools.mutations import Tests as CoveringTests
from tools.mutations import draw, is_noticed, mutations_of, run

pytestmark = pytest.mark.slow

SOURCE = b"""\
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import never_run

LIMIT: "3" = 8

def at_least(x, y=1):
    if x < LIMIT and not y:
        raise ValueError(f"gr\xc3\xb6\xc3\x9fer {y + 1}")
    return list(zip([x + 2], [True], strict=True))
"""


def changed() -> list[str]:
    """Each line as a mutation leaves it, without its indentation."""
    return [
        m.applied(SOURCE).decode().splitlines()[m.line - 1].strip()
        for m in mutations_of("a.py", SOURCE)
    ]


def test_each_kind_of_place_is_changed_and_what_never_runs_is_not():
    assert sorted(changed()) == sorted(
        [
            'LIMIT: "3" = 9',
            "def at_least(x, y=2):",
            "if (x < LIMIT or not y):",
            "if (x <= LIMIT) and not y:",
            "if x < LIMIT and (y):",
            "pass",
            'raise ValueError(f"größer {(y - 1)}")',
            'raise ValueError(f"größer {y + 2}")',
            "return None",
            "return list(zip([(x - 2)], [True], strict=True))",
            "return list(zip([x + 3], [True], strict=True))",
            "return list(zip([x + 2], [False], strict=True))",
        ]
    )


def test_every_mutation_is_python_and_differs_from_the_source():
    for mutation in mutations_of("a.py", SOURCE):
        mutated = mutation.applied(SOURCE)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(SOURCE))


def test_a_default_is_run_when_the_module_is_imported_and_a_body_when_it_is_called():
    inside = {m.line: m.in_function for m in mutations_of("a.py", SOURCE)}
    assert inside == {6: False, 8: False, 9: True, 10: True, 11: True}


def test_a_seed_draws_the_same_and_each_line_at_most_once(tmp_path):
    (tmp_path / "a.py").write_bytes(SOURCE)
    first, again, other = (draw(tmp_path, ["a.py"], 5, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({m.line for m in first}) == len(first) == 5
    assert draw(tmp_path, ["."], 2, 1) == first[:2]


MAP = CoveringTests(
    by_line={"a.py:9": ["t.py::slow", "t.py::quick"], "a.py:10": ["fixture.py"]},
    seconds={"t.py::slow": 5.0, "t.py::quick": 1.0, "fixture.py::one": 2.0, "u.py::other": 0.1},
)


@pytest.mark.parametrize(
    ("line", "limit_s", "tests"),
    [
        (9, 100, ["t.py::quick", "t.py::slow"]),
        (9, 0.5, ["t.py::quick"]),
        (10, 100, ["fixture.py::one"]),  # what a fixture runs counts for all of its file
        (11, 100, []),
        (6, 100, ["t.py::quick", "fixture.py::one", "t.py::slow"]),  # all of the module
    ],
)
def test_the_fastest_tests_that_execute_the_line_are_chosen(line, limit_s, tests):
    mutation = next(m for m in mutations_of("a.py", SOURCE) if m.line == line)
    assert MAP.of(mutation, limit_s) == tests


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "mutated.py").write_text("def at_least(x):\n    return x > 2\n")
    (tmp_path / "test_mutated.py").write_text(
        "from mutated import at_least\n\ndef test_above(): assert at_least(3)\n"
    )
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_what_a_test_notices_is_killed_what_none_does_survives_and_the_file_is_as_it_was(tree):
    before = (tree / "mutated.py").read_bytes()
    mutations = mutations_of("mutated.py", before)
    tests = CoveringTests(
        {"mutated.py:2": ["test_mutated.py::test_above"]}, {"test_mutated.py::test_above": 0.1}
    )
    found = run(tree, mutations, tests, limit_s=10)
    fates = {m.new: fate for fate, members in found.items() for m in members}
    assert fates == {"return None": "killed", "(x >= 2)": "survived", "3": "killed"}
    assert (tree / "mutated.py").read_bytes() == before
    assert is_noticed(tree, ["test_mutated.py::test_gone"], 0.1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_plugin_that_fails_ends_the_forked_process_there(tree):
    (tree / "conftest.py").write_text("def pytest_addoption(parser): raise RuntimeError\n")
    parent = os.getpid()
    try:
        assert is_noticed(tree, ["test_mutated.py::test_above"], 0.1)
    finally:
        if os.getpid() != parent:  # it would go on with all tests, and remove the copied tree
            (tree / "went on").touch()
            os._exit(1)
    assert not (tree / "went on").exists()
