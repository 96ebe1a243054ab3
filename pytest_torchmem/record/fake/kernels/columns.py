"""Convolutions on the CPU that oneDNN does not take: products of matrices, from unfolded inputs.

Read from ``NaiveConvolutionTranspose2d.cpp``, ``NaiveDilatedConvolution.cpp``, ``ConvolutionMM2d``
and ``3d.cpp`` in ``aten/src/ATen/native``, and measured. Such are those of 64 bits, and of 32 bits
most of a single small image.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import Arguments, Bounds, nbytes
from pytest_torchmem.record.torch_api import dispatcher

_FLAT: Final = "Slow2d"
_SOLID: Final = "Slow3d"
_TRANSPOSED: Final = ("SlowTranspose2d", "SlowTranspose3d")
_OTHERS: Final = ("SlowDilated2d", "SlowDilated3d", *_TRANSPOSED)


def bounds_of_unfolding(args: Arguments, output: torch.Tensor) -> Bounds | None:
    """Return what a convolution takes beside its result; None where a library computes it."""
    kind = _kind(args)
    if kind is None:
        return None
    x, groups = args[0], args[8]
    columns = _columns(args, output, kind, all_images=kind in (_FLAT, _SOLID, "SlowTranspose2d"))
    if kind == _SOLID:
        return _with_copies(columns * groups, x)
    if groups == 1:
        # Over a kernel of one point with steps between them, the input may be laid out anew.
        anew = nbytes(x) if kind in _TRANSPOSED and set(args[1].shape[2:]) == {1} else 0
        least, most = _with_copies(columns, x)
        return (0, most + anew) if anew else (least, most)
    # Each group has a result of its own; at the end they are put together.
    least, most = _with_copies(max(nbytes(output), columns + _of_a_group(x, groups)), x)
    # Of some images there are two columns at once.
    return least, most + columns * (kind == "SlowTranspose3d")


def bounds_of_unfolding_backward(args: Arguments) -> Bounds | None:
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
