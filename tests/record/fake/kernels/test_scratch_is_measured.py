"""Scratch inside operators, rule by rule and beside what the operators allocate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from pytest_torchmem import estimate, measure
from pytest_torchmem.record.fake.kernels.operator_call import Call, Scratch
from pytest_torchmem.record.fake.kernels.scratch import kept_bytes, scratch_of
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.record.torch_api.dispatcher import convolution_kind

aten = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32
Made = tuple[Any, tuple[Any, ...], dict[str, Any]]
LAYOUTS = [
    (torch.contiguous_format, torch.contiguous_format),
    (torch.channels_last, torch.contiguous_format),
    (torch.contiguous_format, torch.channels_last),
]
PROMOTING: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "compared": lambda x, number: x == number,
    "added": lambda x, number: x + number,
    "subtracted from": lambda x, number: number - x,
    "divided": lambda x, number: x // number,
    "chosen": lambda x, number: torch.where(torch.ones(5000, dtype=torch.bool), x, number),
    "filled": lambda x, number: x.masked_fill(torch.ones(5000, dtype=torch.bool), number.real),
    "scaled": lambda x, number: torch.addcmul(x, x, x, value=number),
    "in place": lambda x, number: x.clone().mul_(number),
}
# Sizes and moments of means: numbers that C++ wraps in tensors.
SCALARS = 64


def call_of(func: Any, *args: Any, **kwargs: Any) -> Call:
    outputs = fake_tensors.tensors_in(func(*args, **kwargs))
    return Call(func, func._schema.name, args, kwargs, outputs)


def ruled(func: Any, *args: Any, on_cpu: bool = True, **kwargs: Any) -> Scratch:
    return scratch_of(call_of(func, *args, **kwargs), on_cpu=on_cpu)


def measured(func: Any, *args: Any, **kwargs: Any) -> int:
    """The bytes that a call holds at its peak beyond those that it has at its end."""
    func(*args, **kwargs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        held = func(*args, **kwargs)
    sizes: list[tuple[int, int]] = []

    def walk(event: Any) -> None:
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.typed[1].alloc_size))
        for child in event.children:
            walk(child)

    kineto = recorded.profiler.kineto_results
    for event in kineto.experimental_event_tree():
        walk(event)
    del held
    level = peak = 0
    for _, size in sorted(sizes):
        level += size
        peak = max(peak, level)
    return peak - level


# The rules.


def test_a_matrix_that_blas_can_read_is_not_copied():
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    assert ruled(aten.mm.default, a, b).bytes_ == 0
    assert ruled(aten.mm.default, a, torch.ones(8, 6).t()).bytes_ == 0
    assert ruled(aten.mm.default, torch.ones(4, 12)[:, :6], b).bytes_ == 0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_an_expanded_matrix_is_copied_on_every_device(on_cpu):
    expanded, bias = torch.ones(()).expand(4, 6), torch.ones(8)
    b = torch.ones(6, 8)
    assert ruled(aten.mm.default, expanded, b, on_cpu=on_cpu).bytes_ == 4 * 6 * 4
    assert ruled(aten.addmm.default, bias, expanded, b, on_cpu=on_cpu).bytes_ == 4 * 6 * 4


def test_only_kernels_of_the_cpu_cast_their_inputs_beforehand():
    x, mask = torch.ones(4, 6), torch.ones(4, 6, dtype=torch.bool)
    assert ruled(aten.mul.Tensor, x, mask).bytes_ == 4 * 6 * 4
    assert ruled(aten.mul.Tensor, x, mask, on_cpu=False).bytes_ == 0


def test_operators_without_a_rule_take_none():
    assert ruled(aten.relu.default, torch.ones(()).expand(4, 6)) == Scratch(0, 0)


# Beside measured memory.


def floats(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def norm_backward(n: int, m: int, dtype: torch.dtype) -> Made:
    x, weight = floats(n, m, dtype=dtype), floats(m, dtype=dtype)
    _, mean, rstd = torch.native_layer_norm(x, [m], weight, weight, 1e-5)
    args = (x, x, [m], mean, rstd, weight, weight, [True, True, True])
    return aten.native_layer_norm_backward.default, args, {}


def batch_norm_of_rows(n: int, m: int, dtype: torch.dtype) -> Made:
    x, weight, zeros, ones = floats(n, m), floats(m), torch.zeros(m), torch.ones(m)
    return aten.native_batch_norm.default, (x, weight, weight, zeros, ones, True, 0.1, 1e-5), {}


def batch_norm_backward(n: int, m: int, dtype: torch.dtype) -> Made:
    x, weight, zeros, ones = floats(n, m, 3, 4), floats(m), torch.zeros(m), torch.ones(m)
    if n % 2:
        x = x.to(memory_format=torch.channels_last)
    _, mean, rstd = torch.native_batch_norm(x, weight, weight, zeros, ones, True, 0.1, 1e-5)
    args = (x, x, weight, zeros, ones, mean, rstd, True, 1e-5, [True, True, True])
    return aten.native_batch_norm_backward.default, args, {}


def attention(n: int, m: int, dtype: torch.dtype, *, backward: bool) -> Made:
    query, key = floats(2, 3, 8 * n, 16), floats(2, 3, 8 * m, 16)
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, key)
    if not backward:
        return aten._scaled_dot_product_flash_attention_for_cpu.default, (query, key, key), {}
    args = (out, query, key, key, out, sums, 0.0, False)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, args, {}


def gradient_of_gelu(n: int, m: int, dtype: torch.dtype, *, expanded: bool) -> Made:
    x = floats(n, m)
    grad = floats(m).expand(n, m) if expanded else floats(m, n).t()
    return aten.gelu_backward.default, (grad, x), {}


def gradient_of_an_expanded_gelu(n: int, m: int, dtype: torch.dtype) -> Made:
    grad, x = torch.ones(n, m, dtype=dtype), torch.ones(n, 1, dtype=dtype).expand(n, m)
    return aten.gelu_backward.default, (grad, x), {}


def of_padding(n: int, m: int, dtype: torch.dtype) -> Made:
    x, grad = floats(n, 2, m + 2, 5), floats(5 + 4).expand(n, 2, m + 6, 9)
    return aten.reflection_pad2d_backward.default, (grad, x, [2, 2, 2, 2]), {}


def of_pooling(n: int, m: int, dtype: torch.dtype) -> Made:
    x, grad = floats(n, 4, 2 * m, 8), floats(n, 4, m, 4)
    if m % 2:
        x = x.to(memory_format=torch.channels_last)
    args = (grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
    return aten.avg_pool2d_backward.default, args, {}


def upsampled(n: int, m: int, dtype: torch.dtype, *, operator: Any) -> Made:
    x = floats(2, n, m + 1, 7)
    if n % 3 == 0:
        x = x.to(memory_format=torch.channels_last)
    args = (x, [5 * m, 9 * n]) + (() if "nearest" in str(operator) else (False,))
    return operator, args, {}


def transformed(n: int, m: int, dtype: torch.dtype) -> Made:
    return aten._fft_r2c.default, (floats(n, m + 1, 6), [m % 3], 0, True), {}


def product_of_batches(n: int, m: int, dtype: torch.dtype) -> Made:
    return aten.bmm.default, (floats(16).expand(n, 4 * m, 16), floats(n, 16, 8)), {}


def sorted_along(n: int, m: int, dtype: torch.dtype) -> Made:
    return aten.sort.default, (floats(n, m + 1), -1), {}


def loss(n: int, m: int, dtype: torch.dtype, *, operator: Any) -> Made:
    return operator, (torch.rand(n, m), torch.rand(n, m)), {}


def with_logits(n: int, m: int, dtype: torch.dtype) -> Made:
    operator = aten.binary_cross_entropy_with_logits.default
    return operator, (floats(n, m), torch.rand(n, m), None, None, n % 3), {}


MADE: dict[str, Callable[[int, int, torch.dtype], Made]] = {
    "float and bfloat16": lambda n, m, t: (
        aten.mul.Tensor,
        (floats(n, m), floats(n, m, dtype=t)),
        {},
    ),
    "written in 16 bits": lambda n, m, t: (
        aten.mul_.Tensor,
        (floats(n, m, dtype=t), floats(n, m)),
        {},
    ),
    "compared": lambda n, m, t: (aten.gt.Tensor, (floats(n, m), floats(n, m, dtype=t)), {}),
    "whole numbers divided": lambda n, m, t: (
        aten.div.Tensor,
        (torch.ones(n, m, dtype=torch.int64), torch.ones(n, m, dtype=torch.int64)),
        {},
    ),
    "a mask counted": lambda n, m, t: (aten.sum.default, (torch.ones(n, m) > 0,), {}),
    "summed in 32 bits": lambda n, m, t: (
        aten.sum.dim_IntList,
        (floats(n, m, dtype=t), [0]),
        {"dtype": F32},
    ),
    "indices of 32 bits": lambda n, m, t: (
        aten.index.Tensor,
        (floats(n, m), [torch.zeros(n, dtype=torch.int32)]),
        {},
    ),
    "logsumexp": lambda n, m, t: (aten.logsumexp.default, (floats(n, m), [n % 2]), {}),
    "layer_norm, backward": norm_backward,
    "batch_norm of rows": batch_norm_of_rows,
    "batch_norm, backward": batch_norm_backward,
    "attention": lambda n, m, t: attention(n, m, t, backward=False),
    "attention, backward": lambda n, m, t: attention(n, m, t, backward=True),
    "gelu, backward, expanded": lambda n, m, t: gradient_of_gelu(n, m, t, expanded=True),
    "gelu of what is expanded, backward": gradient_of_an_expanded_gelu,
    "gelu, backward, transposed": lambda n, m, t: gradient_of_gelu(n, m, t, expanded=False),
    "padding, backward": of_padding,
    "pooling, backward": of_pooling,
    "bilinear": lambda n, m, t: upsampled(n, m, t, operator=aten.upsample_bilinear2d.default),
    "nearest": lambda n, m, t: upsampled(n, m, t, operator=aten.upsample_nearest2d.default),
    "bicubic": lambda n, m, t: upsampled(n, m, t, operator=aten.upsample_bicubic2d.default),
    "rfft": transformed,
    "bmm": product_of_batches,
    "sort": sorted_along,
    "mse_loss": lambda n, m, t: loss(n, m, t, operator=aten.mse_loss.default),
    "smooth_l1_loss": lambda n, m, t: loss(n, m, t, operator=aten.smooth_l1_loss.default),
    "huber_loss": lambda n, m, t: loss(n, m, t, operator=aten.huber_loss.default),
    "with logits": with_logits,
    "columns": lambda n, m, t: (
        aten.im2col.default,
        (floats(n, 2, m + 3, 8), [3, 3], [1, 1], [0, 0], [1 + m % 2, 1]),
        {},
    ),
}
SIZES = st.integers(2, 40)


@pytest.mark.parametrize("name", MADE)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(n=SIZES, m=SIZES)
def test_the_rule_of_an_operator_is_what_it_takes(name, n, m):
    func, args, kwargs = MADE[name](n, m, BF16)
    assert abs(ruled(func, *args, **kwargs).bytes_ - measured(func, *args, **kwargs)) <= SCALARS


def test_columns_that_become_a_picture_leave_it_their_memory():
    call = call_of(
        aten.col2im.default, floats(2, 36, 100), [12, 12], [3, 3], [1, 1], [0, 0], [1, 1]
    )
    assert kept_bytes(call, on_cpu=True) == {0: call.outputs[0].untyped_storage().nbytes()}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [[105, 27], [90, 20]])
@pytest.mark.parametrize("operator", [aten.upsample_bilinear2d, aten.upsample_nearest2d])
def test_few_channels_are_enlarged_one_by_one(layout, channels, size, operator):
    x = floats(2, channels, 22, 7).to(memory_format=layout)
    args = (x, size) + (() if "nearest" in str(operator) else (False,))
    func = operator.default
    assert abs(ruled(func, *args).bytes_ - measured(func, *args)) <= SCALARS


@pytest.mark.parametrize("operator", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy"])
def test_a_reduced_loss_keeps_the_memory_of_each_elements_loss(operator):
    func = getattr(aten, operator).default
    call = call_of(func, torch.rand(8, 4), torch.rand(8, 4))
    assert kept_bytes(call, on_cpu=True) == {0: call.outputs[0].untyped_storage().nbytes()}


@pytest.mark.skipif(torch.__version__ < "2.13", reason="oneDNN kept other memory")
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 90), st.integers(1, 70))
def test_the_workspace_of_an_lstm_is_known(steps, batch, width, hidden):
    x, state = floats(steps, batch, width), torch.zeros(batch, hidden)
    weights = (p.detach() for p in torch.nn.LSTM(width, hidden).parameters())
    rest = (state, state, False, [], 2, hidden, 1, True, False, False, True)
    call = call_of(aten.mkldnn_rnn_layer.default, x, *weights, *rest)
    assert kept_bytes(call, on_cpu=True) == {3: call.outputs[3].untyped_storage().nbytes()}
    scratch = scratch_of(call, on_cpu=True)
    assert scratch.bytes_ <= measured(call.func, *call.args) <= scratch.at_most_bytes
    with torch.no_grad():
        assert measured(call.func, *call.args) <= scratch.at_most_bytes


def assert_bounded(x: torch.Tensor, weight: torch.Tensor, *how: Any) -> None:
    """A convolution and its backward take no more than their bounds."""
    call = call_of(aten.convolution.default, x, weight, None, *how)
    assert measured(call.func, *call.args) <= scratch_of(call, on_cpu=True).at_most_bytes
    grad, wanted = torch.randn_like(call.outputs[0]), [True, True, False]
    back = call_of(aten.convolution_backward.default, grad, x, weight, None, *how, wanted)
    assert measured(back.func, *back.args) <= scratch_of(back, on_cpu=True).at_most_bytes


@pytest.mark.parametrize("number", [1, 2.5, True, 1j, torch.tensor(2.5), torch.tensor(3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, BF16, torch.float64])
@pytest.mark.parametrize("function", PROMOTING)
def test_what_has_not_the_type_of_a_number_is_cast(function, dtype, number):
    x = torch.ones(5000, dtype=dtype)
    try:
        PROMOTING[function](x, number)
    except (RuntimeError, NotImplementedError):
        return  # torch has no such function
    with measure(device="cpu") as window:
        PROMOTING[function](x, number)
    found = estimate(lambda: PROMOTING[function](x, number), backward=False)
    at_most = found.at_most or found.peak.total
    assert found.peak.total - SCALARS <= window.result.peak.total <= at_most + SCALARS


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, F32])
@pytest.mark.parametrize("func", [aten.all.default, aten.any.default])
def test_what_is_not_a_truth_is_made_one_before_all_of_it_is_read(func, dtype):
    x = torch.ones(5000, dtype=dtype)
    assert abs(ruled(func, x).bytes_ - measured(func, x)) <= SCALARS


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [1, 8], indirect=True)
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([1, 3, 8, 20, 64]),
    st.sampled_from([1, 4, 16, 24]),
    st.sampled_from([1, 3, 5]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([1, 1, 3, 40]),
    st.sampled_from(LAYOUTS),
)
def test_a_convolution_takes_no_more_than_its_bound(
    dtype, inner, outer, kernel, stride, dilation, transposed, groups, layouts
):
    x = floats(2, inner * groups, 9, 16, dtype=dtype).to(memory_format=layouts[0])
    shape = (inner * groups, outer) if transposed else (outer * groups, inner)
    weight = floats(*shape, kernel, kernel, dtype=dtype).to(memory_format=layouts[1])
    assert_bounded(x, weight, [stride] * 2, [0, 0], [dilation] * 2, transposed, [0, 0], groups)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [8], indirect=True)
@pytest.mark.parametrize(
    ("channels", "kernel", "dilation", "groups"), [((64, 4), 5, 1, 3), ((4, 32), 7, 2, 1)]
)
def test_each_thread_unfolds_an_image_and_has_gradients_of_its_own(
    channels, kernel, dilation, groups
):
    inner, outer = channels
    x = floats(2, inner * groups, 32, 36)
    weight = floats(outer * groups, inner, kernel, kernel)
    assert_bounded(x, weight, [1, 1], [0, 0], [dilation] * 2, False, [0, 0], groups)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_channels_that_come_last_in_one_come_last_in_all(layouts):
    x = floats(2, 16, 7, 9, dtype=torch.float64).to(memory_format=layouts[0])
    weight = floats(4, 16, 3, 3, dtype=torch.float64).to(memory_format=layouts[1])
    assert_bounded(x, weight, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def test_each_group_of_a_transposed_convolution_fills_blocks_of_its_own():
    x, weight = floats(2, 3, 9, 16), floats(3, 16, 5, 5)
    call = call_of(
        aten.convolution.default, x, weight, None, [1, 1], [0, 0], [1, 1], True, [0, 0], 3
    )
    assert measured(call.func, *call.args) <= scratch_of(call, on_cpu=True).at_most_bytes


def test_each_group_of_a_convolution_may_fill_blocks_of_its_own():
    x, weight = floats(2, 256, 2, 2), floats(256, 1, 3, 3)
    x = x.to(memory_format=torch.channels_last)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 256)
    wanted = [True, True, False]
    back = call_of(aten.convolution_backward.default, x, x, weight, None, *how, wanted)
    assert measured(back.func, *back.args) <= scratch_of(back, on_cpu=True).at_most_bytes


def test_each_group_of_16_bits_may_fill_pairs_of_blocks():
    x, weight = floats(2, 120, 9, 16, dtype=BF16), floats(120, 1, 5, 5, dtype=BF16)
    how = ([2, 2], [0, 0], [1, 1], True, [0, 0], 40)
    grad = call_of(aten.convolution.default, x, weight, None, *how).outputs[0]
    wanted = [True, True, False]
    back = call_of(aten.convolution_backward.default, grad, x, weight, None, *how, wanted)
    assert measured(back.func, *back.args) <= scratch_of(back, on_cpu=True).at_most_bytes


def laid_out(shape: tuple[int, ...], layout: str) -> torch.Tensor:
    if layout == "expanded":
        return floats(1).expand(shape)
    if layout == "by heads":
        return floats(*shape[:1], shape[2], shape[1], *shape[3:]).transpose(1, 2)
    if layout == "transposed":
        return floats(*shape[:2], *reversed(shape[2:])).transpose(2, 3)
    return floats(*shape)


COPIED_BY_LAYOUT: dict[str, Callable[[torch.Tensor], Made]] = {
    "triu of a batch": lambda x: (aten.triu.default, (x[0],), {}),
    "median": lambda x: (aten.median.dim, (x, 0), {}),
    "median of rows": lambda x: (aten.nanmedian.dim, (x, -1), {}),
    "median of planes": lambda x: (aten.median.dim, (x, 2), {}),
    "count_nonzero": lambda x: (aten.count_nonzero.dim_IntList, (x, [0]), {}),
    "median of all": lambda x: (aten.median.default, (x,), {}),
    "triu": lambda x: (aten.triu.default, (x,), {}),
    "tril of one": lambda x: (aten.tril.default, (x[:1],), {}),
    "pixel_shuffle": lambda x: (aten.pixel_shuffle.default, (x, 2), {}),
    "pixel_unshuffle": lambda x: (aten.pixel_unshuffle.default, (x, 2), {}),
    "im2col": lambda x: (aten.im2col.default, (x, [3, 3], [1, 1], [0, 0], [1, 1]), {}),
}


@pytest.mark.parametrize("layout", ["whole", "expanded", "by heads", "transposed"])
@pytest.mark.parametrize("name", COPIED_BY_LAYOUT)
def test_what_a_kernel_copies_depends_on_the_layout(name, layout):
    func, args, kwargs = COPIED_BY_LAYOUT[name](laid_out((4, 8, 16, 16), layout))
    scratch = ruled(func, *args, **kwargs).bytes_
    kept = kept_bytes(call_of(func, *args, **kwargs), on_cpu=True)
    assert abs(measured(func, *args, **kwargs) - scratch) <= SCALARS or kept


@pytest.mark.parametrize("size", [50, 70])
@pytest.mark.parametrize("transposed", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_softmax_transposes_a_matrix_in_blocks(name, transposed, size, backward):
    given = [
        floats(size, size).t() if place in transposed else floats(size, size) for place in (0, 1)
    ]
    func = getattr(aten, f"{name}_backward_data" if backward else name).default
    args = (*given, 1, torch.float32) if backward else (given[0], 1, False)
    assert abs(measured(func, *args) - ruled(func, *args).bytes_) <= SCALARS


@pytest.mark.parametrize("layout", ["whole", "expanded", "by heads"])
def test_attention_copies_a_gradient_that_is_not_by_rows_of_all_heads(layout):
    x = floats(2, 4, 64, 16)
    func = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(x, x, x)
    args = (laid_out((2, 4, 64, 16), layout), x, x, x, out, sums, 0.0, False)
    assert abs(measured(func, *args) - ruled(func, *args).bytes_) <= SCALARS


@pytest.mark.parametrize("widths", [(32, 32, 8), (5, 7, 3)])
def test_the_products_of_a_bilinear_layer_are_bounded(widths):
    left, right, out = widths
    a, b, weight = floats(64, left), floats(64, right), floats(out, left, right)
    func = aten._trilinear.default
    for args in (
        (a, weight, b, [1, 3], [0], [1, 2], [2, 3]),
        (floats(64, out), weight, b, [2, 3], [0], [1, 2], [1, 3]),
    ):
        bounds = ruled(func, *args)
        assert bounds.bytes_ - SCALARS <= measured(func, *args) <= bounds.at_most_bytes + SCALARS


@pytest.mark.parametrize("dtype", [F32, BF16, torch.int64])
@pytest.mark.parametrize("shape", [(64, 64), (100, 30), (60, 61), (2, 64, 64)])
def test_a_whole_matrix_is_transposed_in_blocks(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    made = x.mT.contiguous()
    contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
    for func, args, how in (
        (aten.clone.default, (x.mT,), contiguous),
        (aten.clone.default, (x.mT,), {}),
        (aten.copy_.default, (made, x.mT), {}),
        (aten.median.dim, (x, 0), {}),
    ):
        assert abs(measured(func, *args, **how) - ruled(func, *args, **how).bytes_) <= SCALARS


def given_as(x: torch.Tensor, form: str) -> torch.Tensor:
    return {"plain": x, "conjugate": x.conj(), "adjoint": x.mH}[form]


FORMS = ["plain", "conjugate", "adjoint"]


@pytest.mark.parametrize("right", FORMS)
@pytest.mark.parametrize("left", FORMS)
@pytest.mark.parametrize("func", [aten.mm.default, aten.bmm.default])
def test_a_blas_conjugates_what_it_transposes_and_copies_others(func, left, right):
    x = floats(*(32, 32) if func is aten.mm.default else (3, 32, 32), dtype=torch.complex64)
    args = given_as(x, left), given_as(x, right)
    assert measured(func, *args) == ruled(func, *args).bytes_


@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16, torch.complex64])
@pytest.mark.parametrize(
    "shape", [(48, 48), (3, 3), (1, 64, 64), (2, 48, 48), (16, 6, 6), (9, 1, 1)]
)
def test_the_exponential_of_a_matrix_is_bounded_by_its_powers(shape, dtype):
    least, most = [], []
    for scale in (0.0, 1e-5, 1e-3, 0.1, 1.0, 100.0):
        x = (torch.randn(shape) * scale / shape[-1]).to(dtype)
        bounds = ruled(aten.linalg_matrix_exp.default, x)
        taken = measured(aten.linalg_matrix_exp.default, x)
        least.append(taken - bounds.bytes_)
        most.append(bounds.at_most_bytes - taken)
    # oneDNN copies for products of 16 bits, where the processor has instructions for them.
    assert min(least) >= -SCALARS
    assert min(least) <= 512 or dtype in (BF16, torch.float16)
    assert min(most) >= -SCALARS


@pytest.mark.parametrize("mask", [(1,), (24,), (20, 24)])
def test_what_a_mask_chose_is_bounded(mask):
    grad, func = floats(20, 24), aten.masked_scatter_backward.default
    for share in (0.0, 0.5, 1.0):
        args = grad, torch.rand(mask) < share, [20, 24]
        bounds = ruled(func, *args)
        assert bounds.bytes_ <= measured(func, *args) <= bounds.at_most_bytes


@pytest.mark.parametrize("sizes", [(4000, 10), (4000, 3000), (10, 4000)])
@pytest.mark.parametrize("dtype", [F32, torch.int64])
@pytest.mark.parametrize("unique", [True, False])
def test_looking_up_many_in_many_is_bounded(sizes, dtype, unique):
    args = tuple(torch.arange(size).to(dtype) for size in sizes)
    bounds = ruled(aten.isin.Tensor_Tensor, *args, assume_unique=unique)
    taken = measured(aten.isin.Tensor_Tensor, *args, assume_unique=unique)
    assert bounds.bytes_ <= taken <= bounds.at_most_bytes


@pytest.mark.parametrize("shape", [(64, 64), (5, 64, 48)])
def test_reflections_take_a_block_of_columns_at_most(shape):
    func, args = (
        aten.linalg_householder_product.default,
        (floats(*shape), floats(*shape[:-2], shape[-1])),
    )
    bounds = ruled(func, *args)
    assert bounds.bytes_ <= measured(func, *args) <= bounds.at_most_bytes


# In three dimensions a result begins as large as what it is made of, and a bias needs ones.
@example((6, 5, 7), torch.float64, (1, 4, 2), 1, (1, 0, 1), True, 2, "rows", True)
@example((6, 5, 7), torch.float64, (1, 4, 2), 1, (2, 0, 1), True, 1, "rows", False)
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(20,), (9, 12), (6, 5, 7)]),
    st.sampled_from([torch.float64, F32]),
    st.tuples(st.integers(1, 3), st.sampled_from([1, 4]), st.sampled_from([2, 8])),
    st.sampled_from([1, 2, 3]),
    st.tuples(st.integers(1, 2), st.integers(0, 1), st.integers(1, 2)),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
    st.sampled_from(["rows", "transposed", "expanded gradient"]),
    st.booleans(),
)
def test_a_convolution_that_onednn_does_not_take_unfolds_its_input(
    places, dtype, sizes, kernel, steps, transposed, groups, form, biased
):
    images, inner, outer = sizes
    stride, padding, dilation = ([step] * len(places) for step in steps)
    x = floats(images, inner * groups, *places, dtype=dtype)
    x = x.transpose(-1, -2) if form == "transposed" and len(places) > 1 else x
    channels = (inner * groups, outer) if transposed else (outer * groups, inner)
    weight = floats(*channels, *[kernel] * len(places), dtype=dtype)
    padding = padding if kernel > 1 else [0] * len(places)
    bias = floats(outer * groups, dtype=dtype) if biased else None
    how = (stride, padding, dilation, transposed, [0] * len(places), groups)
    if "Slow" not in convolution_kind((x, weight, bias, *how)):
        return
    call = call_of(aten.convolution.default, x, weight, bias, *how)
    taken, rule = measured(call.func, *call.args), scratch_of(call, on_cpu=True)
    assert rule.bytes_ - SCALARS <= taken <= rule.at_most_bytes + SCALARS
    grad = torch.randn_like(call.outputs[0])
    grad = floats(1, dtype=dtype).expand_as(grad) if form == "expanded gradient" else grad
    for wanted in ([True, True, False], [False, True, False], [True, False, False]):
        back = call_of(aten.convolution_backward.default, grad, x, weight, None, *how, wanted)
        taken, rule = measured(back.func, *back.args), scratch_of(back, on_cpu=True)
        # Gradients come one after the other: not all are there at the peak.
        assert rule.bytes_ - SCALARS - weight.nbytes <= taken <= rule.at_most_bytes + SCALARS


def test_the_columns_of_rows_in_memory_are_known_exactly():
    x, weight = floats(2, 4, 16, 16, dtype=torch.float64), floats(8, 4, 3, 3, dtype=torch.float64)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    call = call_of(aten.convolution.default, x, weight, None, *how)
    columns = 2 * 4 * 9 * 16 * 16 * 8
    assert measured(call.func, *call.args) == columns
    assert (ruled(call.func, *call.args).bytes_, ruled(call.func, *call.args).at_most_bytes) == (
        columns,
        columns,
    )


@pytest.mark.parametrize(
    ("sizes", "dim", "window", "step"),
    [((4, 1024), 1, 64, 16), ((1024, 4), -2, 8, 100), ((3, 500, 2), 1, 7, 7), ((2000,), 0, 10, 1)],
)
def test_places_that_windows_reach_are_numbered_where_these_overlap(sizes, dim, window, step):
    grad = torch.ones(sizes).unfold(dim, window, step).contiguous()
    args = grad, list(sizes), dim, window, step
    func = aten.unfold_backward.default
    assert measured(func, *args) == ruled(func, *args).bytes_
