"""Measured tests cross between processes as plain values."""

import copy
import json
from dataclasses import replace

import pytest

from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.findings import CodeLines, Finding, FindingKind
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.results import Peak, Result, Retained

SIZE = CategoryBytes(activation=3)
RESULT = Result("", "cpu", False, Peak(3, 0, SIZE, SIZE), Retained(0, CategoryBytes()))
LINES = CodeLines("net.py", 3, 4)
FINDING = Finding(
    FindingKind.GROWN, "total", "too much", 1, cause="a list", place=LINES, changed_since=(LINES,)
)
WINDOW = Window(RESULT, (FINDING,), Change.GROWN, 2, key="test_a", limits={"total": 4})


def measured(name):
    return MeasuredTest(name, "t.py", {"device": "cpu"}, (WINDOW,))


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        ((FindingKind.GROWN, FindingKind.OVER_LIMIT), "over limit"),
        ((FindingKind.NO_STEPS,), "limit not judged"),
        ((FindingKind.GROWN,), "75% of limit"),
    ],
)
def test_the_status_of_a_limit_comes_from_the_kinds_whatever_the_sentence_says(kinds, status):
    text = "x over the limit of y, it cannot be judged: z"
    window = replace(WINDOW, findings=tuple(Finding(kind, "total", text) for kind in kinds))
    assert window.limit_status == status


def test_a_peak_that_may_be_larger_is_shown_with_both_ends():
    def shown(at_most, **changes):
        result = replace(RESULT, at_most=at_most, **changes)
        return replace(WINDOW, result=result).peak_text

    assert shown(9) == "3 B to 9 B"
    assert shown(9, estimated=True) == "3 B to 9 B (estimated)"
    assert shown(3) == shown(None) == "3 B"
    assert Result.from_json(replace(RESULT, at_most=9).to_json()).interval


def test_a_test_crosses_as_plain_values():
    test = measured("t.py::test_a")
    assert MeasuredTest.from_json(json.loads(json.dumps(test.to_json()))) == test


def test_numbers_can_be_asked_for_what_they_have_copied_and_listed():
    nothing = CategoryBytes()
    for numbers in (Peak(0, 0, nothing, nothing), Retained(0, nothing)):
        assert not hasattr(numbers, "activatoin")
        assert not hasattr(numbers, "__dict__")
        assert "total" in dir(numbers)
        assert copy.deepcopy(numbers) == numbers
