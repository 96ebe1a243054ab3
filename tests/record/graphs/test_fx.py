"""Reading FX graphs, and torch's own estimator on the same graphs."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from pytest_torchmem.analysis.estimated.static import (
    estimate_result,
    interactions,
    join_pair,
    lifetimes_by_last_use,
    memory_profile,
    not_primal,
    pair_peak_bytes,
)
from pytest_torchmem.record.graphs.fx_graphs import read_graph, read_pair
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticRun
from tests.fx_graphs import (
    PARTITIONS,
    STEPS,
    Repaired,
    memory_estimator,
    needs_torchs,
    not_cpu,
    partition_by,
    say_device,
    torchs_profile,
    trace,
)

pytestmark = [pytest.mark.slow, pytest.mark.compiles, needs_torchs]


def assert_same_profile(module: torch.fx.GraphModule) -> None:
    graph = read_graph(module)
    computed = ("call_function", "call_method", "call_module")
    assert memory_profile(graph, on_device=not_cpu) == torchs_profile(
        module.graph, lambda node: node.op in computed
    )
    assert memory_profile(graph, not_primal, not_cpu) == torchs_profile(
        module.graph, lambda node: not node.name.startswith("primals")
    )
    assert memory_profile(graph, lambda _: True, not_cpu) == torchs_profile(
        module.graph, lambda _: True
    )


def mlp(x, w, b):
    return torch.relu(x @ w + b) @ w


def views(x, w, b):
    y = (x @ w).view(4, 2, 8).transpose(0, 1)
    return y.reshape(8, 8) + b, y[0]


def many_outputs(x, w, b):
    values, _ = torch.topk(x @ w, 3)
    parts = torch.split(x @ w, 4, dim=1)
    mean, _ = torch.var_mean(parts[1], dim=0)
    return values.sum() + mean.sum() + parts[0].sum()


def in_place(x, w, b):
    y = torch.zeros_like(x)
    y.add_(x)
    y[:2].mul_(2)
    x.add_(1)
    return torch.exp(y)


def normed(x, w, b):
    y, mean, _ = torch.native_layer_norm(x, [8], b, b, 1e-5)
    return y * mean


@pytest.mark.parametrize("function", [mlp, views, many_outputs, in_place, normed])
def test_profile_is_torchs(function):
    assert_same_profile(trace(function, (8, 8), (8, 8), (8,)))


def test_profile_is_torchs_on_two_devices():
    with FakeTensorMode(), torch.no_grad():
        x = torch.empty(8, 8, device="cuda")
        assert_same_profile(make_fx(lambda t: (t.cpu() * 2).to(t.device) @ t)(x))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 99),
)
def test_profile_is_torchs_on_random_programs(steps, kept):
    def program(x, y):
        values = [x, y]
        for step, a, b in steps:
            values.append(STEPS[step](values[a % len(values)], values[b % len(values)]))
        return values[-1], values[kept % len(values)]

    assert_same_profile(trace(program, (4, 4), (4, 4)))


def test_cpu_graph_has_the_profile_that_its_cuda_twin_has():
    on_cpu, on_cuda = (trace(views, (8, 8), (8, 8), (8,), device=d) for d in ("cpu", "cuda:0"))
    assert max(torchs_profile(on_cpu.graph, lambda _: False)) == 0
    assert memory_profile(read_graph(on_cpu)) == memory_profile(read_graph(on_cuda))
    assert max(memory_profile(read_graph(on_cpu))) > 0


# Pairs.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.outer = nn.Linear(32, 8)

    def forward(self, x):
        return x + self.outer(torch.nn.functional.gelu(self.norm(self.inner(x))))


def partitioned(partition: str = PARTITIONS[0], device: str = "cpu"):
    """Joint, forward and backward graph of a block; traced on the CPU, whatever is said after."""
    from torch._functorch.aot_autograd import aot_function, make_boxed_func

    graphs = []
    model = Block()
    names = [name for name, _ in model.named_parameters()]
    mode = FakeTensorMode()

    def keep(module, _):
        graphs.append(module)
        return make_boxed_func(module.forward)

    def keep_joint(module, *args, **kwargs):
        graphs.append(module)
        return partition_by(partition)(module, *args, **kwargs)

    def call(x, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), x)

    with mode:
        parameters = [mode.from_tensor(p) for p in model.parameters()]
        x = torch.empty(16, 8, requires_grad=True)
        compiled = aot_function(call, fw_compiler=keep, bw_compiler=keep, partition_fn=keep_joint)
        compiled(x, *parameters).sum().backward()
    for module in graphs:
        say_device(module, device)
    return graphs


@pytest.mark.parametrize("partition", PARTITIONS)
def test_interactions_are_torchs(partition):
    _, forward, backward = partitioned(partition, "cuda:0")
    ours = interactions(*read_pair(forward, backward), not_cpu)
    held, pinned = memory_estimator().get_fwd_bwd_interactions(
        Repaired(forward.graph), backward.graph
    )
    assert ours == (held, set(pinned))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_pair_peak_is_what_torch_defines_where_torch_raises(partition, monkeypatch):
    _, forward, backward = partitioned(partition, "cuda:0")
    ours = pair_peak_bytes(*read_pair(forward, backward), not_cpu)
    original = memory_estimator().get_fwd_bwd_interactions
    monkeypatch.setattr(
        memory_estimator(),
        "get_fwd_bwd_interactions",
        lambda f, b, *rest: original(Repaired(f), b, *rest),
    )
    assert ours == memory_estimator().get_peak_memory(forward.graph, backward.graph) > 0


def test_both_passes_have_torchs_profile():
    for module in partitioned(device="cuda:0"):
        assert_same_profile(module)


def test_saved_storages_stay_until_backward_has_used_them():
    _, forward, backward = partitioned()
    result = estimate_result(join_pair(*read_pair(forward, backward), "cpu"))
    saved = 16 * 32 * 4
    # The output of inner, of the norm and of gelu.
    assert result.peak.activation >= 3 * saved
    assert result.peak.total >= pair_peak_bytes(*read_pair(forward, backward))
    assert result.retained.total >= sum(p.nbytes for p in Block().parameters())


def test_what_a_backward_graph_takes_that_its_forward_does_not_make_was_saved_for_it():
    (_, forward, _), (_, _, of_another_trace) = partitioned(), partitioned()
    _, backward = read_pair(forward, of_another_trace)
    own = ("primals", "tangents")
    saved = [
        backward.storages[storage]
        for node in backward.nodes
        if node.kind is NodeKind.INPUT and not node.name.startswith(own)
        for storage in node.makes
    ]
    assert saved
    assert {storage.category for storage in saved} == {Category.ACTIVATION}


def test_joint_graph_knows_its_backward_by_the_tangents():
    joint = read_graph(partitioned()[0])
    phases = {node.name: node.phase for node in joint.nodes}
    assert phases["tangents_1"] is Phase.BACKWARD
    assert phases["primals_1"] is Phase.FORWARD
    operators = [n for n in joint.nodes if n.kind is NodeKind.OPERATOR]
    assert {operators[0].phase, operators[-1].phase} == {Phase.FORWARD, Phase.BACKWARD}
    result = estimate_result(StaticRun(joint, lifetimes_by_last_use(joint), "cpu"))
    assert result.peak.gradient >= sum(p.nbytes for p in Block().parameters())


# Exported programs.


def exported(model: nn.Module | None = None) -> torch.export.ExportedProgram:
    return torch.export.export(model or Block(), (torch.randn(16, 8),))


def run_of(graph: StaticGraph) -> StaticRun:
    return StaticRun(graph, lifetimes_by_last_use(graph), "cpu")


def test_exported_program_says_what_its_inputs_are_for():
    model = nn.Sequential(Block(), nn.BatchNorm1d(8))
    peak = estimate_result(run_of(read_graph(exported(model)))).peak
    assert peak.at_peak.parameter == sum(p.nbytes for p in model.parameters())
    assert peak.at_peak.buffer == sum(b.nbytes for b in model.buffers())
    assert peak.at_peak.input == 16 * 8 * 4


def test_exported_program_names_module_operator_and_line():
    live = estimate_result(run_of(read_graph(exported()))).peak.live
    computed = [c for c in live if c.phase is not Phase.PREEXISTING]
    assert {c.module for c in computed} & {"inner", "norm", "outer"}
    assert all(c.operator.startswith("aten::") for c in computed)
    sources = [c.source for c in computed if c.source is not None]
    assert sources
    assert all(s.file == __file__ and s.function == "forward" for s in sources)


def test_saved_and_loaded_program_has_the_same_profile():
    program = exported()
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer)
    assert memory_profile(read_graph(loaded)) == memory_profile(read_graph(program))


def test_views_are_found_by_schema_where_fake_tensors_share_nothing():
    module = trace(many_outputs, (8, 8), (8, 8), (8,), device="cpu")
    before = memory_profile(read_graph(module))
    mode = FakeTensorMode()
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map_only(
                torch.Tensor,
                lambda t: mode.from_tensor(
                    torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
                ),
                node.meta["val"],
            )
    assert memory_profile(read_graph(module)) == before


# The rest.


def test_symbolic_sizes_count_by_their_hints():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.empty(6, 8))
    with mode:
        module = make_fx(lambda t: torch.relu(t.repeat(2, 1)), tracing_mode="symbolic")(x)
    sizes = [s.size_bytes for s in read_graph(module).storages]
    assert sizes == [6 * 8 * 4, 12 * 8 * 4, 12 * 8 * 4]


def test_parameters_that_the_graph_holds_count_from_the_start():
    model = nn.Linear(8, 8)
    module = make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.empty(4, 8))
    graph = read_graph(module)
    held = [n for n in graph.nodes if n.kind is NodeKind.ATTRIBUTE]
    assert {graph.storages[n.makes[0]].category for n in held} == {Category.PARAMETER}
    assert memory_profile(graph)[0] == 4 * 8 * 4 + sum(p.nbytes for p in model.parameters())


def test_an_in_place_operator_makes_nothing_and_is_known_to_write():
    graph = read_graph(trace(lambda x: x.add_(1).exp(), (4,), device="cpu"))
    add = next(n for n in graph.nodes if n.operator == "aten::add_")
    assert add.makes == ()
    assert add.writes == graph.nodes[0].makes


def test_a_graph_without_fake_tensors_says_what_to_do():
    module = torch.fx.symbolic_trace(Block())
    with pytest.raises(EstimateError, match=r"no fake tensors.*FakeTensorProp.*\[not-estimated\]"):
        read_graph(module)


def test_what_is_no_graph_is_refused():
    with pytest.raises(EstimateError, match="cannot read a Linear as a graph"):
        read_graph(nn.Linear(2, 2))
