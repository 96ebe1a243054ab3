"""A stored entry is small, whole numbers, and comes back as it was."""

import pytest
from test_verdict import live, measured

from pytest_torchmem.values.baseline import KEPT_CONTRIBUTORS, Allowance, BaselineEntry
from pytest_torchmem.values.units import MiB


def test_an_entry_comes_back_as_it_was():
    kept = live(3, "gradient")
    entry = BaselineEntry.of(measured(live(5), kept, retained=[kept]))
    assert BaselineEntry.from_json(entry.to_json()) == entry


def test_only_the_largest_contributors_are_stored():
    entry = BaselineEntry.of(measured(*(live(size, module=f"m{size}") for size in range(1, 100))))
    assert len(entry.live) == KEPT_CONTRIBUTORS
    assert [c.size_bytes for c in entry.live] == list(range(99, 99 - KEPT_CONTRIBUTORS, -1))


def test_equal_contributors_are_stored_in_one_order():
    some = [live(5, module=name) for name in "abc"]
    assert BaselineEntry.of(measured(*some)) == BaselineEntry.of(measured(*some[::-1]))


@pytest.mark.parametrize("value", [1.0, True, "1", None, -1])
def test_anything_but_a_whole_number_is_refused(value):
    data = BaselineEntry.of(measured(live(5))).to_json()
    for part in ({"total": value}, {"peaks": {"activation": value}}):
        with pytest.raises(ValueError, match="expected a whole number of bytes, found "):
            BaselineEntry.from_json({**data, **part})


def test_an_unknown_category_is_refused():
    data = BaselineEntry.of(measured(live(5))).to_json()
    with pytest.raises(ValueError, match="cache"):
        BaselineEntry.from_json({**data, "retained": {"cache": 1}})


def test_the_allowance_says_which_of_its_two_parts_decides():
    allowance = Allowance(tolerance=0.02, floor_bytes=MiB)
    assert allowance.text_for(100 * MiB) == "tolerance 2 %"
    assert allowance.text_for(10 * MiB) == "floor 1.0 MiB"
    assert Allowance(0.025, 0).text_for(1) == "tolerance 2.5 %"


def test_a_floor_that_was_given_holds_for_a_test_that_used_nothing():
    assert Allowance(0.02, 5).at(0) == Allowance(0.02, 5)
