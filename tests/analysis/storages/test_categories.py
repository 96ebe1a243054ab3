"""Each category pass on the smallest trace that it speaks about."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from pytest_torchmem.analysis.judge.verdict import judge_baseline
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.categories import CATEGORY_PASSES, decide
from pytest_torchmem.analysis.storages.evidence import Evidence, RankWindow
from pytest_torchmem.analysis.storages.explanation import Explanation
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Reference
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.trace import MarkKind, Ownership, Role, Scope, Trace
from pytest_torchmem.values.units import MiB
from tests.builders import Block, TraceBuilder


def explained(profile: MemoryProfile, block: Block) -> Explanation:
    """The word on the last storage at the block's pointer."""
    pointers = profile.storages.ptr.tolist()
    return [e for e in profile.explain() if pointers[e.number] == block.ptr][-1]


def label_of(profile: MemoryProfile, block: Block) -> Category:
    return explained(profile, block).storage.category


def reason_of(profile: MemoryProfile, block: Block) -> str:
    return explained(profile, block).reason


def label_in(builder: TraceBuilder, block: Block) -> Category:
    return label_of(analyze_trace(builder.build()), block)


@pytest.mark.parametrize(
    ("owner", "category"),
    [
        (Ownership.PARAMETER, Category.PARAMETER),
        (Ownership.BUFFER, Category.BUFFER),
        (Ownership.GRADIENT, Category.GRADIENT),
        (Ownership.OPTIMIZER_STATE, Category.OPTIMIZER_STATE),
    ],
)
def test_what_a_module_or_an_optimizer_holds_is_what_it_says(owner, category):
    b = TraceBuilder()
    held = b.existing(8, owner)
    b.read(held)
    assert label_in(b, held) is category


def test_the_python_tracer_knows_parameters_too():
    b = TraceBuilder()
    weight = b.existing(8)
    with b.module(1) as call:
        b.mention(weight, call, role=Role.MODULE_PARAMETER)
    assert label_in(b, weight) is Category.PARAMETER


def test_a_parameter_that_is_saved_for_backward_stays_a_parameter():
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.backward():
        b.owner(weight, Ownership.SAVED)
    assert label_in(b, weight) is Category.PARAMETER


def test_a_parameter_that_is_also_a_buffer_stays_a_parameter():
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER, Ownership.BUFFER)
    b.read(weight)
    assert label_in(b, weight) is Category.PARAMETER


def test_data_that_is_saved_for_backward_stays_input():
    b = TraceBuilder()
    x, weight = b.existing(16), b.existing(8, Ownership.PARAMETER)
    b.read(x, weight, name="aten::mm")
    with b.backward():
        b.owner(x, Ownership.SAVED)
    assert label_in(b, x) is Category.INPUT


def test_a_graph_that_keeps_nothing_of_the_body_promises_no_backward_pass():
    b = TraceBuilder()
    x = b.existing(16)
    with b.op("aten::mul", reads=[x]):
        result = b.alloc(16)
    stop = b.mark(MarkKind.STOP)
    b.owner(x, Ownership.SAVED, mark=stop)
    profile = analyze_trace(b.build())
    assert not profile.recording.has_backward
    assert label_of(profile, result) is Category.TEMPORARY


def test_the_leaves_of_a_backward_pass_are_the_parameters_where_nobody_holds_any():
    b = TraceBuilder()
    weight = b.existing(8)
    b.read(weight, name="aten::mm")
    with b.backward():
        b.owner(weight, Ownership.LEAF)
    told = explained(analyze_trace(b.build()), weight)
    assert told.storage.category is Category.PARAMETER
    assert told.reason == "a backward pass gives it a gradient, and nobody holds any parameters"


def test_a_module_that_the_body_does_not_use_has_no_say_in_what_the_parameters_are():
    b = TraceBuilder()
    others, weight = b.existing(8), b.existing(16)
    b.owner(others, Ownership.PARAMETER, mark=0, module=2, name="weight")
    b.read(weight, name="aten::mm")
    with b.backward():
        b.owner(weight, Ownership.LEAF)
    assert label_in(b, weight) is Category.PARAMETER


def test_a_leaf_beside_a_module_is_data():
    b = TraceBuilder()
    weight, x = b.existing(8, Ownership.PARAMETER), b.existing(16)
    b.read(x, weight, name="aten::mm")
    with b.backward():
        b.owner(x, Ownership.LEAF)
    assert label_in(b, x) is Category.INPUT


def test_data_from_before_that_the_forward_pass_reads_is_input():
    b = TraceBuilder()
    x = b.existing(16)
    b.read(x)
    assert label_in(b, x) is Category.INPUT


def test_data_made_out_of_nothing_that_the_model_reads_is_input():
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.op("aten::randn"):
        x = b.alloc(16)
    with b.module(1), b.op("aten::mm", reads=[x, weight]):
        b.alloc(32)
    assert label_in(b, x) is Category.INPUT


def test_data_that_the_model_writes_over_is_data_no_longer():
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.op("aten::randn"):
        x = b.alloc(16)
    with b.module(1), b.op("aten::mm", reads=[weight], writes=[x]):
        pass
    with b.module(1), b.op("aten::mm", reads=[x, weight]):
        b.alloc(32)
    assert label_in(b, x) is Category.TEMPORARY


def test_a_number_does_not_make_an_input_of_the_model_out_of_data():
    b = TraceBuilder()
    raw, weight = b.existing(16), b.existing(8, Ownership.PARAMETER)
    number = b.alloc(8)
    with b.op("aten::div", reads=[raw, number]):
        x = b.alloc(64)
    with b.module(1), b.op("aten::mm", reads=[x, weight]):
        b.alloc(32)
    assert label_in(b, x) is Category.INPUT


def saved_and_not(backward: bool) -> tuple[MemoryProfile, Block, Block]:
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.op("aten::mm", reads=[weight], sequence=0):
        saved = b.alloc(32)
        b.read(weight)
    with b.op("aten::relu", reads=[saved], sequence=1):
        other = b.alloc(32)
    if backward:
        with b.backward():
            b.owner(saved, Ownership.SAVED)
    return analyze_trace(b.build()), saved, other


def test_what_a_graph_keeps_is_activation_and_the_rest_temporary():
    profile, saved, other = saved_and_not(backward=True)
    assert label_of(profile, saved) is Category.ACTIVATION
    assert reason_of(profile, saved) == "an autograd graph keeps it for backward"
    assert label_of(profile, other) is Category.TEMPORARY


def test_without_a_backward_pass_nothing_is_kept_for_one():
    profile, saved, other = saved_and_not(backward=False)
    assert not profile.recording.has_backward
    assert label_of(profile, saved) is label_of(profile, other) is Category.TEMPORARY


def test_what_a_backward_node_reads_was_kept_for_it():
    b = TraceBuilder()
    with b.op("MyFunction", sequence=0):
        kept = b.alloc(32)
        scratch = b.alloc(64)
        b.free(scratch)
    with b.backward(), b.node("MyFunctionBackward"), b.op("aten::mul", reads=[kept]):
        pass
    profile = analyze_trace(b.build())
    assert label_of(profile, kept) is Category.ACTIVATION
    assert reason_of(profile, kept).endswith("an operator of the backward pass reads it")
    assert label_of(profile, scratch) is Category.TEMPORARY


def test_the_loss_is_not_kept_because_the_first_gradient_has_its_shape():
    b = TraceBuilder()
    with b.op("aten::mean", sequence=0):
        loss = b.alloc(4)
    with b.backward(), b.op("aten::ones_like", reads=[loss]):
        b.alloc(4)
    assert label_in(b, loss) is Category.TEMPORARY


def test_a_gradient_that_the_body_gives_to_backward_is_not_kept_for_it():
    b = TraceBuilder()
    with b.op("aten::rand"):
        given = b.alloc(16)
    with b.backward():
        b.owner(given, Ownership.GRADIENT_ROOT)
        with b.node("MulBackward0"), b.op("aten::mul", reads=[given]):
            pass
    assert label_in(b, given) is Category.AUTOGRAD_DETAIL


def test_what_a_checkpoint_recomputes_is_activation():
    b = TraceBuilder()
    with b.backward(), b.node("CheckpointBackward"):
        with b.op("aten::mm", sequence=3):
            again = b.alloc(32)
        with b.node("MmBackward0"), b.op("aten::mm", reads=[again]):
            pass
    assert label_in(b, again) is Category.ACTIVATION


def backward_of_a_product(summed: bool, marked: bool = True) -> tuple[MemoryProfile, Block, Block]:
    b = TraceBuilder()
    with b.backward() if marked else nullcontext():
        with b.op("autograd::engine::evaluate_function: MulBackward0", is_operator=False):
            with (
                b.op("MulBackward0", scope=Scope.BACKWARD_FUNCTION, is_operator=False),
                b.op("aten::mul"),
            ):
                scratch = b.alloc(64)
                b.free(scratch)
                result = b.alloc(128)
            if summed:
                with b.op("aten::sum", reads=[result]):
                    b.alloc(8)
                b.free(result)
        b.read()
    return analyze_trace(b.build()), scratch, result


def test_what_a_node_hands_on_is_autograd_detail_and_its_scratch_temporary():
    profile, scratch, result = backward_of_a_product(summed=False)
    assert label_of(profile, scratch) is Category.TEMPORARY
    assert label_of(profile, result) is Category.AUTOGRAD_DETAIL


@pytest.mark.parametrize("marked", [True, False])
def test_what_the_engine_sums_up_first_is_not_handed_on(marked):
    """A recording may begin with the engine's event, and without a mark before it."""
    profile, _, result = backward_of_a_product(summed=True, marked=marked)
    assert label_of(profile, result) is Category.TEMPORARY


def test_a_sum_that_the_engine_makes_between_two_nodes_is_autograd_detail():
    b = TraceBuilder()
    with b.backward(), b.op("autograd::engine::evaluate_function: MulBackward0"):
        pass
    with b.backward(), b.op("aten::add"):
        total = b.alloc(8)
    assert label_in(b, total) is Category.AUTOGRAD_DETAIL


def test_a_sum_between_two_nodes_within_a_third_one_is_autograd_detail():
    b = TraceBuilder()
    engine = "autograd::engine::evaluate_function: AddmmBackward0"
    with b.backward(), b.node("CheckpointFunctionBackward"):
        with b.op(engine, is_operator=False):
            with b.op("AddmmBackward0", scope=Scope.BACKWARD_FUNCTION, is_operator=False):
                b.read()
            with b.op("aten::sum"):
                handed_on = b.alloc(8)
            with b.op("aten::sum"):
                scratch = b.alloc(16)
            b.free(scratch)
        b.read()
        b.free(handed_on)
    profile = analyze_trace(b.build())
    assert label_of(profile, handed_on) is Category.AUTOGRAD_DETAIL
    assert label_of(profile, scratch) is Category.TEMPORARY


def test_a_gradient_that_a_hook_used_up_is_known_from_its_accumulation():
    b = TraceBuilder()
    with b.backward(), b.node("torch::autograd::AccumulateGrad"):
        with b.op("aten::clone"):
            gradient = b.alloc(8)
        b.read()
    b.free(gradient)
    told = explained(analyze_trace(b.build()), gradient)
    assert told.storage.category is Category.GRADIENT
    assert told.reason == "the node that accumulates into a leaf keeps it or adds to it"


def test_the_gradient_of_a_checkpoints_input_is_on_its_way():
    b = TraceBuilder()
    with b.backward(), b.node("CheckpointBackward"):
        with b.backward(), b.node("torch::autograd::AccumulateGrad"), b.op("aten::detach"):
            gradient = b.alloc(8)
        b.owner(gradient, Ownership.GRADIENT_ROOT)
    assert label_in(b, gradient) is Category.AUTOGRAD_DETAIL


def gradient_returned(inside_operator: bool, kept: bool) -> Category:
    b = TraceBuilder()
    with b.op("MyFunction", sequence=4 if inside_operator else -1, is_operator=False):
        with b.backward(), b.node("MulBackward0"), b.op("aten::mul"):
            gradient = b.alloc(8)
        b.owner(gradient, Ownership.RETURNED)
    if kept:
        with b.backward():
            b.owner(gradient, Ownership.SAVED)
    return label_in(b, gradient)


def test_what_autograd_grad_returned_to_the_body_is_gradient():
    assert gradient_returned(inside_operator=False, kept=False) is Category.GRADIENT


def test_what_autograd_grad_returned_and_the_next_graph_keeps_is_activation():
    assert gradient_returned(inside_operator=False, kept=True) is Category.ACTIVATION


def test_what_autograd_grad_returned_within_a_custom_function_is_that_functions_business():
    assert gradient_returned(inside_operator=True, kept=True) is Category.ACTIVATION
    assert gradient_returned(inside_operator=True, kept=False) is not Category.GRADIENT


def test_calling_a_module_touches_all_that_its_parts_hold():
    b = TraceBuilder()
    weight = b.existing(8)
    b.owner(weight, Ownership.PARAMETER, module=2, name="weight", mark=0)
    b.part_of(child=2, parent=1, name="inner")
    with b.module(1):
        b.alloc(4)
    assert analyze_trace(b.build()).peak.parameter == 8


def test_a_module_that_is_not_called_is_not_in_the_footprint():
    b = TraceBuilder()
    weight = b.existing(8)
    b.owner(weight, Ownership.PARAMETER, module=2, name="weight", mark=0)
    with b.module(1):
        b.alloc(4)
    assert analyze_trace(b.build()).peak.total == 4


def test_a_graph_that_an_earlier_test_left_behind_is_not_in_the_footprint():
    b = TraceBuilder()
    old = b.existing(1000, Ownership.SAVED)
    b.alloc(4)
    stop = b.mark(MarkKind.STOP)
    b.owner(old, Ownership.SAVED, mark=stop)
    profile = analyze_trace(b.build())
    assert profile.peak.total == 4
    assert not profile.recording.has_backward


def workspace_trace(b: TraceBuilder, size_bytes: int = 4096) -> Trace:
    """What was built, on a device whose workspaces have this size and where no tensor is known."""
    trace = b.build()
    trace.allocations["keyed"] = False
    trace.meta["workspace_bytes"] = [size_bytes]
    return trace


def test_a_workspace_is_scratch_of_a_known_size_that_no_tensor_has():
    b = TraceBuilder()
    with b.op("aten::mm"):
        result, workspace = b.alloc(64), b.alloc(4096)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, result) is Category.TEMPORARY


def test_scratch_that_a_library_plans_is_a_workspace_of_any_size():
    b = TraceBuilder()
    with b.op("aten::convolution_backward"):
        planned, gradient = b.alloc(100), b.alloc(64)
        b.free(planned)
    with b.op("aten::add"):
        result, other = b.alloc(64), b.alloc(100)
        b.free(other)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, planned) is Category.WORKSPACE
    assert label_of(profile, other) is Category.TEMPORARY
    assert {label_of(profile, one) for one in (gradient, result)} == {Category.TEMPORARY}


def test_a_workspace_may_be_freed_with_its_product_or_stay():
    b = TraceBuilder()
    with b.op("aten::addmm"):
        _, workspace = b.alloc(64), b.alloc(4096)
        b.free(workspace)
    with b.op("aten::cudnn_convolution"):
        _, freed = b.alloc(64), b.alloc(4096)
        b.free(freed)
    with b.op("aten::cudnn_convolution"):
        _, kept = b.alloc(64), b.alloc(4096)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, freed) is Category.WORKSPACE
    assert label_of(profile, kept) is Category.WORKSPACE


def test_a_workspace_is_known_within_a_range_that_its_operator_opens():
    b = TraceBuilder()
    with b.op("aten::bmm"):
        result = b.alloc(4096)
        with b.op("eager_router", is_operator=False):
            workspace = b.alloc(4096)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, result) is Category.TEMPORARY


def test_a_workspace_of_an_operator_that_was_not_observed_is_what_no_tensor_has_and_stays():
    b = TraceBuilder()
    workspace, freed, held = b.alloc(4096), b.alloc(4096), b.alloc(4096)
    b.free(freed)
    b.owner(held, Ownership.SURVIVOR, mark=b.mark(MarkKind.STOP))
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, freed) is Category.TEMPORARY
    assert label_of(profile, held) is not Category.WORKSPACE


def test_a_product_of_a_workspaces_size_is_none():
    b = TraceBuilder()
    with b.op("aten::mm"):
        result, workspace = b.alloc(4096), b.alloc(4096)
    with b.op("aten::mm"):
        again = b.alloc(4096)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, result) is Category.TEMPORARY
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, again) is Category.TEMPORARY


def test_a_product_into_a_given_tensor_has_no_output_but_a_workspace():
    b = TraceBuilder()
    out = b.existing(64, Ownership.LIVE)
    with b.op("aten::mm", writes=[out]):
        workspace = b.alloc(4096)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE


def test_a_product_that_is_one_number_takes_its_workspace_first():
    b = TraceBuilder()
    with b.op("aten::dot"):
        workspace, result = b.alloc(4096), b.alloc(4)
    profile = analyze_trace(workspace_trace(b))
    assert label_of(profile, workspace) is Category.WORKSPACE
    assert label_of(profile, result) is Category.TEMPORARY


@pytest.mark.parametrize(
    "name", ["aten::linalg_solve_triangular", "aten::linalg_inv_ex", "aten::cholesky_solve"]
)
def test_linear_algebra_has_workspaces(name):
    b = TraceBuilder()
    with b.op(name):
        _, workspace = b.alloc(64), b.alloc(4096)
    assert label_of(analyze_trace(workspace_trace(b)), workspace) is Category.WORKSPACE


def test_a_pass_never_edits_its_input_and_the_first_claim_counts():
    b = TraceBuilder()
    held = b.existing(8, Ownership.PARAMETER, Ownership.BUFFER, Ownership.GRADIENT)
    b.read(held)
    with b.op("aten::mm", reads=[held]):
        b.alloc(4)
    profile = analyze_trace(b.build())
    facts, labels = profile.recording, profile.labels
    for category_pass in CATEGORY_PASSES:
        before = labels.copy()
        for claim in category_pass(facts, labels):
            assert labels.tolist() == before.tolist()
            assert claim.reason
    assert decide(facts, len(labels)).labels.tolist() == labels.tolist()
    assert label_of(profile, held) is Category.PARAMETER


def evidence_until(b: TraceBuilder, last: int) -> Evidence:
    """The evidence of a window that ends with the event of row ``last``."""
    whole = analyze_trace(b.build())
    tree, storages = whole.tree, whole.storages
    return Evidence(tree, storages, RankWindow(-0.5, float(tree.rank[last])), device=0)


def test_what_the_last_event_of_a_window_names_was_touched_in_it():
    b = TraceBuilder()
    b.existing(8)
    with b.op("aten::view", reads=[block := b.existing(4)]) as last:
        pass
    b.read(b.existing(16))
    evidence = evidence_until(b, last)
    assert evidence.storages.size_bytes[evidence.touched].tolist() == [block.size_bytes]


def test_a_backward_pass_that_is_the_last_event_of_a_window_is_in_it():
    b = TraceBuilder()
    b.read()
    with b.op("MulBackward0", scope=Scope.BACKWARD_FUNCTION, is_operator=False) as last:
        pass
    assert evidence_until(b, last).has_backward
    assert not evidence_until(b, last - 1).has_backward


def test_a_backward_pass_that_begins_with_the_last_event_of_a_window_is_in_it():
    b = TraceBuilder()
    b.read()
    with b.backward():
        last = b._rows["marks"][-1]["event"]
    assert evidence_until(b, last).has_backward
    assert not evidence_until(b, last - 1).has_backward


def test_a_module_that_is_called_at_the_end_of_a_window_is_touched_in_it():
    b = TraceBuilder()
    weight = b.existing(8)
    b.owner(weight, Ownership.PARAMETER, module=1, name="weight", mark=0)
    b.read()
    with b.module(1) as last:
        pass
    assert evidence_until(b, last).touched.any()
    assert not evidence_until(b, last - 1).touched.any()


def test_what_a_backward_pass_reads_with_the_last_event_of_a_window_is_read_in_it():
    b = TraceBuilder()
    block = b.existing(4)
    with b.backward(), b.node("MulBackward0"), b.op("aten::mul", reads=[block]) as last:
        pass
    assert evidence_until(b, last).read_by_backward.any()
    assert not evidence_until(b, last - 1).read_by_backward.any()


def test_what_grew_beside_a_large_workspace_is_named():
    def result(*sizes: int) -> Result:
        b = TraceBuilder()
        with b.op("aten::mm"):
            b.alloc(16), b.alloc(32 * MiB)
        made = []
        for size in sizes:
            with b.op(f"aten::op{size}"):
                made.append(b.alloc(size))
        for block in made:
            b.free(block)
        return analyze_trace(workspace_trace(b, 32 * MiB)).result()

    before, after = result(384, 96), result(384, 96, 192)
    reference = Reference.of(BaselineEntry.of(before))
    verdict = judge_baseline(after, reference, Allowance(tolerance=0.02, floor_bytes=1))
    assert [f.key for f in verdict.findings] == ["total", "temporary"]
    assert verdict.sentence.endswith(": +192 B of temporary from aten::op192")
