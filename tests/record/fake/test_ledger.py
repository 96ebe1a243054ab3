"""Storages on fake tensors begin and end at rows of the run."""

import pytest

torch = pytest.importorskip("torch")

from pytest_torchmem.record.fake.ledger import Ledger  # noqa: E402
from pytest_torchmem.values.contributors import Category  # noqa: E402


@pytest.mark.parametrize(("operators_after", "end"), [(0, 7), (1, 8), (2, 10)])
def test_a_storage_ends_no_sooner_than_it_began(operators_after, end):
    """Operator 3 makes it at row 7. Without an operator after it, row 6 would be its end."""
    ledger = Ledger(before_death=lambda: None, operator_count=3)
    tensor = torch.empty(4)
    ledger.add(tensor, Category.UNKNOWN, first=7)
    ledger.operator_count += operators_after
    del tensor
    lifetimes = ledger.lifetimes()
    assert (lifetimes.first.tolist(), lifetimes.end.tolist()) == ([7], [end])
