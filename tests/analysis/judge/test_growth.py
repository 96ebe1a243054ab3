"""Growth is blamed on what is new, not on what has moved."""

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.judge.growth import attribute_growth
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source


def made(size, operator="mm", module="net", function="forward", line=1, category="activation"):
    source = Source("net.py", line, function)
    return Contributor(Category(category), size, 1, operator, module, source, Phase.FORWARD)


def found(measured, stored, omitted_bytes=0):
    growths = attribute_growth(measured, stored, omitted_bytes)
    return [
        (g.contributor.operator, g.contributor.source.line, g.size_bytes, g.new) for g in growths
    ]


def test_equal_sides_have_no_growth():
    assert found([made(5), made(3, "relu")], [made(3, "relu"), made(5)]) == []


def test_a_new_contributor_is_new():
    assert found([made(5), made(3, "relu")], [made(5)]) == [("relu", 1, 3, True)]


def test_a_grown_contributor_counts_its_growth_only():
    assert found([made(5)], [made(3)]) == [("mm", 1, 2, False)]


def test_a_moved_line_is_not_growth():
    assert found([made(5, line=9)], [made(5, line=1)]) == []


def test_of_two_calls_in_one_function_the_new_one_is_named():
    before = [made(5, line=10)]
    assert found([made(5, line=10), made(5, line=20)], before) == [("mm", 20, 5, False)]
    assert found([made(7, line=8), made(5, line=12)], before) == [("mm", 8, 7, False)]


def test_a_renamed_function_or_module_is_not_growth():
    assert found([made(5, function="call")], [made(5, function="forward")]) == []
    assert found([made(5, module="net.blocks")], [made(5, module="net.layers")]) == []


def test_the_same_bytes_in_another_category_are_growth_of_that_category():
    growths = found([made(5, category="activation")], [made(5, category="temporary")])
    assert growths == [("mm", 1, 5, True)]


def test_what_the_baseline_left_out_is_not_called_new():
    stored = [made(100)]
    assert found([made(100), made(4, "relu")], stored, omitted_bytes=10) == []
    (growth,) = attribute_growth([made(100), made(64, "relu")], stored, omitted_bytes=10)
    assert growth.size_bytes == 54
    assert growth.at_least


def test_the_largest_growth_comes_first():
    measured = [made(1, "a"), made(9, "b"), made(5, "c")]
    assert [operator for operator, *_ in found(measured, [])] == ["b", "c", "a"]


contributors = st.lists(
    st.builds(
        made,
        st.integers(1, 8),
        st.sampled_from("ab"),
        st.sampled_from("xy"),
        st.sampled_from("fg"),
        st.integers(1, 3),
    ),
    max_size=6,
)


@given(contributors, contributors)
def test_growth_is_at_least_the_net_change_and_at_most_all_that_is_live(measured, stored):
    growths = attribute_growth(measured, stored)
    now, before = (sum(c.size_bytes for c in side) for side in (measured, stored))
    grown = sum(growth.size_bytes for growth in growths)
    assert now - before <= grown <= now


@given(contributors)
def test_nothing_grows_against_itself_in_any_order(measured):
    assert attribute_growth(measured[::-1], measured) == ()
