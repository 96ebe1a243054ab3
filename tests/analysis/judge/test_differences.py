"""What changed between two entries, both ways."""

from dataclasses import replace

from pytest_torchmem.analysis.judge.differences import compare, differences
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.units import MiB

ALLOWANCE = Allowance(0.02, MiB)


def made(size, operator="aten::mm", category=Category.ACTIVATION, line=1, function="f"):
    source = Source("net.py", line, function)
    return Contributor(category, size, 1, operator, "net", source, Phase.FORWARD)


def entry(*live, retained=0):
    peaks = dict.fromkeys(Category, 0)
    for contributor in live:
        peaks[contributor.category] += contributor.size_bytes
    amounts = CategoryBytes.of(peaks)
    return BaselineEntry(amounts.total, amounts, amounts, live, CategoryBytes(gradient=retained))


def found(after, before):
    return [(d.contributor.operator, d.size_bytes, d.one_sided) for d in differences(after, before)]


def test_the_same_has_no_differences():
    one = entry(made(5), made(3, "aten::add"))
    assert found(one, one) == []


def test_growth_and_shrinking_are_both_named_the_largest_first():
    before = entry(made(10, "aten::mm"), made(10, "aten::add"))
    after = entry(made(13, "aten::mm"), made(3, "aten::add"))
    assert found(after, before) == [("aten::add", -7, False), ("aten::mm", 3, False)]


def test_what_one_side_has_alone_is_new_or_gone():
    before, after = entry(made(5, "aten::mm")), entry(made(4, "aten::cat"))
    assert found(after, before) == [("aten::mm", -5, True), ("aten::cat", 4, True)]


def test_a_line_that_moved_is_no_difference():
    assert found(entry(made(5, line=1)), entry(made(5, line=90))) == []


def test_a_category_is_compared_with_itself_alone():
    before = entry(made(5, category=Category.ACTIVATION))
    after = entry(made(5, category=Category.TEMPORARY))
    assert len(found(after, before)) == 2


def test_what_may_have_been_too_small_to_store_is_no_certain_growth():
    before = entry(made(10), made(2, "aten::add"))
    before = replace(before, live=before.live[:1])  # the smaller one was not stored
    (difference,) = differences(entry(made(10), made(5, "aten::add")), before)
    assert (difference.size_bytes, difference.at_least) == (3, True)


def test_the_allowance_decides_what_has_changed():
    before = entry(made(100 * MiB))
    for size, change in ((103, Change.GROWN), (97, Change.SHRUNK), (101, Change.WITHIN)):
        assert compare(before, entry(made(size * MiB)), ALLOWANCE).change is change


def test_retained_bytes_count_too():
    before, after = entry(made(MiB)), entry(made(MiB), retained=4 * MiB)
    assert compare(before, after, ALLOWANCE).change is Change.GROWN


def test_growth_outweighs_shrinking():
    before = entry(made(9 * MiB), made(9 * MiB, category=Category.GRADIENT))
    after = entry(made(1 * MiB), made(12 * MiB, category=Category.GRADIENT))
    assert compare(before, after, ALLOWANCE).change is Change.GROWN


def test_an_entry_without_its_other_side_is_new_or_unused():
    one = entry(made(3))
    assert compare(None, one, ALLOWANCE).change is Change.NEW
    assert compare(one, None, ALLOWANCE).change is Change.UNUSED
    assert compare(one, None, ALLOWANCE).size_bytes == -3
    assert compare(one, None, ALLOWANCE).differences == ()
