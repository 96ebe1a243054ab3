"""A dataclass and its JSON: what the types and the metadata of its fields decide."""

from dataclasses import replace

import numpy as np
import pytest

from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase
from pytest_torchmem.values.measured import BaselineChange
from pytest_torchmem.values.picture import OperatorUse, Span
from pytest_torchmem.values.results import Fate, Holder, Peak, Result, Retained
from pytest_torchmem.values.static_graph import Lifetimes, StaticGraph, StaticRun

HOLDER = Holder(5, 1, Fate.FREED_LATER, "net.last")
NOTHING = CategoryBytes()
RESULT = Result("", "cpu", True, Peak(7, -3, NOTHING, NOTHING), Retained(5, NOTHING, (), (HOLDER,)))


def without(data, *keys):
    return {key: value for key, value in data.items() if key not in keys}


def test_a_value_comes_back_from_its_json():
    data = RESULT.to_json()
    assert data["retained"]["holders"] == [
        {"bytes": 5, "count": 1, "fate": "freed_later", "by": "net.last"}
    ]
    assert Result.from_json(data) == RESULT


def test_what_is_rarely_written_may_be_missing_and_nothing_else_may():
    who = Contributor(Category.INPUT, 5, 1, "", "", None, Phase.FORWARD, claimed="by a pass")
    assert Contributor.from_json(without(who.to_json(), "claimed")) == replace(who, claimed="")
    with pytest.raises(KeyError, match="steps"):
        Result.from_json(without(RESULT.to_json(), "steps"))


@pytest.mark.parametrize(
    ("key", "wrong", "told"),
    [
        ("before_bytes", -1, "expected a whole number of bytes, found -1"),
        ("written", 1, "expected true or false, found 1"),
        ("change", "larger", "'larger' is not one of not compared, same, "),
        ("file", None, "expected text, found None"),
    ],
)
def test_a_field_of_another_type_is_told(key, wrong, told):
    data = BaselineChange("a", "b", Change.NEW).to_json()
    with pytest.raises(ValueError, match=told):
        BaselineChange.from_json({**data, key: wrong})


def test_a_row_has_the_fields_without_their_names():
    use = OperatorUse("aten::mm", 1, 2, 3)
    assert use.to_json() == ["aten::mm", 1, 2, 3, 0]
    assert OperatorUse.from_json(use.to_json()) == use
    assert Span.from_json(["step", "1", -5, 9]) == Span("step", "1", -5, 9)
    for row in (["step", "1", -5], ["step", "1", -5, 9, 0]):
        with pytest.raises(ValueError, match="expected kind, name, begin_ns, end_ns"):
            Span.from_json(row)


def test_what_an_estimate_was_made_from_is_not_in_its_json():
    none = np.empty(0, np.int64)
    run = StaticRun(StaticGraph((), ()), Lifetimes(none, none), "cpu")
    estimate = Estimate.of(run)
    assert Result.from_json(estimate.to_json()).peak == estimate.peak
    assert "run" not in estimate.to_json()
