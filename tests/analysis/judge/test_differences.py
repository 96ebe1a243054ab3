"""What differs is what is new, has grown or is gone, and not what has moved."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.judge.causes import cause_of
from pytest_torchmem.analysis.judge.differences import differences
from pytest_torchmem.analysis.judge.lines import by_line, cause_first
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source, common_module
from pytest_torchmem.values.findings import CodeLines, Difference, DifferenceKind


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


def test_beside_what_is_still_there_a_second_one_is_new():
    first, second = made(4, "zeros", line=3), made(4, "zeros", line=4)
    assert found([first, second], [first], known=[first]) == [("zeros", 4, 4, "new")]
    # At another moment both were there: the second one lives longer.
    twice = made(8, "zeros", line=3)
    assert found([first, second], [first], known=[twice]) == [("zeros", 4, 4, "lives longer")]


def test_modules_that_one_line_made_it_in_are_told_as_one():
    now = [made(4, module="net.blocks.*.q"), made(4, module="net.blocks.*.k")]
    (one,) = differences(now, [])
    assert (one.size_bytes, one.contributor.module) == (8, "net.blocks.*")


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


def test_what_modules_have_in_common_is_their_path():
    assert common_module(["net.blocks.0", "net.blocks.1"]) == "net.blocks"
    assert common_module(["net.fc"]) == "net.fc"
    assert common_module(["net", "head"]) == ""
    # One module that one line makes two things in keeps its path, too.
    two = [made(8, line=3), made(6, line=3)]
    assert {d.contributor.module for d in differences(two, ())} == {"net"}


def growth(size, line, function="forward"):
    return Difference(made(size, function=function, line=line), size, DifferenceKind.NEW)


def changed_at(*lines):
    return lambda source: (
        CodeLines(source.file, source.line, source.line) if source.line in lines else None
    )


def leading(growths, excess_bytes, changed=()):
    """Return the largest part of the line that leads; ``changed`` are lines that have changed."""
    return cause_first(by_line(growths, changed_at(*changed)), excess_bytes)[0].parts[0]


def test_what_one_line_made_is_one_change_and_the_largest_of_all_leads():
    parts = [of(c, 8, line=3) for c in ("activation", "temporary", "autograd_detail")]
    lines = by_line([*parts, of("activation", 12, line=9)])
    assert [line.size_bytes for line in lines] == [24, 12]
    assert set(lines[0].parts) == set(parts)
    assert cause_first(lines, 36)[0] is lines[0]
    assert cause_of(lines, 36, "total").text == (
        "+24 B from mm at net.py:3 in net (activation 8, autograd detail 8, temporary 8)"
    )


def test_the_parts_of_a_line_that_grew_begin_with_what_it_makes_more_of():
    gone = Difference(made(9, operator="gelu", line=3), -9, DifferenceKind.GONE)
    more = [growth(7, line=3), growth(6, line=3)]
    (line,) = by_line([gone, *more])
    assert [part.size_bytes for part in line.parts] == [7, 6, -9]


def test_what_a_line_no_longer_makes_counts_against_what_it_makes():
    gone = Difference(made(5, operator="gelu", line=3), -5, DifferenceKind.GONE)
    (line,) = by_line([growth(12, line=3), gone])
    assert line.size_bytes == 7
    cause = cause_of([line], 7, "total")
    assert cause.text + cause.others == "+7 B of activation from mm at net.py:3 in net"


def test_lines_that_were_changed_together_are_one_place():
    hunk = CodeLines("net.py", 3, 5)
    found = [growth(8, line=3), growth(4, line=5), growth(9, line=6)]
    lines = cause_first(by_line(found, lambda source: hunk if source.line < 6 else None), 21)
    assert [(line.size_bytes, line.place) for line in lines] == [
        (12, hunk),
        (9, CodeLines("net.py", 6, 6)),
    ]
    cause = cause_of(lines, 21, "total")
    assert cause.text == "+12 B of activation from mm in the changed lines net.py:3-5 in net"
    assert (cause.others, cause.place) == (", 9 B more elsewhere", hunk)


@given(st.lists(st.tuples(st.integers(-99, 99), st.integers(1, 4)), min_size=1))
def test_lines_add_up_to_what_differs(changes):
    found = [
        Difference(made(abs(size), line=line), size, DifferenceKind.GROWN)
        for size, line in changes
        if size
    ]
    assert sum(line.size_bytes for line in by_line(found)) == sum(d.size_bytes for d in found)


def test_of_about_as_large_ones_the_one_further_up_in_its_function_leads():
    up, down = growth(10, line=3), growth(11, line=9)
    assert leading([down, up], 21) is up
    much_larger = growth(13, line=9)
    assert leading([much_larger, up], 23) is much_larger


def test_what_explains_a_fourth_of_the_whole_comes_before_what_is_only_read():
    new, read = growth(25, line=3), Difference(there_before(75), 75, DifferenceKind.READ)
    assert leading([read, new], 100) is new
    assert leading([read, new], 101) is read


def test_a_changed_line_that_made_half_of_the_whole_leads():
    changed, larger = growth(50, line=3, function="step"), growth(999, line=9)
    assert leading([larger, changed], 100, changed=[3]) is changed
    assert leading([larger, changed], 101, changed=[3]) is larger


def test_what_has_grown_to_a_multiple_is_as_good_as_new():
    scores = Difference(made(64, line=3), 56, DifferenceKind.GROWN)
    gradient = growth(40, line=4)
    assert leading([scores, gradient], 80, changed=[3, 4]) is scores
    twice = Difference(made(112, line=3), 56, DifferenceKind.GROWN)
    assert leading([twice, gradient], 80, changed=[3, 4]) is gradient


def of(category, size, line):
    return Difference(made(size, category=category, line=line), size, DifferenceKind.NEW)


def test_a_new_parameter_leads_before_its_gradient_and_state():
    weight, state = of("parameter", 4, line=1), of("optimizer_state", 12, line=2)
    others = [of("gradient", 4, line=3), of("activation", 9, line=4)]
    assert leading([state, weight, *others], 29) is weight
    # More than any optimizer keeps of it has another cause.
    wide = of("optimizer_state", 13, line=2)
    assert leading([wide, weight, *others], 30) is wide


def test_new_parameters_all_over_a_model_are_told_as_one_whatever_was_made_for_them():
    places = [
        Difference(
            made(10, module=f"net.{number}", line=number, category="parameter"),
            10,
            DifferenceKind.NEW,
        )
        for number in range(1, 5)
    ]
    lines = cause_first(by_line([of("optimizer_state", 80, line=9), *places]), 120)
    assert cause_of(lines, 120, "total").text.startswith(
        "+40 B of parameter throughout net, first "
    )


def test_growth_all_over_a_model_is_told_by_what_was_made_first_unless_a_line_has_changed():
    places = [
        Difference(
            replace(made(10, module=f"net.{number}", line=number), order=number),
            10,
            DifferenceKind.NEW,
        )
        for number in range(1, 5)
    ]
    lines = cause_first(by_line(places), 40)
    assert cause_of(lines, 40, "total").text.endswith("at net.py:1 in net.1")
    lines = cause_first(by_line(places, changed_at(3)), 40)
    cause = cause_of(lines, 40, "total")
    assert cause.text.endswith("at the changed line net.py:3 in net.3")
    assert cause.others == ", 30 B more elsewhere"
