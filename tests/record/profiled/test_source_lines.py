"""Lines of operators that were written as Python operators."""

from __future__ import annotations

import linecache
import os
from pathlib import Path

import numpy as np
import pytest

from pytest_torchmem.record.profiled import python_calls
from pytest_torchmem.record.profiled.python_calls import Gap, PythonCalls
from pytest_torchmem.record.profiled.source_lines import FunctionLines, functions_of, operator_lines
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.values.trace import EVENT

SOURCE = """\
def forward(self, x, y):
    x = self.first(x)
    y = x * 2 + y
    y -= x
    z = (
        x
        @ y
    )
    for _ in range(3):
        z = z + 1
        z = self.second(z)
    return z[0] / 2
"""


def function(file: str, first_line: int) -> FunctionLines:
    return functions_of(file).get(first_line, FunctionLines())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return str(path)


def test_operators_between_two_calls_are_found_in_the_order_they_run(file: str) -> None:
    names = ["aten::mul", "aten::add", "aten::sub_", "aten::matmul"]
    assert operator_lines(function(file, 1), names, after=2, before=11) == [3, 3, 4, 6]


def test_after_the_last_call_the_rest_of_the_function_is_looked_at(file: str) -> None:
    assert operator_lines(function(file, 1), ["aten::select", "aten::div"], after=11, before=0) == [
        12,
        12,
    ]


def test_where_a_loop_turns_its_beginning_comes_after_its_end(file: str) -> None:
    # The call on line 11 is before and after: z + 1 on line 10 ran in between.
    assert operator_lines(function(file, 1), ["aten::add"], after=11, before=11) == [10]


def test_what_the_source_does_not_explain_gets_the_line_of_the_call_before(file: str) -> None:
    assert operator_lines(function(file, 1), ["aten::native_dropout"], after=2, before=11) == [2]


def test_a_file_that_is_gone_gives_the_line_of_the_call_before() -> None:
    assert operator_lines(function("nowhere/model.py", 1), ["aten::add"], after=7, before=9) == [7]


def test_one_that_the_source_does_not_explain_takes_no_line_from_those_after_it(file: str) -> None:
    # x.T is an operator, too, and no node of the syntax says so.
    names = ["aten::numpy_T", "aten::mul", "aten::add"]
    assert operator_lines(function(file, 1), names, after=2, before=11) == [2, 3, 3]


LOOPS = """\
def forward(self, xs):
    for x in xs:
        y = x * 2
        z = y + 1
    y = y + sum(x * 5 for x in xs)
    return [
        x * 2
        for x in xs
    ], sum(
        x
        / 3
        for x in xs
    )
"""


def test_a_loop_without_a_call_turns_where_an_operator_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(LOOPS)
    names = ["aten::mul", "aten::add", "aten::mul", "aten::add"]
    assert operator_lines(function(str(path), 1), names, after=0, before=0) == [3, 4, 3, 4]


def test_a_comprehension_has_lines_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "loops.py"
    path.write_text(LOOPS)
    assert operator_lines(function(str(path), 6), ["aten::mul"] * 2, after=0, before=0) == [7, 7]
    assert operator_lines(function(str(path), 9), ["aten::div"], after=0, before=0) == [10]


def test_comprehensions_that_begin_on_one_line_have_each_its_operators(tmp_path: Path) -> None:
    path = tmp_path / "line.py"
    path.write_text("def f(xs):\n    return [x * 2 for x in xs], [x / 2 for x in xs]\n")
    assert operator_lines(function(str(path), 2), ["aten::div"], after=0, before=0) == [2]


def test_a_loop_turns_though_the_operator_comes_again_after_it(tmp_path: Path) -> None:
    path = tmp_path / "again.py"
    path.write_text(
        "def f(x, xs):\n    for y in xs:\n        x = x * y\n        x = x + 1\n    return x * 3\n"
    )
    names = ["aten::mul", "aten::add"] * 2 + ["aten::mul"]
    assert operator_lines(function(str(path), 1), names, after=0, before=0) == [3, 4, 3, 4, 5]


def test_a_source_that_was_written_again_gives_its_new_lines(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    for number, blank in enumerate(("", "\n", "")):
        path.write_text(f"def f(x):\n{blank}    return x + 1\n")
        os.utime(path, ns=(number, number))
        lines = operator_lines(function(str(path), 1), ["aten::add"], after=0, before=0)
        assert lines == [2 + len(blank)]


def test_code_that_was_generated_again_by_the_same_name_gives_its_new_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for blank in ("", "\n"):
        lines = f"def f(x):\n{blank}    return x + 1\n".splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "<made>", (1, None, lines, "<made>"))
        found = operator_lines(function("<made>", 1), ["aten::add"], after=0, before=0)
        assert found == [2 + len(blank)]


def test_a_source_is_looked_up_once_for_all_the_gaps_of_a_session(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up = list[str]()

    def counted(path: str) -> dict[int, FunctionLines]:
        looked_up.append(path)
        return functions_of(path)

    monkeypatch.setattr(python_calls, "functions_of", counted)
    reader, events = PythonCalls(StringTable()), np.zeros(3, EVENT)
    gaps = [Gap(-1, (row,), 2, 11) for row in range(3)]
    reader.place_operators(gaps, [f"{file}(1): forward"] * 3, ["aten::add"] * 3, events)
    assert events["line"].tolist() == [3, 3, 3]
    assert looked_up == [file]
