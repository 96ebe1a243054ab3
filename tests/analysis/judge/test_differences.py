"""What differs is what is new, has grown or is gone, and not what has moved."""

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source


def made(size, operator="mm", module="net", function="forward", line=1, category="activation"):
    source = Source("net.py", line, function)
    return Contributor(Category(category), size, 1, operator, module, source, Phase.FORWARD)


def there_before(size, category="input", module=""):
    return Contributor(Category(category), size, 1, "", module, None, Phase.PREEXISTING)


def found(now, then, unlisted_bytes=0, known=()):
    return [
        (d.contributor.operator, d.contributor.source.line, d.size_bytes, d.kind.value)
        for d in differences(now, then, unlisted_bytes, known)
        if d.contributor.source
    ]


def test_equal_sides_do_not_differ():
    assert found([made(5), made(3, "relu")], [made(3, "relu"), made(5)]) == []


def test_growth_and_shrinking_are_both_named_the_largest_first():
    now, then = [made(13, "mm"), made(3, "add")], [made(10, "mm"), made(10, "add")]
    assert found(now, then) == [("add", 1, -7, "shrunk"), ("mm", 1, 3, "grown")]


def test_what_one_side_has_alone_is_new_or_gone():
    assert found([made(4, "cat")], [made(5, "mm")]) == [("mm", 1, -5, "gone"), ("cat", 1, 4, "new")]


def test_a_moved_line_is_not_growth():
    assert found([made(5, line=9)], [made(5, line=1)]) == []
    assert found([made(5, line=9), made(7, line=11)], [made(7, line=3), made(5, line=1)]) == []


def test_of_two_calls_in_one_function_the_new_one_is_named():
    before = [made(5, line=10)]
    assert found([made(5, line=10), made(5, line=20)], before) == [("mm", 20, 5, "new")]
    assert found([made(7, line=8), made(5, line=12)], before) == [("mm", 8, 7, "new")]


def test_lines_of_one_function_are_not_summed_under_one_line():
    then = [made(4, line=10), made(8, line=12)]
    now = [made(8, line=11), made(16, line=13)]
    assert found(now, then) == [("mm", 13, 8, "grown"), ("mm", 11, 4, "grown")]


def test_a_renamed_function_or_module_is_not_growth():
    assert found([made(5, function="call")], [made(5, function="forward")]) == []
    assert found([made(5, module="net.blocks")], [made(5, module="net.layers")]) == []


def test_code_that_moved_as_a_whole_is_not_growth():
    before = made(5, module="net.a", function="forward")
    assert found([made(5, module="lib.b", function="call")], [before]) == []


def test_another_label_is_not_growth():
    now = [made(5, category="activation"), made(6, "add", line=3)]
    then = [made(5, category="temporary")]
    assert found(now, then) == [("add", 3, 6, "new")]


def test_of_what_got_another_label_and_grew_the_growth_counts():
    now, then = [made(4, category="temporary")], [made(2, category="input")]
    assert found(now, then) == [("mm", 1, 2, "grown")]


def test_what_was_there_before_may_be_read_as_something_else():
    now, then = [there_before(6), there_before(4, "buffer")], [there_before(10)]
    assert differences(now, then) == ()
    (read,) = differences([there_before(6)], [there_before(2)])
    assert (read.size_bytes, read.kind.value) == (4, "read")


def test_what_the_baseline_did_not_list_is_not_called_new():
    stored = [made(100)]
    assert found([made(100), made(4, "relu")], stored, unlisted_bytes=10) == []
    assert found([made(100), made(64, "relu")], stored, unlisted_bytes=10) == [
        ("relu", 1, 64, "new")
    ]


def test_what_was_as_large_at_another_moment_lives_longer():
    known = [made(4, "addmm")]
    assert found([made(4, "addmm")], [], known=known) == [("addmm", 1, 4, "lives longer")]
    assert found([made(9, "addmm")], [], known=known) == [("addmm", 1, 9, "new")]


def test_modules_that_one_line_made_it_in_are_told_as_one():
    now = [made(4, module="net.blocks.*.q"), made(4, module="net.blocks.*.k")]
    (one,) = differences(now, [])
    assert (one.size_bytes, one.contributor.module, one.places) == (8, "net.blocks.*", 2)


def test_the_largest_comes_first():
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
        st.sampled_from(["activation", "temporary"]),
    ),
    max_size=6,
)


@given(contributors, contributors)
def test_differences_add_up_to_what_the_sides_differ_by(now, then):
    after, before = (sum(c.size_bytes for c in side) for side in (now, then))
    assert sum(d.size_bytes for d in differences(now, then)) == after - before


@given(contributors)
def test_nothing_differs_from_itself_in_any_order(measured):
    assert differences(measured[::-1], measured) == ()


def test_of_two_equal_calls_the_one_on_the_old_line_is_the_old_one():
    now = [made(5, line=10), made(5, line=20)]
    assert found(now, [made(5, line=20)]) == [("mm", 10, 5, "new")]
