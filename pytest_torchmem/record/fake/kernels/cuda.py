"""Memory that kernels of CUDA take for themselves.

Some of it depends on the number of processors: without a GPU at hand the smallest and the largest
that is known give an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels import cuda_attention as attention
from pytest_torchmem.record.fake.kernels import cuda_sorting as sorting
from pytest_torchmem.record.fake.kernels.cuda_reductions import (
    Read,
    Reduction,
    partial_bytes,
    power_below,
)
from pytest_torchmem.record.fake.kernels.operator_call import (
    EXTREMES,
    HALVES,
    WIDE_BYTES,
    Bounds,
    Call,
    Processors,
    Rule,
    Rules,
    bounds_by,
    broadcast_elements,
    contiguous_strides,
    copied_for_fft,
    copied_in_the_layout_of,
    copied_matrices,
    copied_unless_contiguous,
    elements,
    gathered_by_mask,
    is_dense,
    layout,
    nbytes,
    of,
    powers_of_matrix,
    products_of_three,
)
from pytest_torchmem.record.torch_api import fake_tensors

_INDEX_BYTES: Final = 8


def cuda_bounds(call: Call) -> Bounds:
    """Return what a call takes for itself at least and at most, on the GPU here or on any."""
    here = fake_tensors.processors_here()
    gpus = (Processors(*here),) if here is not None else EXTREMES
    least, most = zip(*(bounds_by(_RULES, replace(call, processors=p)) for p in gpus), strict=True)
    unless_cudnn = len(gpus) > 1 and call.name in _UNLESS_CUDNN and call.args[0].dtype in HALVES
    return 0 if unless_cudnn else min(least), max(most)


# cuDNN's attention takes their place on Hopper and on Blackwell, for 16 bits.
_UNLESS_CUDNN: Final = of(
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward",
    0,
)


# Reductions.


def _dims(call: Call) -> list[int]:
    dim = call.argument("dim")
    return [dim] if isinstance(dim, int) else list(dim or ())


def _sum(call: Call) -> int:
    """Whole numbers are added up in 64 bits, what has 16 bits in 32."""
    x = call.args[0]
    wanted = call.outputs[0].dtype
    # Halves that become floats are cast as they are read.
    cast = wanted != x.dtype and not (wanted == torch.float32 and x.dtype in HALVES)
    read = Read.of(x, wanted if cast else None)
    copied = elements(x) * wanted.itemsize if cast else 0
    return copied + _reduced(call, read, _added_up(wanted))


def _cast(call: Call) -> int:
    wanted, x = call.outputs[0].dtype, call.args[0]
    return elements(x) * wanted.itemsize if wanted != x.dtype else 0


def _added_up(dtype: torch.dtype) -> Reduction:
    return Reduction(max(WIDE_BYTES, dtype.itemsize), dtype.itemsize)


def _reduced(call: Call, read: Read, kind: Reduction) -> int:
    return partial_bytes(read, _dims(call), kind, call.processors)


def _extreme(count: int) -> Rule:
    """The largest or smallest values alone, which are compared in their own type."""

    def rule(call: Call) -> int:
        item = call.args[0].element_size()
        return _in_order(call, Reduction(count * item, item))

    return rule


def _with_index(call: Call) -> int | Bounds:
    """A value and its place: 16 bytes, whatever the type."""
    if call.name in _VALUE_AND_PLACE and call.argument("dim") is None:
        return _extreme(1)(call)
    return _in_order(call, Reduction(2 * _INDEX_BYTES, call.outputs[0].element_size()))


_VALUE_AND_PLACE: Final = ("aten::max", "aten::min")


def _in_order(call: Call, kind: Reduction) -> int:
    """A reduction of all that there is reads it in order, if need be as a copy."""
    x = call.args[0]
    if _dims(call) or x.is_contiguous():
        return _reduced(call, Read.of(x), kind)
    copy = Read((elements(x),), (1,), 0, x.element_size())
    return nbytes(x) + partial_bytes(copy, (), kind, call.processors)


def _moments(call: Call) -> int:
    """Mean, sum of squares and two counts."""
    x = call.args[0]
    item = x.element_size()
    return _reduced(call, Read.of(x), Reduction(4 * max(WIDE_BYTES, item), item, unrolled=2))


def _counted(call: Call) -> int:
    """The kernel marks what is not zero, casts the marks to whole numbers, and adds them up."""
    x = call.args[0]
    marked = 0 if x.dtype == torch.bool else elements(x)
    summed = _reduced(call, Read.of(x, torch.int64), _added_up(torch.int64))
    return marked + elements(x) * _INDEX_BYTES + summed


def _logsumexp(call: Call) -> int:
    """The exponents of all, the largest of each row, and the sum."""
    x = call.args[0]
    summed = _reduced(call, Read.of(x, x.dtype), _added_up(x.dtype))
    return nbytes(x) + nbytes(call.outputs[0]) + summed


# Copies and buffers.


def _copied_by_cudnn(call: Call) -> int:
    """cuDNN works by channels where input or weight is laid out so, and copies the others."""
    used = [t for t in call.args[:3] if isinstance(t, torch.Tensor) and t.dim() > 1]
    return _copied_to(_layout_of_cudnn(used[-2:]), used)


def _layout_of_cudnn(used: Sequence[torch.Tensor]) -> torch.memory_format:
    plain = all(layout(t) is torch.contiguous_format for t in used)
    return torch.contiguous_format if plain else torch.channels_last


def _copied_to(wanted: torch.memory_format, tensors: Sequence[torch.Tensor]) -> int:
    return sum(nbytes(t) for t in tensors if not t.is_contiguous(memory_format=wanted))


def _convolution_backward(call: Call) -> int:
    """The gradient of the bias is a sum, after the others."""
    grad, x, weight = call.args[:3]
    summed = 0
    if call.argument("output_mask")[2]:
        dims = [0, *range(2, grad.dim())]
        summed = partial_bytes(Read.of(grad), dims, _added_up(grad.dtype), call.processors)
    wanted = _layout_of_cudnn([x, weight])
    # The copy of the weight is gone before its gradient comes, which is by channels too.
    of_weight = 2 * _copied_to(wanted, [weight]) * bool(call.argument("transposed"))
    return max(_copied_to(wanted, [grad, x]) + of_weight, summed)


def _pooled_to_a_size(call: Call) -> int:
    """By channels it reads gradients of any layout."""
    by_channels = layout(call.args[1]) is torch.channels_last
    return 0 if by_channels else copied_unless_contiguous(0)(call)


def _pooled_by_largest(call: Call) -> int:
    """All that it reads and makes is contiguous."""
    made = 0 if call.args[0].is_contiguous() else call.out_bytes
    return copied_unless_contiguous(0, 1, 2)(call) + made * ("backward" not in call.name)


def _scattered_by_mask(call: Call) -> int:
    """Places of what is chosen, and a mask that is expanded or has gaps for each element."""
    out, mask = call.outputs[0], call.args[1]
    copied = mask.shape != out.shape or not mask.is_contiguous()
    return (8 + copied) * elements(out) + copied_unless_contiguous(2)(call)


def _distances_backward(call: Call) -> int:
    """Each pair has a part in the gradient until all are added up, see ``DistanceKernel.cu``."""
    grad, x, norm = call.args[0], call.args[1], call.args[-2]
    rows = int(x.shape[-2])
    of_all = call.name == "aten::_pdist_backward"
    pairs = rows * (rows - 1) if of_all else elements(grad)
    return 0 if norm == 0 else pairs * int(x.shape[-1]) * int(x.element_size())


def _transformed_to_real(call: Call) -> int:
    x = call.args[0]
    return nbytes(x) + copied_for_fft(call, contiguous_strides(x))


def _transformed_from_real(call: Call) -> int:
    x = call.args[0]
    if len(call.args[1]) > 1:
        return call.out_bytes
    return copied_for_fft(call) if is_dense(x) else nbytes(x)


def _loss(call: Call) -> int:
    """The loss of each element, and the partial results of its sum."""
    beside = _is_reduced(call) and call.name not in _IN_THE_RESULT
    size = broadcast_elements(call) * int(call.outputs[0].element_size())
    return size * beside + _of_losses(call)


def _is_reduced(call: Call) -> bool:
    return not call.outputs[0].dim() and bool(call.inputs[0].dim())


_IN_THE_RESULT: Final = ("aten::binary_cross_entropy", "aten::soft_margin_loss")


def _of_losses(call: Call) -> int:
    if not _is_reduced(call):
        return 0
    dtype = call.outputs[0].dtype
    losses = Read((broadcast_elements(call),), (1,), 0, dtype.itemsize)
    return partial_bytes(losses, (), _added_up(dtype), call.processors)


def _with_logits(call: Call) -> int:
    size = broadcast_elements(call) * int(call.outputs[0].element_size())
    weight = call.argument("pos_weight")
    weighted = nbytes(weight) if weight is not None else 0
    each = 2 * size if _is_reduced(call) else size
    return each + weighted + _of_losses(call)


def _group_norm(call: Call) -> int:
    """Scale and shift of each channel, and in 16 bits mean and deviation of each group.

    A single value of a channel, and one without weights, is scaled by its group.
    """
    x, weight, bias = call.args[:3]
    batch, channels, places, groups = map(int, call.args[3:7])
    scaled = places > 1 and not (weight is None and bias is None)
    narrow = int(x.element_size()) < WIDE_BYTES
    return 2 * batch * (channels * scaled + groups * narrow) * WIDE_BYTES


def _group_norm_backward(call: Call) -> int:
    batch, channels, places, groups = map(int, call.args[5:9])
    scaled = places > 1 and call.args[4] is not None
    of_x = (channels * scaled + 2 * groups) if call.args[9][0] else 0
    return batch * (2 * channels + of_x) * WIDE_BYTES


def _batch_norm(call: Call) -> int:
    """By channels, in 16 bits, blocks of threads have their own sums: ``Normalization.cuh``."""
    x, training = call.args[0], call.args[5]
    if not training or layout(x) is not torch.channels_last or x.dtype not in HALVES:
        return 0
    channels = int(x.shape[1])
    rows = elements(x) // channels
    wide = min(power_below(channels), 32)
    high = min(power_below(-(-rows // 16)), 512 // wide)
    wide = min(power_below(channels), 512 // high) if wide * high != _THREADS else wide
    blocks = min(-(-rows // (16 * high)), 128)
    return 0 if blocks < _SHARED_BLOCKS else 4 * channels * blocks * WIDE_BYTES


def _batch_norm_backward(call: Call) -> int:
    """cuDNN, which does not take rows and bfloat16, copies a gradient of another layout."""
    grad, x, weight, training = call.args[0], call.args[1], call.args[2], call.args[7]
    by_cudnn = training and weight is not None and x.dim() > _ROWS and x.dtype != torch.bfloat16
    alike = grad.is_contiguous(memory_format=layout(x))
    return nbytes(grad) if by_cudnn and not alike else 0


_ROWS: Final = 2


# Linear algebra, beside what cuSOLVER takes.


def _solved(matrix: torch.Tensor, wanted: torch.Tensor) -> Bounds:
    """The right side with its rows exchanged, and the order of rows; few columns need less."""
    size = int(matrix.shape[-1])
    rows = elements(matrix) // max(1, size)
    taken = nbytes(wanted) + _INDEX_BYTES * (size + 2 * rows)
    whole = size > _SMALL_MATRIX and wanted.shape[-2:] == matrix.shape[-2:]
    batches = elements(matrix) // max(1, size * size)
    return (taken if whole else 0), taken + _POINTERS_BYTES * batches


# A kernel for many small matrices wants to know where each of both sides is.
_POINTERS_BYTES: Final = 16


_SMALL_MATRIX: Final = 32


def _solved_by_factors(call: Call) -> Bounds:
    matrix, wanted = call.args[0], call.args[2]
    least, most = _solved(matrix, wanted)
    # Adjoint: the exchange comes last, in the result.
    return (0 if call.argument("adjoint", False) else least), most


def _inverted(call: Call) -> Bounds:
    """The factors with their exchanges, and what solving with them takes."""
    x = call.args[0]
    least, most = _solved(x, x)
    factors = nbytes(x) + WIDE_BYTES * (elements(x) // max(1, int(x.shape[-1])))
    return (least + factors if least else 0), most + factors


def _singular(call: Call) -> Bounds:
    """A copy by columns; vectors that nobody gets are computed of small matrices, and for values.

    See ``svd_cusolver`` in ``aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp``.
    """
    x, (rows, columns) = call.args[0], call.args[0].shape[-2:]
    batches = elements(x) // max(1, int(rows * columns))
    copied = nbytes(x) + WIDE_BYTES * batches
    if call.argument("compute_uv", True) and max(rows, columns) > _SMALL_MATRIX:
        return copied, copied
    squares = int(rows * rows + columns * columns) * int(x.element_size())
    return copied, copied + batches * squares


_THREADS: Final = 512
_SHARED_BLOCKS: Final = 8


_RULES: Final[Rules] = {
    **of("sort argsort", sorting.sorted_along),
    **of("median nanmedian", sorting.middle),
    **of("index_put index_put_ _index_put_impl_", sorting.added_at),
    "aten::_embedding_bag_backward": sorting.bags_backward,
    "aten::embedding_dense_backward": sorting.rows_backward,
    "aten::multinomial": lambda call: (nbytes(call.args[0]), 2 * nbytes(call.args[0])),
    "aten::randperm": sorting.shuffled,
    "aten::_linalg_solve_ex": lambda call: _solved(call.args[0], call.args[1]),
    "aten::_trilinear": products_of_three,
    "aten::_linalg_svd": _singular,
    "aten::linalg_inv_ex": _inverted,
    "aten::linalg_lu_solve": _solved_by_factors,
    "aten::isin": sorting.found_in_sorted,
    "aten::masked_scatter_backward": gathered_by_mask,
    "aten::linalg_matrix_exp": powers_of_matrix,
    **of("sum nansum prod mean linalg_vector_norm", _sum),
    **of("amax amin", _extreme(1)),
    "aten::aminmax": _extreme(2),
    **of("max min argmax argmin", _with_index),
    **of("var std var_mean std_mean", _moments),
    **of("any all", lambda call: _reduced(call, Read.of(call.args[0]), Reduction(1, 1))),
    "aten::count_nonzero": _counted,
    # Counts of blocks, of up to 65,536 values: of more, the result is not known.
    "aten::nonzero": lambda _: 1_027,
    **of("cumsum cumprod", _cast),
    "aten::logsumexp": _logsumexp,
    **of("mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss", _loss),
    "aten::binary_cross_entropy_with_logits": _with_logits,
    "aten::_ctc_loss_backward": lambda call: nbytes(call.args[6]),
    "aten::_scaled_dot_product_efficient_attention": attention.efficient_forward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention.efficient_backward,
    "aten::_scaled_dot_product_flash_attention": attention.flash_forward,
    "aten::_scaled_dot_product_flash_attention_backward": attention.flash_backward,
    # The product of gradient and output, in ``SoftMax.cu``.
    "aten::_softmax_backward_data": lambda call: nbytes(call.args[0]),
    "aten::convolution": _copied_by_cudnn,
    "aten::convolution_backward": _convolution_backward,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::_adaptive_avg_pool2d_backward": _pooled_to_a_size,
    # A pooling works in the layout of its input.
    **of("avg_pool2d_backward max_pool2d_with_indices_backward", copied_in_the_layout_of(1)),
    # cuBLAS needs a whole batch of matrices as rows or columns.
    "aten::bmm": lambda call: copied_matrices(call.args[:2]),
    "aten::baddbmm": lambda call: copied_matrices(call.args[1:3]),
    "aten::im2col": lambda call: nbytes(call.args[0]) * (2 - call.args[0].is_contiguous()),
    "aten::_fft_c2c": copied_for_fft,
    "aten::_fft_c2r": _transformed_to_real,
    "aten::_fft_r2c": _transformed_from_real,
    "aten::masked_scatter": _scattered_by_mask,
    **of("_cdist_backward _pdist_backward", _distances_backward),
    "aten::topk": sorting.largest_values,
    **of("adaptive_max_pool2d adaptive_max_pool2d_backward", _pooled_by_largest),
    # Read in the layout that they have, unless that has gaps.
    **of("upsample_bilinear2d_backward upsample_nearest2d_backward", copied_in_the_layout_of(0)),
    "aten::reflection_pad2d": copied_unless_contiguous(0),
}
