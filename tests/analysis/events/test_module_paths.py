"""Paths of modules, from what the recorder has noted of which module is part of which."""

from __future__ import annotations

from pytest_torchmem.analysis.events.op_tree import ModulePaths, build_op_tree
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
