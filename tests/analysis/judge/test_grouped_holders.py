from __future__ import annotations

from dataclasses import replace

from pytest_torchmem.analysis.judge.holders import group_holders, made_by
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.results import Fate, Holder


def held(size_bytes: int, by: str, fate: Fate = Fate.HELD) -> Holder:
    return Holder(size_bytes, 1, fate, by)


def test_items_of_one_list_are_one_holder():
    grouped = group_holders([held(8, "net.LOSSES[0]"), held(16, "net.LOSSES[12]")])
    assert grouped == (Holder(24, 2, Fate.HELD, "net.LOSSES[*]"),)


def test_numbered_children_of_a_module_are_one_holder():
    singles = [held(8, f"'net'.blocks.{number}.fc2.weight.grad") for number in range(3)]
    assert group_holders(singles)[0].by == "'net'.blocks.*.fc2.weight.grad"


def test_what_is_as_large_is_in_the_order_of_its_text():
    singles = [held(8, name) for name in ("net.B", "net.A")]
    assert [holder.by for holder in group_holders(singles)] == ["net.A", "net.B"]


def test_a_single_item_keeps_its_index():
    assert group_holders([held(8, "net.LOSSES[3]")]) == (held(8, "net.LOSSES[3]"),)
    both = [held(8, "net.LOSSES[3]"), held(4, "net.LOSSES[3]")]
    assert group_holders(both)[0].by == "net.LOSSES[3]"


def test_the_largest_comes_first_and_fates_stay_apart():
    grouped = group_holders([held(8, "net.A"), held(9, "net.A", Fate.GARBAGE), held(10, "net.B")])
    assert [str(holder) for holder in grouped] == [
        "still held by net.B",
        "freed only by the garbage collector, in a cycle of net.A",
        "still held by net.A",
    ]


def test_what_was_not_found_is_said_plainly():
    assert str(held(8, "")) == "still held by something that no name leads to"
    assert str(held(8, "", Fate.GARBAGE)) == "freed only by the garbage collector"


def test_a_line_is_known_again_whatever_module_its_memory_has_at_another_moment():
    source = Source("net.py", 7, "forward")
    one = Contributor(Category.ACTIVATION, 8, 1, "aten::mm", "net.fc", source, Phase.FORWARD)
    assert made_by(replace(one, module="", category=Category.TEMPORARY)) == made_by(one)
    assert made_by(replace(one, source=replace(source, line=8))) != made_by(one)
    alone = replace(one, source=None)
    assert made_by(alone) != made_by(replace(alone, module="net.head"))
