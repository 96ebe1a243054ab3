"""Memory that kernels of the CPU take for themselves: casts, copies, buffers for each thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Number, Real
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import (
    WIDE_BYTES,
    Call,
    Rules,
    blas_takes,
    broadcast_elements,
    copied_for_fft,
    copied_in_the_layout_of,
    copied_unless_contiguous,
    elements,
    layout,
    nbytes,
    of,
)
from pytest_torchmem.record.torch_api import dispatcher, fake_tensors

# Casts before an operator: kernels of the CPU work in one type.


def cast_bytes(call: Call) -> int:
    """Bytes of the inputs that an elementwise kernel or a sum of the CPU casts beforehand.

    ``TensorIterator::compute_types``: each tensor that has not the common type is copied into it,
    and so is what is written in place.
    """
    tensors = [t for t in call.inputs if t.dim()]
    if not tensors or not call.outputs:
        return 0
    if call.name in _TRUTHS:
        return sum(elements(t) for t in tensors[:1] if t.dtype not in (torch.bool, torch.uint8))
    if call.name in _SUMS:
        working = torch.float32 if call.name == "aten::mean" else call.outputs[0].dtype
        narrow = [t for t in tensors[:1] if t.dtype != working and not t.dtype.is_complex]
        return sum(elements(t) * working.itemsize for t in narrow)
    if torch.Tag.pointwise not in call.func.tags and call.name not in _UNTAGGED:
        return 0
    mask = call.argument(_MASKED[call.name]) if call.name in _MASKED else None
    values = [t for t in tensors if t is not mask]
    working = _common_type(call, values)
    cast = sum(elements(t) * working.itemsize for t in values if t.dtype != working)
    written = call.outputs[0]
    if dispatcher.writes_in_place(call.func) and written.dtype != working:
        cast += elements(written) * working.itemsize
    return cast


def _common_type(call: Call, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    found = tensors[0].dtype if tensors else call.outputs[0].dtype
    for tensor in tensors[1:]:
        found = torch.promote_types(found, tensor.dtype)
    numbers = () if call.name in (*_MASKED, *_SCALED) else call.numbers
    for dtype in (*map(_type_of, numbers), *(t.dtype for t in call.inputs if not t.dim())):
        # A number of the same kind, such as an integer among integers, does not count.
        found = torch.promote_types(found, dtype) if _kind(dtype) > _kind(found) else found
    result = call.outputs[0].dtype
    grows = result.is_floating_point and not (found.is_floating_point or found.is_complex)
    return result if grows else found


def _type_of(number: Number) -> torch.dtype:
    if isinstance(number, Integral):
        return torch.bool if isinstance(number, bool) else torch.int64
    default = torch.get_default_dtype()
    return default if isinstance(number, Real) else default.to_complex()


def _kind(dtype: torch.dtype) -> int:
    """Booleans, integers, floating point, complex numbers: promotion goes up."""
    return 3 * dtype.is_complex or 2 * dtype.is_floating_point or int(dtype != torch.bool)


_UNTAGGED: Final = frozenset({"aten::floor_divide", "aten::floor_divide_"})
_SCALED: Final = ("aten::addcmul", "aten::addcdiv", "aten::addcmul_", "aten::addcdiv_")
_TRUTHS: Final = frozenset({"aten::all", "aten::any"})
_SUMS: Final = frozenset({"aten::sum", "aten::mean", "aten::cumsum", "aten::prod"})
_MASKED: Final = {"aten::where": "condition", **of("masked_fill masked_fill_", "mask")}


# Copies of what a kernel cannot read as it is.


def _copied_of_a_batch(call: Call) -> int:
    """Matrices that a BLAS cannot read are copied one by one; small products need no BLAS."""
    left, right = call.inputs[-2:]
    conjugates = sum(nbytes(m) for m in (left, right) if m.is_conj())
    if left.shape[-2] * left.shape[-1] * right.shape[-1] < _SMALL_PRODUCT:
        return conjugates
    others = (m for m in (left, right) if not (m.is_conj() or blas_takes(m)))
    return conjugates + sum(nbytes(m) // max(1, m.shape[0]) for m in others)


_SMALL_PRODUCT: Final = 400


def _copied_to_the_layout_of(place: int, *others: int) -> Callable[[Call], int]:
    """A pooling works in the layout of one argument; others, and the result, are copied into it."""

    def rule(call: Call) -> int:
        wanted = layout(call.args[place])
        used = [call.args[place], *(call.args[i] for i in others), call.outputs[0]]
        return sum(nbytes(t) for t in used if not t.is_contiguous(memory_format=wanted))

    return rule


# Buffers.


def _gelu_backward(call: Call) -> int:
    """oneDNN, which takes a contiguous input only, copies gradients of another layout."""
    if call.kwargs.get("approximate") == "tanh" or not call.args[1].is_contiguous():
        return 0
    result = sum(nbytes(t) for t in call.outputs if not t.is_contiguous())
    return copied_unless_contiguous(0)(call) + result


def _layer_norm_backward(call: Call) -> int:
    """Each thread sums up the gradients of both parameters by itself."""
    weight, wanted = call.args[5], call.args[7]
    if weight is None or not any(wanted[1:]):
        return 0
    return 2 * torch.get_num_threads() * nbytes(weight)


def _batch_norm(call: Call) -> int:
    """Sums and their squares of each channel; by channels, each thread has sums of its own."""
    if not call.args[5]:
        return 0
    x, threads = call.args[0], torch.get_num_threads()
    channels = int(x.shape[1])
    by_channels = math.prod(map(int, x.shape[2:])) == 1 or layout(x) is torch.channels_last
    shared = by_channels and elements(x) // max(1, channels) > threads
    return (2 + threads * shared) * channels * WIDE_BYTES


def _batch_norm_backward(call: Call) -> int:
    """A first gradient is thrown away where both tensors have the same layout."""
    grad, x, wanted = call.args[0], call.args[1], call.args[9]
    formats = (torch.contiguous_format, torch.channels_last)[: 1 + (x.dim() == 4)]
    alike = any(all(t.is_contiguous(memory_format=f) for t in (grad, x)) for f in formats)
    return nbytes(x) if alike and wanted[0] else 0


def _group_norm(call: Call) -> int:
    by_channels = layout(call.args[0]) is torch.channels_last
    return 2 * WIDE_BYTES * _channels(call.args[0]) * by_channels


def _channels(x: torch.Tensor) -> int:
    return math.prod(map(int, x.shape[:2]))


def _upsample(points: int) -> Callable[[Call], int]:
    """A small picture is copied to channels-last and back; others need indices and weights.

    One thread alone does with three channels as with a small picture. See
    ``_use_vectorized_kernel_cond_2d`` in ``aten/src/ATen/native/cpu/UpSampleKernel.cpp``.
    """

    def rule(call: Call) -> int:
        x, out = call.args[0], call.outputs[0]
        spatial = out.shape[2:]
        alone = points == _LINEAR and x.shape[1] == _COLORS and torch.get_num_threads() == 1
        small = alone or sum(spatial) <= _SMALL_PICTURE
        if points < _CUBIC and x.dim() == 4:
            by_channels = x.is_contiguous(memory_format=torch.channels_last)
            if by_channels and (small or x.shape[1] > _COLORS):
                return 0
            if small:
                return nbytes(x) + nbytes(out)
        return int(sum(spatial)) * points * (8 + int(x.element_size()))

    return rule


_SMALL_PICTURE: Final = 128
_COLORS: Final = 3
_LINEAR: Final = 2
_CUBIC: Final = 4


def _flash_attention(call: Call) -> int:
    """A block of scores, its sums and its results for each thread; and once more in 16 bits."""
    query, key = call.args[0], call.args[1]
    rows, columns = _blocks(query, key)
    floats = rows * columns + 2 * rows + rows * int(query.shape[-1])
    halves = 0 if query.element_size() >= WIDE_BYTES else 2 * rows * columns
    wide = max(WIDE_BYTES, int(query.element_size()))
    return torch.get_num_threads() * (floats * wide + halves)


def _flash_attention_backward(call: Call) -> int:
    grad, query, key = call.args[:3]
    rows, columns = _blocks(query, key)
    wide = max(WIDE_BYTES, int(query.element_size()))
    scores = 2 * rows * columns * wide
    halves = 0 if query.element_size() >= WIDE_BYTES else 2 * 2 * rows * columns
    # The kernel reads the rows of all heads one after the other.
    copied = 0 if grad.transpose(1, 2).is_contiguous() else nbytes(grad)
    return copied + torch.get_num_threads() * (scores + halves) + rows * wide


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """The rows and columns of a block; see ``FlashAttentionKernel.cpp``."""
    length = int(query.shape[2])
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length), min(512, int(key.shape[2]))


def _sort(call: Call) -> int:
    x = call.args[0]
    dim = next((a for a in call.args[1:] if type(a) is int), call.kwargs.get("dim", -1))
    return 8 * int(x.shape[dim]) if x.dim() else 0


def _fft_to_real(call: Call) -> int:
    """All but the last dimension are transformed first, into a tensor of its own."""
    return 2 * nbytes(call.args[0]) if len(call.args[1]) > 1 else copied_for_fft(call)


def _im2col(call: Call) -> int:
    """The result grows out of one that is as large as the input."""
    grown = nbytes(call.args[0]) if nbytes(call.args[0]) < call.out_bytes else 0
    return grown + copied_unless_contiguous(0)(call)


def _triangle(call: Call) -> int:
    """Matrices may have any steps; batches of them may not.

    See ``checkTrilTriuBatchContiguous`` in ``aten/src/ATen/native/LinearAlgebraUtils.h``.
    """
    x = call.args[0]
    if x.is_contiguous():
        return 0
    step = int(x.shape[-1] * x.shape[-2])
    for dim in range(x.dim() - 3, -1, -1):
        if x.stride(dim) != step:
            return nbytes(x)
        step *= int(x.shape[dim])
    return 0


def _transposed(source: int) -> Callable[[Call], int]:
    """A whole matrix is transposed in blocks: ``copy_transpose_valid`` in ``Copy.cpp``."""

    def rule(call: Call) -> int:
        x, made = call.args[source], call.outputs[0]
        fits = made.is_contiguous() and x.dtype == made.dtype
        return _bytes_of_blocks(x) if fits else 0

    return rule


def _bytes_of_blocks(x: torch.Tensor) -> int:
    large = x.dim() == _MATRIX and elements(x) >= _BLOCK_TRANSPOSED
    if not large or x.stride(0) != 1 or x.stride(1) != x.shape[0]:
        return 0
    return _BLOCK_TRANSPOSED * int(x.element_size())


def _copied_in_blocks(*places: int) -> Callable[[Call], int]:
    """The result is there already when a whole matrix is copied that is laid out by columns."""

    def rule(call: Call) -> int:
        copied = [call.args[i] for i in places if not call.args[i].is_contiguous()]
        return _bytes_of_blocks(copied[-1]) if copied else 0

    return rule


def _softmax_backward(call: Call) -> int:
    return copied_unless_contiguous(0, 1)(call) + _copied_in_blocks(0, 1)(call)


_MATRIX: Final = 2
_BLOCK_TRANSPOSED: Final = 60 * 60


def _median(call: Call) -> int:
    """All are put in order in a copy; a dimension is read as it is where it has no gaps."""
    x = call.args[0]
    dim = call.argument("dim")
    if dim is None:
        return nbytes(x)
    if x.dim() == 0 or x.stride(dim) <= 1:
        return 0
    return nbytes(x) + _bytes_of_blocks(x.transpose(dim, -1))


def _counted(call: Call) -> int:
    """Along dimensions marks of what is not zero are cast to whole numbers."""
    return 0 if call.argument("dim") in (None, []) else 9 * elements(call.args[0])


def _wide_indices(place: int) -> Callable[[Call], int]:
    """Indices of 32 bits are copied into 64."""

    def rule(call: Call) -> int:
        given = fake_tensors.tensors_in(call.args[place])
        return sum(8 * elements(t) for t in given if t.dtype == torch.int32)

    return rule


def _bags_backward(call: Call) -> int:
    """Indices are sorted, and the rows of bags looked up, for the sum and the mean."""
    indices, bag_of = call.args[1], call.args[3]
    unknown_bags = 0 if bag_of.numel() else elements(indices) + 1
    return 8 * (3 * elements(indices) + unknown_bags) + copied_unless_contiguous(0)(call)


def _with_logits(call: Call) -> int:
    """One more tensor as large as the loss of each element, which a reduction keeps until then."""
    size = broadcast_elements(call) * int(call.outputs[0].element_size())
    return size if call.outputs[0].dim() else 2 * size


def _elements_once(call: Call) -> int:
    if call.outputs[0].dim():
        return 0
    return elements(call.args[0]) * int(call.outputs[0].element_size())


RULES: Final[Rules] = {
    **of(
        "_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward grid_sampler_2d_backward "
        "replication_pad1d_backward reflection_pad3d_backward replication_pad2d_backward "
        "replication_pad3d_backward upsample_bilinear2d_backward upsample_nearest2d_backward",
        copied_unless_contiguous(0),
    ),
    **of("tril triu", _triangle),
    **of("pixel_shuffle pixel_unshuffle", copied_in_the_layout_of(0)),
    **of("median nanmedian", _median),
    **of("baddbmm bmm", _copied_of_a_batch),
    **of("huber_loss mse_loss smooth_l1_loss", _elements_once),
    **of("gather scatter scatter_add", _wide_indices(2)),
    **of("index index_put index_put_", _wide_indices(1)),
    **of("_fft_c2c _fft_r2c", copied_for_fft),
    **of("upsample_nearest1d upsample_nearest2d upsample_nearest3d", _upsample(1)),
    **of(
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d",
        _upsample(1),
    ),
    **of("upsample_bilinear2d upsample_linear1d upsample_trilinear3d", _upsample(2)),
    "aten::clone": _transposed(0),
    "aten::copy_": _transposed(1),
    "aten::count_nonzero": _counted,
    "aten::kthvalue": lambda call: nbytes(call.args[0]) + 8 * elements(call.args[0]),
    "aten::masked_scatter": copied_unless_contiguous(2),
    **of("_log_softmax _softmax", _copied_in_blocks(0)),
    "aten::_log_softmax_backward_data": _copied_in_blocks(0, 1),
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::avg_pool2d_backward": _copied_to_the_layout_of(0),
    "aten::max_pool2d_with_indices_backward": _copied_to_the_layout_of(0, 7),
    "aten::_embedding_bag_backward": _bags_backward,
    "aten::_fft_c2r": _fft_to_real,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    "aten::binary_cross_entropy_with_logits": _with_logits,
    "aten::gelu_backward": _gelu_backward,
    "aten::im2col": _im2col,
    "aten::logsumexp": lambda call: nbytes(call.args[0]) + call.out_bytes,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": lambda call: 2 * WIDE_BYTES * _channels(call.args[1]),
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::sort": _sort,
    "aten::upsample_bicubic2d": _upsample(4),
}
