"""The memory of kernels from oneDNN and LAPACK: what they keep, and bounds of what they take.

oneDNN works on layouts of its own, which it chooses by processor and shape, so how much a
convolution copies is known only as a bound.
``tests/record/fake/kernels/test_scratch_is_measured.py`` holds the bounds over random shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels import columns
from pytest_torchmem.record.fake.kernels.operator_call import (
    HALVES,
    WIDE_BYTES,
    Arguments,
    Bounds,
    found_in,
    gathered_by_mask,
    layout,
    nbytes,
    powers_of_matrix,
    products_of_three,
)
from pytest_torchmem.record.torch_api import fake_tensors

_BLOCK: Final = 16  # channels of a block
_PAGE_BYTES: Final = 4096
_LINE_BYTES: Final = 64
_SMALL_BYTES: Final = 1 << 16


def cpu_bounds(name: str, args: Arguments, outputs: Sequence[torch.Tensor]) -> Bounds | None:
    """Return what an operator takes for itself at least and at most; None where it is known."""
    rule = _RULES.get(name)
    return rule(args, outputs) if rule is not None else None


def _convolution(args: Arguments, outputs: Sequence[torch.Tensor]) -> Bounds:
    if (taken := columns.bounds_of_unfolding(args, outputs[0])) is not None:
        return taken
    return _in_blocks(args[8], args[1], args[0], outputs[0])


def _convolution_backward(args: Arguments, _: Sequence[torch.Tensor]) -> Bounds:
    if (taken := columns.bounds_of_unfolding_backward(args)) is not None:
        return taken
    return _in_blocks(args[9], args[2], args[1], args[0])


def _in_blocks(groups: int, weight: torch.Tensor, *images: torch.Tensor) -> Bounds:
    """Input, weight and result in blocks of channels; 16 bits are computed in 32."""
    blocked = _blocked(groups, weight, *images)
    # Each thread works on a weight, or on the gradient of one, by itself.
    threads = torch.get_num_threads() * blocked[0]
    widened = max(1, WIDE_BYTES // weight.element_size())
    return 0, (2 * sum(blocked) + threads) * widened + _SMALL_BYTES


def _blocked(groups: int, weight: torch.Tensor, *images: torch.Tensor) -> tuple[int, ...]:
    """The bytes of a weight and of images whose channels are filled up to whole blocks.

    The instructions for 16 bits fill the channels of each group up, and so do the kernels for
    images with their channels last, for the weight alone.
    """
    alone = groups if weight.dtype in HALVES else 1
    by_group = groups if torch.channels_last in map(layout, images) else alone
    first = _filled(weight.shape[0], by_group), _filled(weight.shape[1]), *weight.shape[2:]
    rest = [(image.shape[0], _filled(image.shape[1], alone), *image.shape[2:]) for image in images]
    return tuple(math.prod(map(int, sizes)) * weight.element_size() for sizes in (first, *rest))


def _filled(channels: int, groups: int = 1) -> int:
    return -(-int(channels) // (groups * _BLOCK)) * _BLOCK * groups


def _product(args: Arguments, outputs: Sequence[torch.Tensor]) -> Bounds | None:
    """Products of 16 bits are oneDNN's where the processor has instructions for them."""
    tensors = [*fake_tensors.tensors_in(list(args)), *outputs]
    if outputs[0].dtype not in HALVES:
        return None
    return 0, 3 * sum(map(nbytes, tensors)) // 2 + _SMALL_BYTES // 4


def _exponential(args: Arguments, outputs: Sequence[torch.Tensor]) -> Bounds:
    least, most = powers_of_matrix(args[0])
    of_products = _product((args[0], args[0]), outputs)
    return least, most + (of_products[1] if of_products is not None else 0)


def _reflected(args: Arguments, _: Sequence[torch.Tensor]) -> Bounds:
    """A block of columns, and the pivots."""
    columns = int(args[0].shape[-1])
    return 0, (_LINE_BYTES * columns + 1) * int(args[0].element_size())


def _several(factor: int) -> Callable[[Arguments, Sequence[torch.Tensor]], Bounds]:
    """Copies for a library, as large as what goes in and comes out, some times over."""

    def rule(args: Arguments, outputs: Sequence[torch.Tensor]) -> Bounds:
        tensors = [*fake_tensors.tensors_in(list(args)), *outputs]
        return 0, factor * sum(map(nbytes, tensors)) + _SMALL_BYTES

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


def _lstm(args: Arguments, _: Sequence[torch.Tensor]) -> Bounds:
    """Copies of the weights, and the gates of each step."""
    weights = sum(map(nbytes, args[1:3]))
    at_least = weights + _gates(args[0], int(args[10]))
    return at_least, 2 * at_least + lstm_workspace_bytes(args) + _SMALL_BYTES


def _lstm_backward(args: Arguments, _: Sequence[torch.Tensor]) -> Bounds:
    weights = sum(map(nbytes, args[1:3]))
    at_least = weights + _gates(args[0], int(args[2].shape[1]))
    widened = 2 * max(1, WIDE_BYTES // int(args[0].element_size())) * at_least
    return at_least, widened + nbytes(args[-1]) + weights // 4 + _SMALL_BYTES


def _gates(x: torch.Tensor, hidden: int) -> int:
    steps, batch, item = int(x.shape[0]), int(x.shape[1]), int(x.element_size())
    return steps * batch * _row(4 * hidden, item) * item


_RULES: Final[dict[str, Callable[[Arguments, Sequence[torch.Tensor]], Bounds | None]]] = {
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "aten::mkldnn_rnn_layer": _lstm,
    "aten::mkldnn_rnn_layer_backward": _lstm_backward,
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::bmm": _product,
    "aten::baddbmm": _product,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _product,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _product,
    "aten::_ctc_loss_backward": _several(1),
    "aten::_embedding_bag": _several(1),
    "aten::_linalg_det": _several(3),
    "aten::_linalg_eigh": _several(4),
    "aten::_linalg_slogdet": _several(3),
    "aten::_linalg_solve_ex": _several(3),
    "aten::_linalg_svd": _several(4),
    "aten::_trilinear": lambda args, _: products_of_three(args),
    "aten::cholesky_inverse": _several(3),
    "aten::cholesky_solve": _several(3),
    "aten::linalg_cholesky_ex": _several(3),
    "aten::linalg_eig": _several(8),
    "aten::isin": lambda args, _: found_in(args, sorting_bytes=18),
    "aten::linalg_householder_product": _reflected,
    "aten::linalg_inv_ex": _several(3),
    "aten::linalg_lstsq": _several(6),
    "aten::linalg_lu": _several(4),
    "aten::linalg_matrix_exp": _exponential,
    "aten::linalg_pinv": _several(8),
    "aten::linalg_qr": _several(4),
    "aten::masked_scatter_backward": lambda args, _: gathered_by_mask(args),
    "aten::linalg_solve_triangular": _several(3),
    "aten::lu_unpack": _several(2),
}
