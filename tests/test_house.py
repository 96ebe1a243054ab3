"""Each room has a budget, and grows beyond it by a decision only."""

from __future__ import annotations

import pytest

from tools.house import LINES, NAMES, lines_by_room, names_of_torch, over_budget


def test_no_room_is_larger_than_its_budget() -> None:
    assert over_budget(lines_by_room(), LINES, " lines") == []
    assert over_budget(names_of_torch(), NAMES, "") == []


def test_all_of_the_package_has_a_budget() -> None:
    assert lines_by_room().keys() == LINES.keys()
    assert names_of_torch().keys() == NAMES.keys()


@pytest.mark.parametrize("budget", [{"store": 10}, {}])
def test_a_room_that_outgrows_its_budget_is_named(budget: dict[str, int]) -> None:
    (sentence,) = over_budget({"store": 1011}, budget, " lines")
    allowed = budget.get("store", 0)
    assert sentence.startswith(f"store: 1,011 lines, and the budget is {allowed}. Delete as much")
    assert "docs/decisions" in sentence
    assert over_budget({"store": 10}, {"store": 10}, " lines") == []
