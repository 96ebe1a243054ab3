"""Stacks of Python calls: who is on them, and whose stack a call in a backward pass has."""

from __future__ import annotations

from pytest_torchmem.analysis.events.averages import find_averages, stacks_of
from pytest_torchmem.analysis.events.calls import PythonStacks, list_calls
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.values.trace import EventKind, Scope
from tests.builders import TraceBuilder


def call(b: TraceBuilder, name: str):
    return b.op(name, kind=EventKind.PY_CALL, is_operator=False)


def test_the_calls_by_which_torch_begins_a_backward_pass_are_on_no_stack() -> None:
    b = TraceBuilder()
    with (
        call(b, "train.py(3): step"),
        call(b, "torch/autograd/__init__.py(180): backward"),
        b.op("aten::ones_like") as row,
    ):
        pass
    python = PythonStacks(build_op_tree(b.build()))
    assert python.frames(python.around[row]) == ("train.py(3): step",)


def test_a_call_in_a_backward_pass_has_the_stack_of_its_forward_call() -> None:
    b = TraceBuilder()
    with call(b, "net.py(7): forward"), b.op("aten::mm", sequence=0):
        pass
    node = b.op("MmBackward0", scope=Scope.BACKWARD_FUNCTION, is_operator=False, sequence=0)
    with call(b, "train.py(9): step"), b.backward(), node:
        pass
    calls = list_calls(build_op_tree(b.build()))
    names = [calls.strings[name] for name in calls.names.tolist()]
    stacks = dict(zip(names, stacks_of(calls), strict=True))
    assert stacks["MmBackward0"] == stacks["aten::mm"] == ("net.py(7): forward",)


def test_calls_within_others_count_for_none_of_the_rows_where_they_are_left_out() -> None:
    b = TraceBuilder()
    with b.op("aten::linear"):
        for name in ("aten::t", "aten::addmm"):
            with b.op(name):
                pass
    (row,) = find_averages(list_calls(build_op_tree(b.build())), top_level=True)
    assert (row.name, row.calls) == ("aten::linear", 1)


def test_a_call_that_ends_after_the_one_around_it_lies_in_neither() -> None:
    b = TraceBuilder()
    with b.op("aten::t") as early:
        pass
    with b.op("aten::mm"), b.op("aten::addmm") as inside:
        pass
    b._rows["events"][early]["end_ns"] = b._rows["events"][inside]["start_ns"]
    rows = find_averages(list_calls(build_op_tree(b.build())), top_level=True)
    assert [row.name for row in rows] == ["aten::t", "aten::mm"]


def test_a_call_alone_within_one_of_its_name_is_the_same_and_of_two_neither_is() -> None:
    b = TraceBuilder()
    with b.op("aten::sum"), b.op("aten::sum"):
        pass
    with b.op("aten::add"):
        for _ in range(2):
            with b.op("aten::add"):
                pass
    rows = find_averages(list_calls(build_op_tree(b.build())))
    assert [(row.name, row.calls) for row in rows] == [("aten::sum", 1), ("aten::add", 3)]


def test_a_label_and_an_operator_of_its_name_have_a_row_each() -> None:
    b = TraceBuilder()
    for scope in (Scope.OTHER, Scope.FUNCTION):
        with b.op("aten::mm", scope=scope, is_operator=scope is Scope.FUNCTION):
            pass
    rows = find_averages(list_calls(build_op_tree(b.build())))
    assert [(row.name, row.calls) for row in rows] == [("aten::mm", 1)] * 2
