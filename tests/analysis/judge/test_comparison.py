"""What changed between two entries, both ways."""

from dataclasses import replace

from pytest_torchmem.analysis.judge.differences import compare, line_differences
from pytest_torchmem.values.baseline import (
    TOTAL,
    Allowance,
    BaselineEntry,
    Change,
    ChangedNumber,
)
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


def entry(*live, at_peak=None, retained=0):
    """An entry; what was alive at the total's peak is what each category held, unless given."""
    own, together = amounts(live), amounts(live if at_peak is None else at_peak)
    at_peak_live = live if at_peak is None else at_peak
    kept = CategoryBytes(gradient=retained)
    return BaselineEntry(together.total, together, own, live, kept, at_peak_live=at_peak_live)


def amounts(live):
    peaks = dict.fromkeys(Category, 0)
    for contributor in live:
        peaks[contributor.category] += contributor.size_bytes
    return CategoryBytes.of(peaks)


def found(after, before):
    return [
        (part.contributor.operator, part.size_bytes, part.kind.value)
        for line in line_differences(after, before, ChangedNumber(TOTAL, before.total, after.total))
        for part in line.parts
    ]


def test_the_same_has_no_differences():
    one = entry(made(5), made(3, "aten::add"))
    assert found(one, one) == []


def test_totals_are_compared_at_their_own_peaks():
    kept, spike = made(10, "aten::mm"), made(9, "aten::ones", Category.TEMPORARY)
    before = entry(kept, spike, at_peak=[kept])
    after = entry(kept, spike, at_peak=[kept, spike])
    assert found(after, before) == [("aten::ones", 9, "lives longer")]


def test_what_may_have_been_too_small_to_store_is_not_called_new():
    before = replace(entry(made(10), made(2, "aten::add")), live=(), at_peak_live=(made(10),))
    assert found(entry(made(10), made(2, "aten::add"), made(5, "aten::exp")), before) == [
        ("aten::exp", 5, "new")
    ]


def test_the_allowance_decides_what_has_changed():
    before = entry(made(100 * MiB))
    for size, change in ((103, Change.GROWN), (97, Change.SHRUNK), (101, Change.WITHIN)):
        assert compare(before, entry(made(size * MiB)), ALLOWANCE).change is change


def test_retained_bytes_count_too():
    before, after = entry(made(MiB)), entry(made(MiB), retained=4 * MiB)
    assert compare(before, after, ALLOWANCE).change is Change.GROWN


def test_a_change_is_told_by_the_total_where_that_changed_so_and_else_by_what_changed_most():
    one = entry(made(100 * MiB), retained=MiB)
    grown = entry(made(110 * MiB), retained=40 * MiB)
    assert compare(one, grown, ALLOWANCE).changed.key == "total"
    left = entry(made(101 * MiB), made(4 * MiB, category=Category.INPUT), retained=40 * MiB)
    left = replace(left, total=101 * MiB)
    found = compare(one, left, ALLOWANCE)
    assert (found.changed.key, found.size_bytes) == ("retained", 39 * MiB)
    assert found.changed.sizes == "retained 1.0 MiB -> 40.0 MiB"


def test_causes_are_those_of_the_number_that_changed():
    noise = made(2, "aten::rand", Category.INPUT)
    kept = made(9 * MiB, "aten::add", Category.TEMPORARY)
    before = entry(made(100 * MiB))
    after = replace(entry(made(100 * MiB), noise), retained_live=(kept,), retained=amounts((kept,)))
    (line,) = compare(before, after, ALLOWANCE).lines
    assert [c.operator for c in line.contributors] == ["aten::add"]
    assert line.size_bytes == 9 * MiB


def test_what_went_the_way_of_the_change_comes_first():
    small, large = made(3 * MiB, "aten::add", line=2), made(9 * MiB, "aten::mul", line=3)
    gone = made(10 * MiB, "aten::exp", line=4)
    one, other = entry(gone), entry(small, large)
    for before, after, sizes in ((one, other, (9, 3, -10)), (other, one, (-9, -3, 10))):
        found = compare(before, after, ALLOWANCE).lines
        assert [d.size_bytes // MiB for d in found] == list(sizes)


def test_growth_outweighs_shrinking():
    before = entry(made(9 * MiB), made(9 * MiB, category=Category.GRADIENT))
    after = entry(made(1 * MiB), made(12 * MiB, category=Category.GRADIENT))
    assert compare(before, after, ALLOWANCE).change is Change.GROWN


def test_an_entry_without_its_other_side_is_new_or_gone():
    one = entry(made(3))
    assert compare(None, one, ALLOWANCE).change is Change.NEW
    assert compare(one, None, ALLOWANCE).change is Change.GONE
    assert compare(one, None, ALLOWANCE).size_bytes == -3
    assert compare(one, None, ALLOWANCE).lines == ()
