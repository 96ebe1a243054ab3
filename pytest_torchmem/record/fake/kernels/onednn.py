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

from pytest_torchmem.record.fake.kernels import columns
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

_BLOCK: Final = 16  # channels of a block
_PAGE_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_SMALL_BYTES: Final = 1 << 16


def _convolution(call: Call) -> Bounds:
    if (taken := columns.bounds_of_unfolding(call.args, call.outputs[0])) is not None:
        return taken
    return _in_blocks(call, call.args[1], call.args[0], call.outputs[0])


def _convolution_backward(call: Call) -> Bounds:
    if (taken := columns.bounds_of_unfolding_backward(call.args)) is not None:
        return taken
    return _in_blocks(call, call.args[2], call.args[1], call.args[0])


def _in_blocks(call: Call, weight: torch.Tensor, *images: torch.Tensor) -> Bounds:
    """Input, weight and result in blocks of channels; 16 bits are computed in 32."""
    blocked = _blocked(call, weight, *images)
    # Each thread works on a weight, or on the gradient of one, by itself.
    threads = torch.get_num_threads() * blocked[0]
    widened = max(1, WIDE_BYTES // weight.element_size())
    return 0, (2 * sum(blocked) + threads) * widened + _SMALL_BYTES


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
