"""The memory of kernels from oneDNN and LAPACK: what they keep, and bounds of what they take.

oneDNN works on layouts of its own, which it chooses by processor and shape, so how much a
convolution copies is known only as a bound.
``tests/record/fake/kernels/test_scratch_is_measured.py`` holds the bounds over random shapes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import (
    HALVES,
    WIDE_BYTES,
    Arguments,
    Bounds,
    Call,
    Rule,
    Rules,
    found_in,
    gathered_by_mask,
    layout,
    nbytes,
    of,
    powers_of_matrix,
    products_of_three,
)
from pytest_torchmem.record.torch_api import dispatcher

_BLOCK: Final = 16  # channels of a block
_PAGE_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_SMALL_BYTES: Final = 1 << 16
_BOOKED_BYTES: Final = 1 << 30


def _convolution(call: Call) -> Bounds:
    x, weight = call.args[:2]
    if (taken := _bounds_of_unfolding(call.args, call.outputs[0])) is not None:
        return _with_layouts(taken, x, weight, call.outputs[0])
    products = _in_products(call.args, call.outputs[0])
    return _in_blocks(call, products, weight, x, call.outputs[0])


def _convolution_backward(call: Call) -> Bounds:
    grad, x, weight = call.args[:3]
    if (taken := _bounds_of_unfolding_backward(call.args)) is not None:
        return _with_layouts(taken, grad, x, weight)
    # The buffers for gradients of the weight are booked with four times their bytes.
    products = _in_products((x, weight, None, *call.args[4:10]), grad, 4 * nbytes(weight))
    return _in_blocks(call, products, weight, x, grad)


def _with_layouts(bounds: Bounds, *tensors: torch.Tensor) -> Bounds:
    """Kernels put the channels of all last where those of one are."""
    copied = sum(map(nbytes, tensors)) if any(map(_ends_in_channels, tensors)) else 0
    return bounds[0], bounds[1] + copied


def _ends_in_channels(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.stride(1) == 1 and tensor.stride(3) >= tensor.shape[1]


def _in_blocks(call: Call, products: int, weight: torch.Tensor, *images: torch.Tensor) -> Bounds:
    """Input, weight and result in blocks of channels; 16 bits are computed in 32."""
    blocked = _blocked(call, weight, *images)
    # Each thread works on a weight, or on the gradient of one, by itself.
    threads = torch.get_num_threads()
    widened = max(1, WIDE_BYTES // weight.element_size())
    parts = (2 * sum(blocked) + threads * blocked[0]) * widened
    return 0, parts + products + threads * _SMALL_BYTES


def _in_products(args: Arguments, output: torch.Tensor, weight_bytes: int = 0) -> int:
    """The most that the threads take where oneDNN multiplies matrices, else 0.

    It does so where a kernel's points have gaps between them, or where the channels of a group do
    not fill blocks: each thread unfolds one group of one image. ``init_conf`` in oneDNN's
    ``src/cpu/gemm_convolution_utils.cpp``, which leaves threads out rather than book 1 GiB.
    """
    x, weight, dilation, groups = args[0], args[1], args[5], int(args[8])
    channels = int(x.shape[1]) // groups, int(output.shape[1]) // groups
    in_gaps = groups > 1 and any(count % _BLOCK for count in channels)
    if not in_gaps and set(dilation) == {1}:
        return 0
    columns = _all_columns(args, output) // max(1, int(x.shape[0]))
    widened = max(1, WIDE_BYTES // int(weight.element_size()))
    return min(torch.get_num_threads() * (columns + weight_bytes) * widened, _BOOKED_BYTES)


def _blocked(call: Call, weight: torch.Tensor, *images: torch.Tensor) -> tuple[int, ...]:
    """The bytes of a weight and of images whose channels are filled up to whole blocks.

    The instructions for 16 bits fill the channels of each group up, and so do the kernels for
    images with their channels last, and transposed ones, for the weight alone.
    """
    groups = int(call.argument("groups"))
    alone = groups if weight.dtype in HALVES else 1
    fills = call.argument("transposed") or torch.channels_last in map(layout, images)
    by_group = groups if fills else alone
    first = _filled(weight.shape[0], by_group), _filled(weight.shape[1]), *weight.shape[2:]
    rest = [(image.shape[0], _filled(image.shape[1], alone), *image.shape[2:]) for image in images]
    return tuple(math.prod(map(int, sizes)) * weight.element_size() for sizes in (first, *rest))


def _filled(channels: int, groups: int = 1) -> int:
    return -(-int(channels) // (groups * _BLOCK)) * _BLOCK * groups


def _product(call: Call) -> Bounds:
    """Products of 16 bits are oneDNN's where the processor has instructions for them."""
    if call.outputs[0].dtype not in HALVES:
        return 0, 0
    return 0, 3 * sum(map(nbytes, (*call.inputs, *call.outputs))) // 2 + _SMALL_BYTES // 4


def _exponential(call: Call) -> Bounds:
    least, most = powers_of_matrix(call)
    x = call.args[0]
    return least, most + _product(replace(call, args=(x, x)))[1]


def _reflected(call: Call) -> Bounds:
    """A block of columns, and the pivots."""
    columns = int(call.args[0].shape[-1])
    return 0, (_LINE_BYTES * columns + 1) * int(call.args[0].element_size())


def _several(factor: int) -> Rule:
    """Copies for a library, as large as what goes in and comes out, some times over."""

    def rule(call: Call) -> Bounds:
        return 0, factor * sum(map(nbytes, (*call.inputs, *call.outputs))) + _SMALL_BYTES

    return rule


# Recurrent layers.


def lstm_workspace_bytes(args: Arguments) -> int:
    """Return what one layer of an LSTM keeps for its backward.

    Gates and hidden states of each step, both states before and after each step with their
    gradients: ``set_workspace_sizes`` in oneDNN's ``src/cpu/rnn/rnn_utils.hpp``.
    """
    x, hidden = args[0], int(args[10])
    steps, batch, width = (int(size) for size in x.shape)
    item = int(x.element_size())
    rows, states = steps * batch, 2 * (steps + 1) * batch
    widest = max(width, hidden)
    parts = (
        rows * _row(4 * hidden, item) * item,
        rows * _row(hidden, item) * item,
        states * _row(widest, item) * item,
        states * _row(widest, item) * item,
        states * _row(widest, WIDE_BYTES) * WIDE_BYTES,
        states * hidden * WIDE_BYTES,
        states * hidden * WIDE_BYTES,
    )
    return sum(-(-part // _PAGE_BYTES) * _PAGE_BYTES for part in parts)


def _row(elements: int, item: int) -> int:
    """Rows fill whole lines of the cache, but not a multiple of 256 elements."""
    line = _LINE_BYTES // item
    filled = -(-elements // line) * line
    return filled + line if filled % 256 == 0 else filled


def _lstm(call: Call) -> Bounds:
    """Copies of the weights, and the gates of each step."""
    weights = sum(map(nbytes, call.args[1:3]))
    at_least = weights + _gates(call.args[0], int(call.args[10]))
    return at_least, 2 * at_least + lstm_workspace_bytes(call.args) + _SMALL_BYTES


def _lstm_backward(call: Call) -> Bounds:
    weights = sum(map(nbytes, call.args[1:3]))
    at_least = weights + _gates(call.args[0], int(call.args[2].shape[1]))
    widened = 2 * max(1, WIDE_BYTES // int(call.args[0].element_size())) * at_least
    return at_least, widened + nbytes(call.args[-1]) + weights // 4 + _SMALL_BYTES


def _gates(x: torch.Tensor, hidden: int) -> int:
    steps, batch, item = int(x.shape[0]), int(x.shape[1]), int(x.element_size())
    return steps * batch * _row(4 * hidden, item) * item


# Convolutions on the CPU that oneDNN does not take: products of matrices, from unfolded inputs.
#
# Read from ``NaiveConvolutionTranspose2d.cpp``, ``NaiveDilatedConvolution.cpp``,
# ``ConvolutionMM2d`` and ``3d.cpp`` in ``aten/src/ATen/native``, and measured. Such are those of 64
# bits, and of 32 bits most of a single small image.

_FLAT: Final = "Slow2d"
_SOLID: Final = "Slow3d"
_TRANSPOSED: Final = ("SlowTranspose2d", "SlowTranspose3d")
_OTHERS: Final = ("SlowDilated2d", "SlowDilated3d", *_TRANSPOSED)


def _bounds_of_unfolding(args: Arguments, output: torch.Tensor) -> Bounds | None:
    """Return what a convolution takes beside its result; None where a library computes it."""
    kind = _kind(args)
    if kind is None:
        return None
    x, groups = args[0], args[8]
    columns = _columns(args, output, kind, all_images=kind in (_FLAT, _SOLID, "SlowTranspose2d"))
    if kind == _SOLID:
        return _with_copies(columns * groups, x)
    larger = 0
    if kind == "SlowTranspose3d":
        # Its result begins as large as what it is made of, and is made anew where it is larger.
        larger = max(0, nbytes(x) - nbytes(output))
        if args[2] is not None:
            # Ones, which a product adds the bias with.
            columns += nbytes(output) // math.prod(map(int, output.shape[:2]))
        if nbytes(x) < nbytes(output):
            columns = max(columns, nbytes(x) // groups)
    if groups == 1:
        least, most = _with_copies(columns, x)
        return least, most + larger
    # Each group has a result of its own; at the end they are put together.
    return _with_copies(larger + max(nbytes(output), columns + _of_a_group(x, groups)), x)


def _bounds_of_unfolding_backward(args: Arguments) -> Bounds | None:
    """Return what its backward takes beside the gradients; None where a library computes it."""
    grad, groups, (of_input, of_weight, _) = args[0], args[9], args[10]
    forwards = (*args[1:3], None, *args[4:10])
    kind = _kind(forwards)
    if kind is None:
        return None
    x, weight = args[1:3]
    columns = _columns(forwards, grad, kind, all_images=kind in (_FLAT, _SOLID))
    if kind == _SOLID:
        # The gradient of the input is unfolded in any case.
        columns = _all_columns(forwards, grad) if of_input else columns
        return _with_copies(columns * groups, x, grad)
    if kind in _TRANSPOSED and _looks_alike(forwards):
        columns = 0
    if kind == _FLAT and not of_weight:
        columns = 0
    if groups == 1:
        return _with_copies(columns, x, grad)
    made = of_input * nbytes(x) + of_weight * nbytes(weight)
    parts = _of_a_group(x, groups) + _of_a_group(grad, groups)
    return _with_copies(max(made, columns + parts), x, grad)


def _kind(args: Arguments) -> str | None:
    kind = dispatcher.convolution_kind(args)
    return kind if kind in (_FLAT, _SOLID, *_OTHERS) else None


def _columns(args: Arguments, output: torch.Tensor, kind: str, *, all_images: bool) -> int:
    """The bytes of the columns of a group: of all images, or of the one that is under way."""
    joins_groups = kind == _SOLID and args[8] > 1
    if kind in (_FLAT, _SOLID) and _looks_alike(args) and not joins_groups:
        return 0
    columns = _all_columns(args, output)
    return columns if all_images else columns // max(1, int(args[0].shape[0]))


def _all_columns(args: Arguments, output: torch.Tensor) -> int:
    x, weight, transposed = args[0], args[1], args[6]
    kernel, places = math.prod(map(int, weight.shape[2:])), x if transposed else output
    count = int(x.shape[0]) * int(weight.shape[1]) * kernel * math.prod(map(int, places.shape[2:]))
    return count * int(x.element_size())


def _looks_alike(args: Arguments) -> bool:
    """A kernel of one point reads the input as it is."""
    points = {*map(int, args[1].shape[2:]), *args[3], *args[5]}
    return points == {1} and not any(args[4])


def _with_copies(taken: int, x: torch.Tensor, *others: torch.Tensor) -> Bounds:
    """Add copies of what is not contiguous; some kernels copy it by parts, too."""
    copied = sum(nbytes(tensor) for tensor in (x, *others) if not tensor.is_contiguous())
    if not copied:
        return taken, taken
    return (0, taken + 3 * copied) if not x.is_contiguous() else (taken, taken + 2 * copied)


def _of_a_group(tensor: torch.Tensor, groups: int) -> int:
    """A part of the channels of several images has gaps, and is copied."""
    return nbytes(tensor) // groups if int(tensor.shape[0]) > 1 else 0


RULES: Final[Rules] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
    **of("mm addmm bmm baddbmm", _product),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _product,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _product,
    **of("_ctc_loss_backward _embedding_bag", _several(1)),
    **of("lu_unpack", _several(2)),
    **of("_linalg_det _linalg_slogdet _linalg_solve_ex linalg_inv_ex", _several(3)),
    **of("linalg_cholesky_ex linalg_solve_triangular", _several(3)),
    **of("cholesky_inverse cholesky_solve", _several(3)),
    **of("_linalg_eigh _linalg_svd linalg_lu linalg_qr", _several(4)),
    **of("linalg_lstsq", _several(6)),
    **of("linalg_eig linalg_pinv", _several(8)),
    "aten::_trilinear": products_of_three,
    "aten::isin": partial(found_in, sorting_bytes=18),
    "aten::linalg_householder_product": _reflected,
    "aten::linalg_matrix_exp": _exponential,
    "aten::masked_scatter_backward": gathered_by_mask,
}
