"""Paths of modules, from what the recorder has noted of which module is part of which."""

from __future__ import annotations

from pytest_torchmem.analysis.events.op_tree import ModulePaths, build_op_tree
from pytest_torchmem.values.trace import MarkKind
from tests.builders import TraceBuilder


def path_of(b: TraceBuilder, module: int) -> str:
    tree = build_op_tree(b.build())
    return ModulePaths(tree).path(module, float(len(tree.depth)))


def test_a_path_leads_from_the_class_of_the_root_to_the_module():
    b = TraceBuilder()
    b.part_of(child=1, parent=0, name="")
    b.part_of(child=2, parent=1, name="layers")
    b.part_of(child=3, parent=2, name="0")
    assert path_of(b, 3) == "Net.layers.0"
    assert path_of(b, 1) == "Net"


def test_a_part_whose_beginning_nobody_saw_has_its_name():
    b = TraceBuilder()
    b.part_of(child=2, parent=1, name="inner")
    assert path_of(b, 2) == "inner"


def test_an_id_that_another_module_had_before_has_the_path_of_the_new_one():
    b = TraceBuilder()
    b.part_of(child=2, parent=7, name="before")
    b.part_of(child=2, parent=0, name="")
    b.part_of(child=2, parent=8, name="now")
    assert path_of(b, 2) == "now"


def test_an_id_has_the_class_of_the_module_that_it_stands_for_at_a_moment():
    """The profiler looks up a class once for each ``id()``, whoever has it later."""
    b = TraceBuilder()
    b.part_of(child=1, parent=0, name="", class_name="Encoder")
    with b.module(1, "Encoder"):
        pass
    b.part_of(child=1, parent=0, name="", class_name="Decoder", mark=b.mark(MarkKind.MODULE_SEEN))
    with b.module(1, "Encoder"):
        pass
    b.part_of(child=1, parent=0, name="", class_name="Head", mark=b.mark(MarkKind.MODULE_SEEN))
    tree = build_op_tree(b.build())
    paths, (before, after) = ModulePaths(tree), tree.rank[tree.trace.module_calls["event"]]
    assert paths.path(1, float(before)) == "Encoder"
    assert paths.path(1, float(after)) == "Decoder"


def test_a_module_that_is_dead_has_the_path_of_its_last_moment():
    """Its parameter may live on in a graph, while another model is made at the same addresses."""
    b = TraceBuilder()

    def seen(child: int, parent: int, name: str, class_name: str) -> int:
        mark = b.mark(MarkKind.MODULE_SEEN)
        b.part_of(child, parent, name, class_name, mark)
        return mark

    seen(2, 0, "", "Linear")
    registered = b.mark(MarkKind.MODULE_SEEN)
    seen(1, 0, "", "Sequential")
    seen(2, 1, "0", "Linear")
    # The next model, whose layer lies where the first model was.
    seen(2, 0, "", "Head")
    seen(1, 0, "", "Linear")
    seen(1, 2, "weighted", "Linear")
    tree = build_op_tree(b.build())
    paths, end = ModulePaths(tree), float(len(tree.depth))
    assert paths.path(2, end, registered) == "Sequential.0"
    assert paths.path(1, end) == "Head.weighted"


def test_a_place_that_is_noted_again_is_kept_once():
    """Each backward pass notes the places of all modules, and a body may have thousands."""
    b = TraceBuilder()
    for child, parent in ((1, 0), (2, 0)):
        b.part_of(child, parent, "", mark=b.mark(MarkKind.MODULE_SEEN))
    for name in ("first", "first", "second", "first"):
        b.part_of(2, 1, name, mark=b.mark(MarkKind.MODULE_SEEN))
    paths = ModulePaths(tree := build_op_tree(b.build()))
    assert [edge.name for edge in paths._edges[2]] == ["", "first", "second"]
    assert paths.path(2, float(len(tree.depth))) == "Net.first"


def test_a_place_in_a_module_of_the_same_id_is_another_one():
    b = TraceBuilder()

    def seen(child: int, parent: int, name: str, class_name: str = "Net") -> None:
        b.part_of(child, parent, name, class_name, b.mark(MarkKind.MODULE_SEEN))

    seen(1, 0, "", "Before")
    seen(2, 0, "")
    seen(2, 1, "part")
    seen(1, 0, "", "After")
    seen(2, 1, "part")
    paths = ModulePaths(tree := build_op_tree(b.build()))
    assert [edge.name for edge in paths._edges[2]] == ["", "part", "part"]
    assert paths.path(2, float(len(tree.depth))) == "After.part"
