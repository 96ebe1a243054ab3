"""The static rules, on graphs written by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_torchmem.analysis.estimated.static import (
    allocation_events,
    build_estimated_timeline,
    estimate_result,
    interactions,
    join_pair,
    lifetimes_by_last_use,
    memory_profile,
    not_primal,
    pair_peak_bytes,
)
from pytest_torchmem.analysis.estimated.static_facts import settle_categories
from pytest_torchmem.values.contributors import Category, Phase, Source
from pytest_torchmem.values.static_graph import (
    Lifetimes,
    NodeKind,
    StaticGraph,
    StaticNode,
    StaticRun,
    StaticStorage,
)


def given(name: str, *makes: int, uses: tuple[int, ...] = ()) -> StaticNode:
    return StaticNode(name, NodeKind.INPUT, makes=makes, uses=uses or makes)


def op(name: str, makes: tuple[int, ...] = (), uses: tuple[int, ...] = (), **more) -> StaticNode:
    return StaticNode(name, NodeKind.OPERATOR, f"aten::{name}", makes=makes, uses=uses, **more)


def output(*uses: int) -> StaticNode:
    return StaticNode("output", NodeKind.OUTPUT, uses=uses)


def graph_of(sizes: list[int], *nodes: StaticNode, device: str = "cpu") -> StaticGraph:
    return StaticGraph(nodes, tuple(StaticStorage(size, device) for size in sizes))


def run_of(graph: StaticGraph, device: str = "cpu") -> StaticRun:
    return StaticRun(graph, lifetimes_by_last_use(graph), device)


CHAIN = graph_of(
    [10, 20, 40, 80],
    given("x", 0),
    op("mm", (1,), (0,)),
    op("relu", (2,), (1,)),
    op("mm", (3,), (2,)),
    output(3),
)


def test_profile_has_an_entry_for_each_allocation_and_each_release():
    # x, then mm, relu (mm's output goes), mm (relu's output goes).
    assert memory_profile(CHAIN) == [10, 30, 30, 70, 50, 130, 90]


def test_inputs_are_released_only_where_the_rule_permits():
    assert memory_profile(CHAIN, lambda _: True)[2] == 20
    assert memory_profile(CHAIN, lambda node: node.name != "x")[2] == 30


def test_what_the_output_uses_is_never_released():
    assert memory_profile(CHAIN)[-1] == 10 + 80


def test_a_view_keeps_its_storage_until_its_own_last_use():
    graph = graph_of(
        [10, 20, 5],
        given("x", 0),
        op("mm", (1,), (0,)),
        op("view", (), (1,)),
        op("add", (2,), (0,)),
        op("use", (), (1,)),
        output(2),
    )
    assert memory_profile(graph) == [10, 30, 30, 30, 30, 35, 35, 35, 15]


def test_an_output_that_no_getitem_claims_goes_with_the_last_getitem():
    graph = graph_of(
        [10, 20, 7],
        given("x", 0),
        op("split_like", (1, 2), (0,)),
        op("getitem", (), (1, 2)),
        op("use", (), (1,)),
        output(0),
    )
    # 7 bytes are nobody's: they are there while the list is, and no longer.
    assert memory_profile(graph) == [10, 37, 37, 37, 30, 30, 10]


def test_what_nobody_uses_stays():
    graph = graph_of([10, 20], given("x", 0), op("mm", (1,), (0,)), output(0))
    assert memory_profile(graph) == [10, 30, 30]


def test_other_devices_do_not_count():
    storages = (StaticStorage(10, "cpu"), StaticStorage(20, "cuda:0"))
    graph = StaticGraph((given("x", 0), op("to", (1,), (0,)), output(1)), storages)
    assert memory_profile(graph, on_device=lambda device: device != "cpu") == [0, 20, 20]
    assert build_estimated_timeline(run_of(graph, "cuda:0")).total.tolist() == [0, 20, 20]
    assert build_estimated_timeline(run_of(graph, "cpu")).total.tolist() == [10, 10, 10]


def test_timeline_is_the_profile_by_category():
    run = settle_categories(run_of(CHAIN))
    timeline = build_estimated_timeline(run)
    assert timeline.estimated
    assert timeline.total.tolist() == memory_profile(CHAIN)
    assert timeline.times_ns.tolist() == [0, 1, 1, 2, 2, 3, 3]
    assert timeline.of(Category.INPUT).tolist() == [10] * 7
    assert timeline.of(Category.TEMPORARY).tolist() == [0, 20, 20, 60, 40, 120, 80]


def test_allocation_events_conserve_bytes_and_never_free_what_is_not_there():
    events = allocation_events(run_of(CHAIN))
    live: dict[int, int] = {}
    for storage, size in events.tolist():
        if size > 0:
            assert storage not in live
            live[storage] = size
        else:
            assert live.pop(storage) == -size
    assert live == {0: 10, 3: 80}


def test_result_names_what_is_live_at_the_peak_and_is_marked_estimated():
    source = Source("train.py", 7, "forward")
    nodes = [
        replace(n, module="Net.layers.3.mlp", source=source) if n.kind is NodeKind.OPERATOR else n
        for n in CHAIN.nodes
    ]
    result = estimate_result(run_of(StaticGraph(tuple(nodes), CHAIN.storages)), "body")
    assert result.estimated
    assert result.name == "body"
    assert (result.peak.total, result.peak.time_ns) == (130, 3)
    assert result.peak.at_peak.total == 130
    first = result.peak.live[0]
    assert (first.size_bytes, first.operator, first.module) == (80, "aten::mm", "Net.layers.*.mlp")
    assert first.source == source
    assert result.retained.total == 80
    assert not result.has_backward


def test_what_the_first_operator_makes_and_the_output_uses_is_retained():
    graph = graph_of([10, 20], given("x", 0), op("mm", (1,), (0,)), output(1))
    assert estimate_result(run_of(graph)).retained.total == 20


def test_each_category_names_what_it_held_when_it_held_most():
    graph = graph_of(
        [50, 10, 1, 5],
        given("x", 3),
        op("early", (0,), (3,)),
        op("save", (1,), (0,)),
        backward("read", (), (1,)),
        op("late", (2,)),
    )
    peak = estimate_result(run_of(graph)).peak
    own = [(c.category, c.operator) for c in peak.live_by_category]
    assert own == [
        (Category.TEMPORARY, "aten::early"),
        (Category.ACTIVATION, "aten::save"),
        (Category.INPUT, ""),
    ]


def test_storages_of_one_origin_are_one_contributor():
    graph = graph_of(
        [8, 8, 8],
        op("mm", (0,)),
        op("mm", (1,)),
        op("exp", (2,)),
        output(0, 1, 2),
    )
    live = estimate_result(run_of(graph)).peak.live
    assert [(c.operator, c.count, c.size_bytes) for c in live] == [
        ("aten::mm", 2, 16),
        ("aten::exp", 1, 8),
    ]


# Categories.


def backward(name: str, makes=(), uses=()) -> StaticNode:
    return op(name, makes, uses, phase=Phase.BACKWARD)


def categories_of(graph: StaticGraph, ends: dict[int, int] | None = None) -> list[Category]:
    lifetimes = lifetimes_by_last_use(graph)
    end = lifetimes.end.copy()
    for storage, row in (ends or {}).items():
        end[storage] = row
    run = settle_categories(StaticRun(graph, Lifetimes(lifetimes.first, end), "cpu"))
    return [s.category for s in run.graph.storages]


def test_activation_is_what_the_backward_reads():
    graph = graph_of(
        [1, 1, 1],
        given("x", 0),
        op("mm", (1,), (0,)),
        op("exp", (2,), (1,)),
        backward("mul", (), (1,)),
    )
    assert categories_of(graph)[1:] == [Category.ACTIVATION, Category.TEMPORARY]


def test_what_dies_while_the_backward_runs_was_kept_for_it():
    graph = graph_of([1, 1], op("exp", (0,)), backward("a"), backward("b"), op("end"))
    assert categories_of(graph, {0: 4})[0] is Category.ACTIVATION
    assert categories_of(graph, {0: 8})[0] is Category.TEMPORARY


def test_gradient_is_what_the_backward_made_and_somebody_holds():
    graph = graph_of(
        [1, 1, 1],
        op("mm", ()),
        backward("mm", (0,), ()),
        backward("mul", (1, 2), ()),
        backward("add", (), (0, 1)),
    )
    assert categories_of(graph) == [
        Category.AUTOGRAD_DETAIL,
        Category.AUTOGRAD_DETAIL,
        Category.GRADIENT,
    ]


def test_what_a_later_backward_pass_reads_of_an_earlier_one_is_activation():
    graph = graph_of(
        [1, 1],
        op("mm", ()),
        backward("mm", (0, 1), ()),
        op("pow", (), (0, 1)),
        backward("mul", (), (0,)),
        op("end"),
    )
    # Both have a name in Python until the end.
    ends = dict.fromkeys((0, 1), graph.row_count)
    assert categories_of(graph, ends) == [Category.ACTIVATION, Category.GRADIENT]


def test_what_is_computed_again_is_not_kept_for_a_later_pass_that_never_reads_it():
    graph = graph_of(
        [1],
        op("exp", (0,), (), phase=Phase.RECOMPUTE),
        op("mm"),
        backward("mul"),
        backward("mul"),
    )
    assert categories_of(graph, {0: 6}) == [Category.TEMPORARY]


def test_what_dies_with_the_operator_that_made_it_is_handed_to_no_node():
    graph = graph_of([1, 1], backward("mul", (0,)), backward("mul", (1,)), backward("mul"))
    ends = {0: 2, 1: 5}
    assert categories_of(graph, ends) == [Category.TEMPORARY, Category.AUTOGRAD_DETAIL]


def test_the_first_gradient_is_nobodys_though_it_outlives_the_pass():
    storages = (StaticStorage(1, "cpu", Category.AUTOGRAD_DETAIL),)
    graph = StaticGraph((backward("ones_like", (0,)), op("end")), storages)
    assert categories_of(graph) == [Category.AUTOGRAD_DETAIL]


def test_recomputed_storages_are_activations_only_if_the_backward_reads_them():
    graph = graph_of(
        [1, 1],
        op("mm", (0,), (), phase=Phase.RECOMPUTE),
        op("exp", (1,), (), phase=Phase.RECOMPUTE),
        backward("mul", (), (0,)),
    )
    ends = {0: 6, 1: 6}
    assert categories_of(graph, ends) == [Category.ACTIVATION, Category.TEMPORARY]


def test_data_made_by_the_body_is_input_until_a_module_works_on_it():
    graph = graph_of(
        [1, 1, 1],
        op("randn", (0,)),
        op("div", (1,), (0,)),
        op("linear", (2,), (1,), module="Net"),
        output(2),
    )
    # What only data is made from, the model never sees.
    assert categories_of(graph) == [Category.TEMPORARY, Category.INPUT, Category.TEMPORARY]


def test_owners_have_the_first_word():
    storages = (StaticStorage(1, "cpu", Category.OPTIMIZER_STATE),)
    graph = StaticGraph((op("zeros_like", (0,)),), storages)
    assert categories_of(graph) == [Category.OPTIMIZER_STATE]


# A forward and its backward.

# primals_1 (100) is used by backward, primals_2 (1) is not; 10 is saved, 1000 is the result, 5 is
# saved and never read, 7 is a tangent, 40 a gradient.
PAIR_SIZES = [100, 1, 10, 1000, 5, 7, 40]
FORWARD = graph_of(
    PAIR_SIZES,
    given("primals_1", 0),
    given("primals_2", 1),
    op("mm", (2, 4), (0,)),
    op("add", (3,), (2, 1)),
    output(3, 2, 4, 0),
)
BACKWARD = graph_of(
    PAIR_SIZES,
    given("primals_1", 0),
    given("mm", 2),
    given("saved", 4),
    given("tangents_1", 5),
    backward("mul", (6,), (5, 2)),
    backward("view", (), (6, 0)),
    output(6),
)


def test_interactions_name_what_stays_and_what_backward_may_not_release():
    assert interactions(FORWARD, BACKWARD) == (1000, {"primals_1", "tangents_1"})


def test_pair_peak_is_the_larger_of_both_passes():
    in_forward = 101 + 15 + 1000
    in_backward = 1000 + 100 + 10 + 5 + 7 + 40
    assert max(memory_profile(FORWARD, not_primal)) == in_forward
    assert pair_peak_bytes(FORWARD, BACKWARD) == max(in_forward, in_backward)


def test_an_output_that_the_backward_does_not_take_is_the_caller_s_to_the_end():
    sizes = [1, 2, 4, 8]
    forward = graph_of(
        sizes, given("x", 0), op("mm", (1,), (0,)), op("exp", (2,), (1,)), output(1, 2)
    )
    after = graph_of(
        sizes, given("exp", 2), given("tangents_1", 3), backward("mul", (), (3, 2)), output()
    )
    run = join_pair(forward, after, "cpu")
    assert run.lifetimes.end[1] == run.graph.row_count


def test_joined_pair_has_one_clock_and_keeps_the_callers_storages():
    run = join_pair(FORWARD, BACKWARD, "cpu")
    result = estimate_result(run)
    # Idle primals count here.
    assert result.peak.total == 1000 + 101 + 10 + 5 + 7 + 40
    assert result.has_backward
    assert result.peak.at_peak[Category.ACTIVATION] == 10
    end = run.lifetimes.end
    rows = run.graph.row_count
    assert end[[0, 1, 3, 6]].tolist() == [rows] * 4
    assert end[2] < rows
    assert end[5] < rows


def test_releasing_less_never_lowers_the_profile():
    keep_all = memory_profile(CHAIN, lambda _: False)
    assert np.all(np.array(keep_all) >= np.array(memory_profile(CHAIN)))


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_an_empty_graph_needs_nothing(device):
    result = estimate_result(run_of(graph_of([]), device))
    assert (result.peak.total, result.retained.total) == (0, 0)
