"""Lines of operators that were written as Python operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_torchmem.record.tree.source_lines import operator_lines

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


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return str(path)


def test_operators_between_two_calls_are_found_in_the_order_they_run(file: str) -> None:
    names = ["aten::mul", "aten::add", "aten::sub_", "aten::matmul"]
    assert operator_lines(file, 1, names, after=2, before=11) == [3, 3, 4, 6]


def test_after_the_last_call_the_rest_of_the_function_is_looked_at(file: str) -> None:
    assert operator_lines(file, 1, ["aten::select", "aten::div"], after=11, before=0) == [12, 12]


def test_where_a_loop_turns_its_beginning_comes_after_its_end(file: str) -> None:
    # The call on line 11 is before and after: z + 1 on line 10 ran in between.
    assert operator_lines(file, 1, ["aten::add"], after=11, before=11) == [10]


def test_what_the_source_does_not_explain_gets_the_line_of_the_call_before(file: str) -> None:
    assert operator_lines(file, 1, ["aten::native_dropout"], after=2, before=11) == [2]


def test_a_file_that_is_gone_gives_the_line_of_the_call_before() -> None:
    assert operator_lines("nowhere/model.py", 1, ["aten::add"], after=7, before=9) == [7]
