"""Labels of real programs against a truth that the engine has no part in.

Small programs have their sizes worked out by hand. The shared workloads are graded allocation by
allocation against `benchmarks.label_truth`, which asks modules, optimizers, hooks and autograd's
nodes in a run of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import workloads, workloads_autograd
from benchmarks.label_accuracy import Row, measure
from benchmarks.label_truth import allocation_log
from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.values.contributors import Category, Phase
from tests.measured import profile_of

pytestmark = [pytest.mark.slow, pytest.mark.compiles]

FLOAT = 4
# A float of 64 x 64: what the programs below are made of.
SQUARE = 64 * 64 * FLOAT


def linear(width: int = 64) -> nn.Linear:
    return nn.Linear(width, width, bias=False)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(64, 64)


# --- by hand ----------------------------------------------------------------------------------


def test_a_product_keeps_its_input_and_a_relu_its_result(x):
    first, second = linear(), linear()

    def body():
        second(torch.relu(first(x))).sum().backward()

    peak = profile_of(body).peak
    assert peak.parameter == 2 * SQUARE
    assert peak.gradient == 2 * SQUARE
    assert peak.input == SQUARE
    # relu's result is second's input; first's own result is gone by then.
    assert peak.activation == SQUARE
    assert peak.unknown == 0


def test_a_forward_pass_alone_keeps_nothing_for_backward(x):
    layer = linear()

    def body():
        torch.relu(layer(x)).sum().item()

    profile = profile_of(body)
    assert not profile.recording.has_backward
    assert profile.peak.activation == 0
    assert profile.peak.temporary == 2 * SQUARE


def test_adam_keeps_two_states_for_each_parameter(x):
    layer = linear()
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)

    def body():
        layer(x).sum().backward()
        optimizer.step()

    body()
    steady = profile_of(body)
    # Two moments, and a step count of one float.
    assert steady.peak.optimizer_state == 2 * SQUARE + FLOAT
    assert steady.retained.optimizer_state == 0


def test_a_buffer_is_not_data(x):
    norm = nn.BatchNorm1d(64, affine=False)

    def body():
        norm(x).sum().item()

    peak = profile_of(body).peak
    assert peak.buffer == 2 * 64 * FLOAT + 8
    assert peak.input == SQUARE


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_moves_activations_into_the_backward_pass(x, use_reentrant):
    layers = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU())
    x.requires_grad_(use_reentrant)

    def body():
        out = checkpoint(layers, x, use_reentrant=use_reentrant)
        out.sum().backward()

    profile = profile_of(body)
    assert profile.peak.unknown == 0
    # Both relus run again. The reentrant kind keeps the random state on its context.
    state = torch.get_rng_state().nbytes if use_reentrant else 0
    assert profile.peak.activation == 2 * SQUARE + state


def test_a_sum_between_two_nodes_of_a_checkpoints_own_pass_is_handed_on(x):
    layer = nn.Linear(64, 64)
    x.requires_grad_()

    def body():
        checkpoint(layer, x, use_reentrant=True).sum().backward()

    body()
    # The bias is broadcast, so its gradient is summed up before it is added to the .grad.
    sums = [e for e in profile_of(body).explain() if e.storage.operator == "aten::sum"]
    assert {e.storage.category for e in sums if e.storage.phase is Phase.BACKWARD} == {
        Category.AUTOGRAD_DETAIL
    }


def test_gradients_that_accumulate_stay_one_buffer(x):
    layer = linear()

    def body():
        for _ in range(3):
            layer(x).sum().backward()

    profile = profile_of(body)
    assert profile.peak.gradient == profile.retained.gradient == SQUARE


def test_noise_that_is_added_to_a_gradient_is_no_input():
    layer = linear()

    def body():
        layer(torch.ones(64, 64)).sum().backward()
        assert layer.weight.grad is not None
        layer.weight.grad += torch.randn(64, 64)

    profile = profile_of(body)
    categories = {e.storage.operator: e.storage.category for e in profile.explain()}
    assert categories["aten::randn"] is Category.TEMPORARY
    assert categories["aten::ones"] is Category.INPUT


def test_an_empty_result_is_not_the_parameter_of_a_module_that_is_called_again(x):
    """torch gives a module's parameters an identity in its first call of a recording only."""
    layer = linear()

    def body():
        layer(layer(x)).detach()
        # It is given an empty result, and makes that larger.
        places = torch.arange(64 * 64.0)
        layer(places.view(64, 64)).sum().backward()

    profile = profile_of(body)
    categories = {e.storage.operator: e.storage.category for e in profile.explain()}
    assert categories["aten::arange"] is Category.INPUT
    assert all(e.storage.size_bytes for e in profile.explain())


def test_modules_that_are_converted_hold_parameters_where_others_have_died(x):
    """The profiler takes a module that is made where another has died for that one."""
    x = x.double()

    def body():
        for _ in range(20):
            blocks = nn.Sequential(*(nn.Sequential(linear(), nn.Identity()) for _ in range(3)))
            blocks.to(torch.float64)(x)

    made = [e.storage for e in profile_of(body).explain() if e.born_ns is not None]
    converted = [storage for storage in made if storage.operator == "aten::to"]
    assert len(converted) == 60
    assert {storage.category for storage in converted} == {Category.PARAMETER}


def test_the_results_of_autograd_grad_are_gradients(x):
    layer = linear()
    held = []

    def body():
        held.extend(torch.autograd.grad(layer(x).sum(), list(layer.parameters())))

    assert profile_of(body).retained.gradient == SQUARE


def test_a_gradient_that_the_next_graph_keeps_is_an_activation(x):
    w = torch.ones(64, 64, requires_grad=True)

    def body():
        (g,) = torch.autograd.grad(torch.tanh(x @ w).sum(), w, create_graph=True)
        g.pow(2).sum().backward()

    body()
    profile = profile_of(body)
    # tanh's result, the gradient, and the exponent, a number that became a tensor.
    assert profile.peak.activation == 2 * SQUARE + FLOAT
    made = {e.storage.operator for e in profile.explain("activation") if e.born_ns is not None}
    assert {"aten::tanh", "aten::mm"} <= made
    assert [e.born_ns for e in profile.explain("gradient")] == [None]


def test_a_gradient_that_no_graph_keeps_stays_one_though_it_has_a_graph(x):
    w = torch.ones(64, 64, requires_grad=True)
    held = []

    def body():
        held.extend(torch.autograd.grad(torch.tanh(x @ w).sum(), w, create_graph=True))

    assert profile_of(body).retained.gradient == SQUARE


def test_a_grad_of_a_module_stays_a_gradient_where_a_graph_keeps_it_too(x):
    layer = linear()

    def body():
        torch.tanh(layer(x)).sum().backward(create_graph=True)
        layer.weight.grad.pow(2).sum().backward()

    # Both passes add up in new memory, because the first result has a graph.
    explained = profile_of(body).explain("gradient", at="peak")
    assert SQUARE in {e.storage.size_bytes for e in explained}
    assert {e.reason for e in explained} == {"it was found in a .grad"}


def penalized(fake_of) -> MemoryProfile:
    """A gradient penalty as in WGAN-GP, with the norm of the gradient of a mixture in the loss."""
    critic, real = linear(), torch.ones(64, 64)

    def body():
        mixed = (0.3 * real + 0.7 * fake_of()).requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(critic(mixed)).sum(), mixed, create_graph=True)
        (g.norm(2, dim=1) - 1).square().mean().backward()

    body()
    return profile_of(body)


def bytes_in(profile: MemoryProfile, category: str, line_of: str) -> int:
    return sum(
        e.storage.size_bytes
        for e in profile.explain(category)
        if e.storage.source and e.storage.operator == line_of and e.storage.size_bytes == SQUARE
    )


def test_the_gradient_in_a_penalty_is_an_activation_and_so_is_a_mixture_of_computed_data():
    generator = linear()
    profile = penalized(lambda: generator(torch.ones(64, 64)).detach())
    assert bytes_in(profile, "activation", "aten::add") == SQUARE
    # The gradient of tanh's input, which its weight's gradient needs, and the mixture's.
    assert bytes_in(profile, "activation", "aten::mm") == SQUARE
    assert bytes_in(profile, "gradient", "aten::mm") == SQUARE


def test_a_mixture_of_nothing_but_data_stays_data_though_autograd_keeps_it():
    profile = penalized(lambda: torch.ones(64, 64))
    assert bytes_in(profile, "input", "aten::add") == SQUARE
    assert bytes_in(profile, "activation", "aten::mm") == SQUARE


def test_the_packed_data_of_a_recurrent_layer_stays_data_though_autograd_keeps_it():
    lstm, sequences = nn.LSTM(16, 32, batch_first=True), torch.ones(4, 10, 16)
    pack = nn.utils.rnn.pack_padded_sequence

    def body():
        packed = pack(sequences, torch.tensor([10, 8, 6, 4]), batch_first=True)
        lstm(packed)[0].data.sum().backward()

    (data,) = [e for e in profile_of(body).explain("input") if e.storage.size_bytes == 28 * 16 * 4]
    assert data.reason == "it was made from data alone, before the model reads it"


def test_leaves_without_a_module_are_the_parameters(x):
    w = torch.ones(64, 64, requires_grad=True)

    def body():
        (x @ w).sum().backward()

    peak = profile_of(body).peak
    assert (peak.parameter, peak.gradient, peak.input) == (SQUARE, SQUARE, SQUARE)


def test_func_grad_gives_gradients_of_parameters(x):
    w = torch.ones(64, 64)
    held = []

    def body():
        held.append(torch.func.grad(lambda w: torch.tanh(x @ w).sum())(w))

    profile = profile_of(body)
    assert profile.peak.parameter == SQUARE
    assert profile.retained.gradient == SQUARE
    assert profile.peak.activation == SQUARE


def test_a_sparse_gradient_is_its_values_and_indices_not_the_whole_table():
    embedding = nn.Embedding(1000, 16, sparse=True)
    tokens = torch.arange(32)

    def body():
        embedding(tokens).sum().backward()

    profile = profile_of(body)
    assert profile.retained.gradient == 32 * (16 * FLOAT + 8)
    assert profile.peak.input == 32 * 8


def test_old_gradients_are_gradients_from_the_beginning(x):
    layer = linear()
    layer(x).sum().backward()

    def body():
        layer.zero_grad(set_to_none=True)
        layer(x).sum().backward()

    peak = profile_of(body).peak
    assert peak.gradient == SQUARE
    assert peak.unknown == 0


def test_a_graph_that_another_test_left_behind_changes_nothing(x):
    layer = linear()

    def body():
        torch.relu(layer(x)).sum().item()

    alone = profile_of(body).result().to_json()
    left_behind = torch.relu(linear(256)(torch.ones(256, 256)))
    after = profile_of(body).result().to_json()
    assert left_behind.grad_fn is not None
    for result in (alone, after):
        result["peak"].pop("time_ns")
    assert after == alone


@pytest.mark.parametrize(
    "workload",
    [
        workloads.gradient_accumulation,
        workloads_autograd.checkpoint_reentrant,
        workloads_autograd.checkpoint_non_reentrant,
        workloads_autograd.lora,
        workloads.transformer,
        workloads_autograd.gradient_penalty,
    ],
)
def test_the_recorder_changes_no_allocation(workload):
    # It could: autograd adds gradients up in place only where nobody else owns them, and whoever
    # has looked at a storage from Python owns it too.
    workload(workloads.Declarations())()
    body = workload(workloads.Declarations())
    with torch.profiler.profile(profile_memory=True) as bare:
        body()
    log = allocation_log(bare.profiler.kineto_results.experimental_event_tree())
    alone = [event.typed[1].alloc_size for event in log if event.typed[1].alloc_size > 0]
    storages = profile_of(workload(workloads.Declarations())).storages
    made = np.flatnonzero(storages.event >= 0)
    watched = storages.size_bytes[made[np.argsort(storages.born[made])]]
    assert watched.tolist() == alone


# --- workloads --------------------------------------------------------------------------------


def graded(workload) -> Row:
    return measure(workload, with_torch=False)


CLAIMS = {
    "adamw_in_its_first_step": workloads.mlp_adamw_first_step,
    "adamw_in_a_steady_step": workloads.mlp_adamw_steady,
    "scratch_of_a_foreach_optimizer": workloads.mlp_adamw_foreach,
    "fused_adamw": workloads.mlp_adamw_fused,
    "sgd_with_momentum": workloads.mlp_sgd_momentum,
    "gradients_zeroed_in_place": workloads.mlp_zero_in_place,
    "gradients_set_to_none": workloads.mlp_zero_to_none,
    "scratch_of_an_optimizer": workloads.optimizer_scratch,
    "a_closure_that_the_optimizer_calls": workloads.lbfgs,
    "inputs_computed_from_data": workloads.preprocessing,
    "a_model_made_in_the_body": workloads.made_in_body,
    "gradient_accumulation": workloads.gradient_accumulation,
    "a_cnn_with_batch_norm": workloads.cnn_batch_norm,
    "an_lstm": workloads.lstm,
    "a_transformer": workloads.transformer,
    "a_forward_pass_without_gradients": workloads.forward_no_grad,
    "a_forward_pass_that_builds_a_graph": workloads.forward_with_grad,
    "plain_tensors_forward": workloads.plain_forward,
    "plain_tensors_trained": workloads.plain_backward,
    "a_backward_pass_without_optimizer": workloads.backward_without_optimizer,
    "autograd_grad": workloads.autograd_grad,
    "an_in_place_chain": workloads.in_place_chain,
    "a_reentrant_checkpoint": workloads_autograd.checkpoint_reentrant,
    "a_non_reentrant_checkpoint": workloads_autograd.checkpoint_non_reentrant,
    "a_checkpoint_within_a_checkpoint": workloads_autograd.nested_checkpoint,
    "results_written_into_slices": workloads_autograd.written_slices,
    "autocast_with_its_peak_in_backward": workloads_autograd.autocast_backward,
    "autocast_weight_copies": workloads_autograd.autocast_bf16,
    "a_custom_function_with_nested_autograd": workloads_autograd.nested_autograd,
    "tensors_kept_on_a_context": workloads_autograd.context_attribute,
    "a_model_copied_in_the_window": workloads_autograd.deep_copy,
    "tied_weights": workloads_autograd.tied_weights,
    "frozen_parameters": workloads_autograd.lora,
    "sparse_gradients": workloads_autograd.sparse_embedding,
    "a_gradient_penalty": workloads_autograd.gradient_penalty,
    "an_optimizer_fused_into_backward": workloads_autograd.fused_backward_optimizer,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_labels_are_right_for(claim):
    if claim == "scratch_of_an_optimizer" and not hasattr(torch.optim, "Muon"):
        pytest.skip("Muon came with torch 2.9")
    row = graded(CLAIMS[claim])
    assert row.same_allocations
    assert row.ours.peak_bytes == row.ours.true_peak_bytes
    assert row.ours.right_share >= 0.999
    assert row.ours.right_ever >= 0.999
    assert row.ours.unknown_share <= 0.001
    error, category = row.own_peak_error
    assert error <= 0.001 * row.ours.true_peak_bytes, category


def test_every_basic_workload_has_its_claim():
    assert set(CLAIMS.values()) == {*workloads.BASIC, *workloads_autograd.AUTOGRAD}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_labels_are_right_for_transformers(name):
    pytest.importorskip("transformers")
    from benchmarks import workloads_models

    row = graded(getattr(workloads_models, name))
    assert row.same_allocations
    assert row.ours.peak_bytes == row.ours.true_peak_bytes
    assert min(row.ours.right_share, row.ours.right_ever) >= 0.999
    assert row.ours.unknown_share <= 0.001


@pytest.mark.nightly("inductor_mlp", "inductor_transformer", "inductor_checkpoint")
@pytest.mark.parametrize(
    "name",
    [
        "inductor_mlp",
        "inductor_transformer",
        "inductor_checkpoint",
        "inductor_forward",
        "aot_eager_transformer",
    ],
)
def test_labels_are_right_for_compiled_code(name):
    from benchmarks import workloads_models

    row = graded(getattr(workloads_models, name))
    assert row.same_allocations
    assert row.ours.peak_bytes == row.ours.true_peak_bytes
    assert min(row.ours.right_share, row.ours.right_ever) >= 0.999
    assert row.ours.unknown_share <= 0.001


@pytest.mark.parametrize("name", ["func_grad", "per_sample_gradients"])
def test_labels_and_peak_are_right_under_function_transforms(name):
    from benchmarks import workloads_models

    row = graded(getattr(workloads_models, name))
    assert row.same_allocations
    assert row.ours.right_share >= 0.999
    assert row.ours.unknown_share == 0
    assert row.ours.peak_bytes == row.ours.true_peak_bytes


def test_a_wrong_label_would_be_seen(monkeypatch):
    from pytest_torchmem.analysis.storages import categories

    without = tuple(p for p in categories.CATEGORY_PASSES if p is not categories.find_activations)
    monkeypatch.setattr(categories, "CATEGORY_PASSES", without)
    row = graded(workloads.in_place_chain)
    assert row.ours.right_share < 0.999
    assert row.ours.wrong[Category.TEMPORARY.value, Category.ACTIVATION.value] > 0


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Squared(torch.nn.Module):
    """Keeps 4 MiB for its own square and 4 MiB for the layer after it; has 16 MiB of scratch."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        mask = torch.ones(4096, 4096, dtype=torch.bool)
        return self.down(Square.apply(self.up(x))) if mask.any() else x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_without_a_gradient_is_told_as_in_forward(use_reentrant):
    model, x = Squared(), torch.ones(1024, 256, requires_grad=use_reentrant)
    peak = (
        profile_of(lambda: checkpoint(model, x, use_reentrant=use_reentrant).sum().backward())
        .result()
        .peak
    )
    assert peak.activation >= 8 << 20
    masks = [c for c in peak.live_by_category if c.operator == "aten::ones"]
    assert {(c.category.value, c.source.line, c.module) for c in masks} == {
        ("temporary", Squared.forward.__code__.co_firstlineno + 1, "Squared")
    }
