"""Programs whose estimate is what a measurement of the same step shows."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from pytest_torchmem import estimate, measure
from pytest_torchmem.analysis.estimated.static import largest_possible
from pytest_torchmem.values.errors import EstimateError

# What C++ wraps Python numbers in.
SCALARS = 512

Step = Callable[[], Any]


def difference(step: Step) -> int:
    """By how many bytes the estimate of a warm step differs from its measured peak."""
    step()
    estimated = estimate(step, backward=False).peak.total
    with measure() as window:
        held = step()
    del held
    return estimated - window.result.peak.total


def training(parameters: Any, loss_of: Step) -> Step:
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def test_gradients_of_a_layer_that_is_used_three_times_are_added_up_as_autograd_does():
    layer, x = nn.Linear(64, 512), torch.randn(8, 64)
    step = training(layer.parameters(), lambda: sum(layer(x).square().mean() for _ in range(3)))
    assert abs(difference(step)) <= SCALARS


class Counting(torch.optim.SGD):
    """Keeps a count under a name, beside what it keeps for each parameter."""

    def step(self, closure: Any = None) -> None:
        state: dict[Any, Any] = self.state
        state["count"] = state.get("count", torch.zeros(256)) + 1
        super().step(closure)


def test_an_optimizer_may_keep_state_by_a_name():
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = Counting(layer.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    assert abs(difference(step)) <= SCALARS
    assert "count" in optimizer.state


def test_a_gradient_that_is_added_up_in_place_is_a_gradient_from_its_first_sum_on():
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)

    def step() -> None:
        layer.zero_grad()
        sum(layer(x).square().mean() for _ in range(4)).backward()

    step()
    with measure() as window:
        step()
    peak, measured = estimate(step, backward=False).peak, window.result.peak
    assert (peak.gradient, peak.autograd_detail) == (measured.gradient, measured.autograd_detail)


def test_gradients_that_only_die_in_the_step_are_there_until_then():
    maker, judge, x = nn.Linear(64, 512), nn.Linear(512, 64), torch.randn(8, 64)
    of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in (maker, judge))

    def step() -> None:
        made = maker(x)
        of_judge.zero_grad()
        judge(made.detach()).mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()

    assert abs(difference(step)) <= SCALARS


class Holder:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def loss_over(x: torch.Tensor, weight_of: Callable[[], torch.Tensor]) -> Step:
    return lambda: (x @ weight_of()).square().mean()


def in_closure(weight: torch.Tensor) -> Step:
    return lambda: weight


def in_default(weight: torch.Tensor) -> Step:
    def weight_of(own: torch.Tensor = weight) -> torch.Tensor:
        return own

    return weight_of


def in_list(weight: torch.Tensor) -> Step:
    held = [weight]
    return lambda: held[0]


def in_tuple(weight: torch.Tensor) -> Step:
    held = (weight,)
    return lambda: held[0]


def in_object(weight: torch.Tensor) -> Step:
    held = Holder(weight)
    return lambda: held.weight


def in_slots(weight: torch.Tensor) -> Step:
    held = Slotted(weight)
    return lambda: held.weight


def in_partial(weight: torch.Tensor) -> Step:
    return functools.partial(torch.Tensor.view_as, weight, weight)


@pytest.mark.parametrize("held", [in_closure, in_default, in_list, in_tuple, in_object])
def test_the_optimizer_sees_the_gradient_of_a_leaf_wherever_the_program_holds_it(held):
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(64, 256)
    step = training([weight], loss_over(x, held(weight)))
    assert abs(difference(step)) <= SCALARS
    assert type(weight.grad) is torch.Tensor


@pytest.mark.parametrize("held", [in_slots, in_partial])
def test_a_leaf_that_nobody_can_replace_is_refused_in_words(held):
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(64, 256)
    step = training([weight], loss_over(x, held(weight)))
    step()
    with pytest.raises(EstimateError, match="holds where nobody can replace it"):
        estimate(step, backward=False)
    step()
    assert type(weight.grad) is torch.Tensor


def known_by_tensor(weight: torch.Tensor) -> object:
    return weight


@pytest.mark.parametrize("key", [known_by_tensor, id])
def test_an_optimizer_by_hand_knows_its_state_by_tensors_or_their_ids(key):
    model, x = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)), torch.randn(64, 128)
    momenta = {key(p): torch.zeros_like(p) for p in model.parameters()}
    decayed = {key(p) for p in model.parameters() if p.dim() > 1}

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for weight in model.parameters():
                if key(weight) in decayed:
                    weight.sub_(weight.matmul(weight.t()).matmul(weight))
                # What this replaces is gone.
                assert weight.grad is not None
                momenta[key(weight)] = 0.9 * momenta[key(weight)] + weight.grad
                weight.sub_(momenta[key(weight)])

    before = [*momenta], {*decayed}
    assert abs(difference(step)) <= SCALARS
    assert [*map(id, momenta)] == [*map(id, before[0])]
    assert {*map(id, decayed)} == {*map(id, before[1])}


def test_what_is_known_of_a_tensor_where_nobody_can_replace_it_is_refused_in_words():
    model = nn.Linear(8, 8)
    scales = types.MappingProxyType(dict.fromkeys(model.parameters(), 2.0))
    with pytest.raises(EstimateError, match=r"looks up at test_\w+\.py:\d+ what it knows"):
        estimate(lambda: [p * scales[p] for p in model.parameters()], backward=False)
    with pytest.raises(KeyError, match="nobody's"):
        estimate(lambda: scales["nobody's"], backward=False)


class Averages:
    def __init__(self, weight: torch.Tensor) -> None:
        self.first, self.others = weight, [weight.clone(), weight.clone()]


def test_what_a_program_replaces_is_gone_wherever_it_held_it():
    x, held = torch.randn(256, 256), Averages(torch.zeros(256, 256))
    pair = {"both": (torch.zeros(256, 256), torch.zeros(256, 256))}
    last = torch.zeros(256, 256)

    def step() -> None:
        nonlocal last
        held.first = held.first * 0.9 + x
        held.others[1] = held.others[1] * 0.9 + x
        first, second = pair["both"]
        pair["both"] = first * 0.9 + x, second * 0.9 + x
        last = last * 0.9 + x

    assert abs(difference(step)) <= SCALARS
    assert {type(t) for t in (held.first, *held.others, *pair["both"], last)} == {torch.Tensor}


# For CUDA, the numbers of a simulated H100 without cuBLAS's workspaces.


def attends(mask: torch.Tensor | None, dropout: float) -> Step:
    project = nn.Linear(64, 3 * 64)
    x = torch.randn(4, 32, 64)

    def loss_of() -> torch.Tensor:
        parts = project(x).view(4, 32, 3, 4, 16).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        out = nn.functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return out.square().mean()

    return training(project.parameters(), loss_of)


def unrolled(cell: nn.Module) -> Step:
    x = torch.randn(6, 8, 32)

    def loss_of() -> torch.Tensor:
        state = None
        for row in x:
            state = cell(row, state)
        return (state[0] if isinstance(state, tuple) else state).square().mean()

    return training(cell.parameters(), loss_of)


def test_zeros_that_forward_mode_thinks_of_take_no_memory():
    layers: Any = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(32, 64)
    step = partial(torch.func.jvp, layers, (x,), (torch.ones_like(x),))
    assert abs(difference(lambda: step()[1])) <= SCALARS


def recurrent(kind: Callable[..., nn.Module], **how: Any) -> Step:
    layers = kind(32, 64, 2, **how)
    x = torch.randn(8, 24, 32)
    return training(layers.parameters(), lambda: layers(x)[0].square().mean())


def long_sequence() -> Step:
    """The peak is in the backward pass of the layers."""
    layers, x = nn.GRU(32, 64, 2, batch_first=True), torch.randn(8, 512, 32)

    def step() -> None:
        layers.zero_grad()
        layers(x)[0].sum().backward()

    return step


def dropped() -> Step:
    layer, x = nn.Linear(64, 64), torch.randn(32, 64)
    return training(layer.parameters(), lambda: nn.functional.dropout(layer(x), 0.1).mean())


def in_groups() -> Step:
    layers: Any = nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16), nn.SiLU())
    layers.to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    return training(layers.parameters(), lambda: layers(x).square().mean())


ON_AN_H100: dict[str, tuple[Callable[[], Step], int]] = {
    "attention": (lambda: attends(None, 0.0), 743944),
    "attention, masked": (lambda: attends(torch.ones(32, 32, dtype=torch.bool), 0.0), 749064),
    "attention, dropout": (lambda: attends(None, 0.1), 743944),
    "LSTMCell": (lambda: unrolled(nn.LSTMCell(32, 64)), 665608),
    "GRUCell": (lambda: unrolled(nn.GRUCell(32, 64)), 512008),
    "RNN": (lambda: recurrent(nn.RNN), 457736),
    "GRU, both ways": (lambda: recurrent(nn.GRU, batch_first=True, bidirectional=True), 2267136),
    "GRU without biases": (lambda: recurrent(nn.GRU, bias=False), 1050632),
    "LSTM, projected": (lambda: recurrent(nn.LSTM, batch_first=True, proj_size=16), 495616),
    "GRU, long": (long_sequence, 3857416),
    "dropout": (dropped, 91392),
    "GroupNorm, channels last": (in_groups, 41864),
}


@pytest.mark.parametrize("name", ON_AN_H100)
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has CUDA's own operators")
def test_training_for_cuda_has_the_operators_of_cuda(name):
    made, needed = ON_AN_H100[name]
    step = made()
    step()
    peak = estimate(step, backward=False, device="cuda").peak
    assert abs(peak.total - needed) <= SCALARS


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has CUDA's own operators")
def test_attention_for_cuda_reads_grouped_heads_as_they_are():
    wide, narrow = (2, 4, 512, 64), (2, 2, 512, 64)
    query, key, value = (
        torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in (wide, narrow, narrow)
    )

    def step() -> None:
        nn.functional.scaled_dot_product_attention(
            query, key, value, enable_gqa=True
        ).sum().backward()

    run = estimate(step, backward=False, device="cuda").run
    # A simulated A100 attends by flash attention, an H100 by cuDNN, in 4,227,092 bytes.
    assert largest_possible(run) == 5799964


def within(transform: Callable[..., Any], layer: Callable[[torch.Tensor], torch.Tensor]) -> Step:
    x = torch.randn(64, 256)
    return lambda: transform(lambda row: layer(row).square().sum())(x)


def of_each_row(loss_of: Callable[..., Any]) -> Callable[..., Any]:
    return vmap(grad(loss_of), randomness="different")


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has CUDA's own operators")
@pytest.mark.parametrize(
    ("transform", "needed"), [(of_each_row, 410_112), (grad, 409_608)], ids=["vmap", "grad"]
)
def test_dropout_for_cuda_within_a_transform_has_a_mask_of_bytes(transform, needed):
    step = within(transform, partial(nn.functional.dropout, p=0.1))
    assert abs(estimate(step, device="cuda", backward=False).peak.total - needed) <= SCALARS


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has CUDA's own operators")
@pytest.mark.parametrize("layer", [partial(nn.functional.rms_norm, normalized_shape=(256,))])
def test_a_kernel_of_cuda_that_no_transform_takes_is_refused_in_words(layer):
    step = within(of_each_row, layer)
    with pytest.raises(EstimateError, match="calls rms_norm within a transform"):
        estimate(step, device="cuda", backward=False)
    assert estimate(step, backward=False).peak.total


def padded(model: nn.Module, x: torch.Tensor) -> Step:
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[:, 12:] = True
    return partial(model, x, src_key_padding_mask=mask)


def causal(model: nn.Module, x: torch.Tensor) -> Step:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return partial(model, x, mask=mask, is_causal=True)


@pytest.mark.parametrize("how", [partial, padded, causal])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_that_one_operator_computes_count_what_is_inside(how, activation, norm_first):
    layer = nn.TransformerEncoderLayer(
        64, 4, 128, batch_first=True, activation=activation, norm_first=norm_first
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        assert abs(difference(how(model, torch.randn(4, 64, 64)))) <= SCALARS


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_attention_that_one_operator_computes_counts_what_is_inside(need_weights, average):
    model, x = nn.MultiheadAttention(64, 4, batch_first=True).eval(), torch.randn(4, 64, 64)
    how = {"need_weights": need_weights, "average_attn_weights": average}
    with torch.no_grad():
        assert abs(difference(partial(model, x, x, x, **how))) <= SCALARS


class Lookahead(torch.optim.Optimizer):
    """Takes another optimizer's steps, and keeps slow weights beside; shares groups and state."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in inner.param_groups for p in group["params"]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        fast = [p for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for weight, slow in zip(fast, self.slow, strict=True):
                slow.lerp_(weight, 0.5)
                weight.copy_(slow)


def test_an_optimizer_inside_another_one_has_fake_parameters_and_its_own_again_afterwards():
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    assert abs(difference(step)) <= SCALARS
    assert optimizer.param_groups is optimizer.inner.param_groups
    assert optimizer.state is optimizer.inner.state
    assert optimizer.param_groups[0]["params"][0] is model.weight
    step()


def test_a_convolution_of_one_small_image_counts_its_unfolded_input():
    model = nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1))
    model, x = model.double(), torch.randn(1, 4, 8, 8, 8, dtype=torch.float64)
    assert abs(difference(training(model.parameters(), lambda: model(x).mean()))) <= SCALARS


def of_numpy() -> torch.Tensor:
    return torch.from_numpy(np.ones((256, 64), dtype=np.float32))


def as_tensor() -> torch.Tensor:
    return torch.as_tensor(np.ones((256, 64), dtype=np.float32))


def copied() -> torch.Tensor:
    return torch.tensor(np.ones((256, 64), dtype=np.float32))


@pytest.mark.parametrize("make", [of_numpy, as_tensor, copied])
def test_memory_of_numpy_counts_where_torch_copies_it(make):
    model = nn.Linear(64, 64)
    assert abs(difference(lambda: model(make()).sum())) <= SCALARS


def test_memory_of_numpy_that_was_there_counts_once_it_is_read():
    model, held = nn.Linear(64, 64), of_numpy()
    assert abs(difference(lambda: model(held).sum())) <= SCALARS


def test_learned_quantization_counts_what_each_element_adds_to_the_gradients():
    layer, x = nn.Linear(64, 128), torch.randn(64, 64)
    scale, zero = nn.Parameter(torch.tensor([0.1])), nn.Parameter(torch.tensor([0.0]))
    quantize = torch._fake_quantize_learnable_per_tensor_affine
    loss = training([scale, zero], lambda: quantize(layer(x), scale, zero, 0, 255, 1.0).sum())
    assert abs(difference(loss)) <= SCALARS


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="has CUDA's own operators")
def test_attention_that_one_operator_computes_is_fused_on_a_gpu():
    model, x = nn.MultiheadAttention(128, 4, batch_first=True).eval(), torch.randn(4, 64, 128)
    with torch.no_grad():
        step = partial(model, x, x, x, need_weights=False)
        result = estimate(step, backward=False, device="cuda")
    # Three projections, what attends to them, and the result: 1,050,624 B on a simulated H100.
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert result.peak.total == weights + x.nbytes + 5 * x.nbytes
