"""torch's names for estimates of FX graphs, beside torch's own functions on the same graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_torchmem import estimate
from pytest_torchmem.torch_names.memory_estimator import (
    GraphAliasTracker,
    MemoryTracker,
    build_memory_profile,
    device_filter,
    get_fwd_bwd_interactions,
    get_peak_memory,
)
from pytest_torchmem.values.errors import EstimateError, MarkerError
from tests.fx_graphs import (
    PARTITIONS,
    STEPS,
    Repaired,
    memory_estimator,
    needs_torchs,
    trace,
)
from tests.torch_names.pairs import PROGRAMS, pair_of

pytestmark = [pytest.mark.slow, pytest.mark.compiles, needs_torchs]

GIVEN = ("placeholder", "get_attr", "output")


def made_by_nodes(node: Any) -> bool:
    return node.op not in GIVEN


def on_cuda(device: Any) -> bool:
    return device.type == "cuda"


def three_layers(x, first, second, third):
    hidden = torch.relu(torch.nn.functional.linear(x, first))
    hidden = torch.relu(torch.nn.functional.linear(hidden, second))
    return torch.nn.functional.linear(hidden, third)


def convolutions(x, first, second, last):
    functions = torch.nn.functional
    hidden = functions.max_pool2d(torch.relu(functions.conv2d(x, first, padding=1)), 2)
    hidden = functions.max_pool2d(torch.relu(functions.conv2d(hidden, second, padding=1)), 2)
    return functions.linear(hidden.flatten(1), last)


def products(x, first, second):
    return torch.relu(x @ first) @ second


GRAPHS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "layers": (three_layers, ((32, 1000), (500, 1000), (100, 500), (10, 100)), 2_460_000),
    "convolutions": (
        convolutions,
        ((8, 3, 224, 224), (64, 3, 3, 3), (128, 64, 3, 3), (10, 128 * 56 * 56)),
        226_695_936,
    ),
    "products": (products, ((32, 100), (100, 50), (50, 10)), 47_600),
}


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
@pytest.mark.parametrize("name", GRAPHS)
def test_the_profile_of_a_graph_is_torchs_and_has_its_peak_on_any_device(name, device):
    function, shapes, peak = GRAPHS[name]
    module = trace(function, *shapes, device=device)
    profile = build_memory_profile(module.graph, made_by_nodes)
    assert max(profile) == peak
    assert estimate(module).peak.total == peak
    theirs = memory_estimator().build_memory_profile(module.graph, made_by_nodes)
    assert build_memory_profile(module.graph, made_by_nodes, device_filter=device_filter) == theirs
    assert (theirs == profile) == (device != "cpu")
    tracker = MemoryTracker(module.graph)
    for node in module.graph.nodes:
        if made_by_nodes(node):
            tracker.schedule_node(node)
    assert (
        tracker.get_current_memory_bytes() == build_memory_profile(module.graph, lambda _: True)[-1]
    )


def test_sizes_can_be_rounded_as_an_allocator_does():
    module = trace(products, (32, 100), (100, 50), (50, 10))

    def rounded(size_bytes: Any) -> int:
        return -(-int(size_bytes) // 512) * 512

    ours = build_memory_profile(module.graph, made_by_nodes, size_of=rounded)
    assert ours == memory_estimator().build_memory_profile(module.graph, made_by_nodes, rounded)
    assert ours != build_memory_profile(module.graph, made_by_nodes)


def test_symbolic_sizes_are_their_hints():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(6, 8))
    with mode:
        module = make_fx(lambda t: torch.relu(t.repeat(2, 1)), tracing_mode="symbolic")(x)
    assert build_memory_profile(module.graph, made_by_nodes)[0] == 6 * 8 * 4


# --- other orders --------------------------------------------------------------------------------


def zeros_used_twice(primals_1):
    zeros = torch.zeros_like(primals_1)
    return zeros + 1, zeros.sum()


def test_another_order_of_the_same_nodes_has_another_peak():
    module = trace(zeros_used_twice, (1000, 1000))
    zeros, add, total = (node for node in module.graph.nodes if node.op not in GIVEN)
    after: dict[str, list[int]] = {}
    for name, order in {"own": (zeros, add, total), "other": (zeros, total, add)}.items():
        ours = MemoryTracker(module.graph, device_filter=on_cuda)
        theirs = memory_estimator().MemoryTracker(module.graph, device_filter=on_cuda)
        after[name] = []
        for node in order:
            ours.schedule_node(node)
            theirs.schedule_node(node)
            assert ours.get_current_memory_bytes() == theirs.get_current_memory_bytes()
            assert ours.peak_memory == theirs.peak_memory
            after[name].append(ours.get_current_memory_bytes())
    million = 4_000_000
    assert after == {
        "own": [2 * million, 3 * million, 2 * million + 4],
        "other": [2 * million, 2 * million + 4, 2 * million + 4],
    }


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=10,
    ),
    st.randoms(use_true_random=False),
)
def test_any_order_of_a_random_program_has_torchs_memory(steps, random):
    def program(primals_1, y):
        values = [primals_1, y]
        for step, a, b in steps:
            values.append(STEPS[step](values[a % len(values)], values[b % len(values)]))
        return values[-1]

    module = trace(program, (4, 4), (4, 4))
    ours, theirs = MemoryTracker(module.graph), memory_estimator().MemoryTracker(module.graph)
    waiting = [node for node in module.graph.nodes if made_by_nodes(node)]
    done = {node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")}
    while waiting:
        ready = [node for node in waiting if done.issuperset(node.all_input_nodes)]
        node = random.choice(ready)
        try:
            theirs.schedule_node(node)
        except AssertionError:  # a view after the last use of what it looks into
            with pytest.raises(EstimateError, match="uses a storage that no node has made yet"):
                ours.schedule_node(node)
            return
        ours.schedule_node(node)
        assert ours.get_current_memory_bytes() == theirs.get_current_memory_bytes()
        assert ours.peak_memory == theirs.peak_memory
        waiting.remove(node)
        done.add(node)


def test_a_node_runs_once_and_after_what_it_needs():
    module = trace(zeros_used_twice, (10,))
    zeros, add, _ = (node for node in module.graph.nodes if node.op not in GIVEN)
    tracker = MemoryTracker(module.graph)
    with pytest.raises(EstimateError, match="uses a storage that no node has made yet"):
        tracker.schedule_node(add)
    tracker = MemoryTracker(module.graph)
    tracker.schedule_node(zeros)
    with pytest.raises(EstimateError, match="node zeros_like was scheduled before"):
        tracker.schedule_node(zeros)


def test_who_makes_and_uses_a_storage_is_what_torch_says():
    module = trace(products, (32, 100), (100, 50), (50, 10))
    nodes = list(module.graph.nodes)
    ours, theirs = GraphAliasTracker(nodes), memory_estimator().GraphAliasTracker(nodes)
    for name in ("get_fresh_allocations", "get_storage_uses", "get_storages_last_used"):
        for node in nodes:
            mine = sorted(key.size_bytes for key in getattr(ours, name)(node))
            assert mine == sorted(key.storage.nbytes() for key in getattr(theirs, name)(node)), name
    with pytest.raises(EstimateError, match="there is no node"):
        GraphAliasTracker([])


# --- bytes by node -------------------------------------------------------------------------------


def test_an_estimate_tells_the_bytes_after_each_node():
    module = trace(products, (32, 100), (100, 50), (50, 10))
    estimated = estimate(module)
    profile = build_memory_profile(module.graph, made_by_nodes)
    nodes = estimated.nodes()
    assert [n.name for n in nodes] == [n.name for n in module.graph.nodes if made_by_nodes(n)]
    assert [b for n in nodes for b in (n.during_bytes, n.after_bytes)] == profile[1:]
    assert nodes[0].operator == "aten::mm"


@pytest.mark.parametrize("wrong", [{"gpu": "H100"}, {"devise": "cpu"}])
def test_an_option_that_a_graph_does_not_take_is_refused(wrong):
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    assert estimate(exported, device="cpu").peak.total == estimate(exported.graph).peak.total
    with pytest.raises(MarkerError, match="and of options backward, device, is_releasable"):
        estimate(exported, **wrong)


def test_an_estimate_can_be_told_what_is_released():
    module = trace(products, (32, 100), (100, 50), (50, 10))
    kept = estimate(module, is_releasable=lambda node: False).nodes()[-1].after_bytes
    released = estimate(module, is_releasable=lambda node: True).nodes()[-1].after_bytes
    inputs, hidden, last = 34_800, 2 * 32 * 50 * 4, 32 * 10 * 4
    assert (kept, released) == (inputs + hidden + last, last)


# --- pairs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pair_of_graphs_is_what_torchs_functions_make_of_it(name, partition, monkeypatch):
    forward, backward = pair_of(name, partition)
    held, pinned = get_fwd_bwd_interactions(forward.graph, backward.graph)
    original = memory_estimator().get_fwd_bwd_interactions
    repaired = original(Repaired(forward.graph), backward.graph)
    assert (held, pinned) == (repaired[0], set(repaired[1]))
    monkeypatch.setattr(
        memory_estimator(),
        "get_fwd_bwd_interactions",
        lambda f, b, *rest: original(Repaired(f), b, *rest),
    )
    theirs = memory_estimator().get_peak_memory(forward.graph, backward.graph)
    assert get_peak_memory(forward.graph, backward.graph) == theirs

    # The whole step also holds the primals that backward does not take, and drops a tangent with
    # its last use.
    def released(node: Any) -> bool:
        held_by_caller = node.name in pinned and not node.name.startswith("tangents")
        return not (node.name.startswith("primals") or held_by_caller)

    storages_of = memory_estimator().GraphAliasTracker._get_output_storages
    given, taken = (
        {key for node in graph.find_nodes(op="placeholder") for key in storages_of(node)}
        for graph in (forward.graph, backward.graph)
    )
    returned = {
        key for node in forward.graph.output_node().all_input_nodes for key in storages_of(node)
    }
    idle = sum(key.storage.nbytes() for key in given - taken - returned)
    in_backward = max(memory_estimator().build_memory_profile(backward.graph, released))
    in_forward = max(memory_estimator().build_memory_profile(forward.graph, made_by_nodes))
    assert estimate(forward, backward=backward).peak.total == max(
        in_forward, held + idle + in_backward
    )


@pytest.mark.parametrize("by_keyword", [False, True])
def test_the_older_signature_with_sizes_of_nodes_is_answered(by_keyword: bool) -> None:
    with FakeTensorMode():
        graph = make_fx(lambda x: (x + 1).exp().sum())(torch.empty(1000)).graph

    def size_of(node: Any) -> int:
        value = node.meta["val"]
        return 2 * int(value.untyped_storage().nbytes())

    def is_releasable(node: Any) -> bool:
        return bool(node.op == "call_function")

    if by_keyword:
        old = build_memory_profile(graph, size_of=size_of, is_releasable=is_releasable)
    else:
        old = build_memory_profile(graph, size_of, is_releasable)
    # The input stays; x + 1 is released after exp, exp after sum.
    assert old == [8000, 16000, 16000, 24000, 16000, 16008, 8008]
    assert old == build_memory_profile(graph, is_releasable, lambda size_bytes: 2 * size_bytes)


def test_a_node_with_several_storages_splits_the_size_that_it_is_given() -> None:
    with FakeTensorMode():
        graph = make_fx(lambda x: torch.max(x, 0))(torch.empty(10, 100)).graph

    def size_of(node: Any) -> int:
        return 1200 if node.target is torch.ops.aten.max.dim else 0

    assert build_memory_profile(graph, size_of, lambda node: node.op == "call_function")[1] == 1200
