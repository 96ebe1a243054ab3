"""Nesting, phases and leaf operators of traces written by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_torchmem.analysis.events.op_tree import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    RECOMPUTE,
    Annotations,
    build_op_tree,
    running_at,
)
from pytest_torchmem.values.trace import EventKind, MarkKind, Role, Scope, Trace
from tests.builders import TraceBuilder


def test_an_empty_trace_has_an_empty_tree():
    tree = build_op_tree(Trace())
    assert len(tree.depth) == len(tree.phase) == len(tree.leaf) == 0
    assert len(tree.mark_ranks) == 0


def test_depth_counts_the_events_around():
    b = TraceBuilder()
    with b.op("outer") as outer:
        with b.op("first") as first:
            pass
        with b.op("second") as second, b.op("inside") as inside:
            pass
    with b.op("next") as following:
        pass
    depth = build_op_tree(b.build()).depth
    assert [int(depth[row]) for row in (outer, first, second, inside, following)] == [0, 1, 1, 2, 0]


def test_the_leaf_is_the_outermost_operator_and_annotations_are_none():
    b = TraceBuilder()
    with (
        b.op("my label", is_operator=False) as label,
        b.op("aten::linear") as linear,
        b.op("aten::addmm") as addmm,
    ):
        made = b.alloc(8)
    b.free(made)
    tree = build_op_tree(b.build())
    assert tree.leaf[label] == -1
    assert tree.leaf[linear] == tree.leaf[addmm] == linear
    allocation, free = np.flatnonzero(tree.trace.events["kind"] == EventKind.ALLOCATION)
    assert tree.leaf[allocation] == linear
    assert tree.leaf[free] == -1


def test_a_backward_node_is_a_leaf_whatever_its_name():
    b = TraceBuilder()
    with b.backward(), b.node("MyFunctionBackward") as node, b.op("aten::mul") as product:
        pass
    tree = build_op_tree(b.build())
    assert tree.leaf[product] == node
    assert tree.backward_node[product] == node


def test_the_innermost_backward_node_wins():
    b = TraceBuilder()
    with (
        b.backward(),
        b.node("CheckpointBackward"),
        b.node("MulBackward0") as inner,
        b.op("aten::mul") as product,
    ):
        pass
    assert build_op_tree(b.build()).backward_node[product] == inner


def test_a_node_that_another_node_calls_is_a_part_of_it():
    b = TraceBuilder()
    with (
        b.backward(),
        b.node("CopySlices") as outer,
        b.op("CopyBackwards", scope=Scope.BACKWARD_FUNCTION, is_operator=False),
        b.op("aten::zeros_like") as inside,
    ):
        pass
    assert build_op_tree(b.build()).backward_node[inside] == outer


def test_a_closure_that_an_optimizer_calls_is_no_step():
    b = TraceBuilder()
    with b.optimizer_step():
        with b.op("aten::mm", sequence=0) as forward:  # the first number that autograd gives
            pass
        with b.backward(), b.node("MmBackward0") as backward:
            pass
        with b.op("aten::add_") as step:
            pass
    phase = build_op_tree(b.build()).phase
    rows = (forward, backward, step)
    assert [int(phase[row]) for row in rows] == [FORWARD, BACKWARD, OPTIMIZER]


def test_phases_follow_the_marks():
    b = TraceBuilder()
    with b.op("aten::mm", sequence=0) as forward:
        pass
    with b.backward(), b.op("aten::ones_like") as backward:
        pass
    with b.op("aten::mm", sequence=1) as between:
        pass
    with b.optimizer_step(), b.op("aten::add_") as step:
        pass
    phase = build_op_tree(b.build()).phase
    rows = (forward, backward, between, step)
    assert [int(phase[row]) for row in rows] == [FORWARD, BACKWARD, FORWARD, OPTIMIZER]


def test_backward_nodes_are_backward_without_any_mark():
    b = TraceBuilder()
    with b.node("MulBackward0"), b.op("aten::mul") as product:
        pass
    assert build_op_tree(b.build()).phase[product] == BACKWARD


def test_an_optimizer_known_to_the_python_tracer_is_a_step_without_any_mark():
    b = TraceBuilder()
    weight = b.existing(8)
    with b.op("step", kind=EventKind.PY_CALL, is_operator=False) as call:
        b.mention(weight, call, role=Role.OPTIMIZER_PARAMETER)
        with b.op("aten::add_") as add:
            pass
    assert build_op_tree(b.build()).phase[add] == OPTIMIZER


def test_operators_that_autograd_watches_within_backward_are_a_forward_pass_run_again():
    b = TraceBuilder()
    with b.backward(), b.node("CheckpointBackward"):
        with b.op("aten::mm", sequence=7) as again:
            pass
        with b.op("aten::clone") as other:
            pass
    phase = build_op_tree(b.build()).phase
    assert phase[again] == RECOMPUTE
    assert phase[other] == BACKWARD


def test_a_module_that_is_called_again_within_backward_is_run_again():
    b = TraceBuilder()
    with b.module(1), b.op("aten::mm"):
        pass
    with b.backward(), b.node("CheckpointBackward"):
        with b.module(1), b.op("aten::mm") as again:
            pass
        with b.module(2), b.op("aten::mm") as first:
            pass
    phase = build_op_tree(b.build()).phase
    assert phase[again] == RECOMPUTE
    assert phase[first] == BACKWARD


def test_a_backward_pass_that_is_differentiated_recomputes_nothing():
    b = TraceBuilder()
    with (
        b.backward(create_graph=True),
        b.node("MulBackward0"),
        b.op("aten::mul", sequence=7) as product,
    ):
        pass
    assert build_op_tree(b.build()).phase[product] == BACKWARD


def test_marks_stand_where_their_events_do_or_between_the_events_around_their_time():
    b = TraceBuilder()
    b.read()
    placed = b.mark(MarkKind.STEP)
    b.read()
    tree = build_op_tree(b.build())
    ranks = tree.mark_ranks
    assert ranks[0] == -0.5
    assert ranks[placed] == tree.rank[tree.trace.marks["event"][placed]]


def test_a_mark_known_by_its_time_alone_falls_between_two_ranks():
    b = TraceBuilder()
    b.read()
    b.read()
    trace = b.build()
    trace.marks["event"][-1] = -1
    trace.marks["time_ns"][-1] = trace.events["start_ns"][1]
    assert build_op_tree(trace).mark_ranks[-1] == 0.5


def test_a_mark_at_the_first_event_has_its_place_whatever_its_clock_says():
    b = TraceBuilder()
    mark = b.mark(MarkKind.BACKWARD_BEGIN)
    b.read()
    trace = b.build()
    assert trace.marks["event"][mark] == 0
    trace.marks["time_ns"][mark] = trace.events["start_ns"][-1] + 1
    assert build_op_tree(trace).mark_ranks[mark] == 0


def test_a_node_that_the_first_event_calls_is_a_part_of_that_node():
    b = TraceBuilder()
    with (
        b.op("OuterBackward", scope=Scope.BACKWARD_FUNCTION, is_operator=False) as outer,
        b.op("InnerBackward", scope=Scope.BACKWARD_FUNCTION, is_operator=False) as inner,
    ):
        pass
    assert build_op_tree(b.build()).backward_node[inner] == outer == 0


def test_annotations_are_told_from_the_outside_in():
    b = TraceBuilder()

    def annotation(name: str):
        return b.op(name, scope=Scope.OTHER, is_operator=False)

    with annotation("step") as step, annotation("loss") as loss, b.op("aten::mul") as product:
        pass
    tree = build_op_tree(b.build())
    assert Annotations(tree).around(float(tree.rank[product])) == (step, loss)


@pytest.mark.parametrize(
    ("file", "phase"), [("/lib/torch/autograd/__init__.py", BACKWARD), ("train.py", FORWARD)]
)
def test_torch_s_own_call_of_a_backward_pass_is_one_without_any_mark(file, phase):
    b = TraceBuilder()
    with b.op("backward", kind=EventKind.PY_CALL, is_operator=False) as call:
        b._rows["events"][call]["file"] = b._string(file)
        with b.op("aten::mul") as product:
            pass
    tree = build_op_tree(b.build())
    assert [int(tree.phase[row]) for row in (call, product)] == [phase, phase]


def test_at_the_first_event_that_event_runs():
    b = TraceBuilder()
    with b.op("aten::mul"):
        pass
    assert [span.name for span in running_at(build_op_tree(b.build()), 0.0)] == ["aten::mul"]
