"""Memory of CUDA's kernels that sort: ``sort`` itself, and gradients of rows that are looked up.

CUB sorts in memory of its own, as large as keys and values, with counters that depend on GPU and
size: these are bounds. See ``Sort.cpp``, ``EmbeddingBackwardKernel.cu`` and ``Indexing.cu`` in
``aten/src/ATen/native/cuda``.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import (
    WIDE_BYTES,
    Bounds,
    Call,
    copied_unless_contiguous,
    elements,
    found_in,
    nbytes,
)

_INDEX_BYTES: Final = 8
_HALF_BYTES: Final = 2
_IN_ONE_BLOCK: Final = 4096
_MANY_ROWS: Final = 128
_FEW_INDICES: Final = 3072
_ROWS_OF_A_PART: Final = 10
_ROWS_OF_ONE_PASS: Final = 256
_FEW_ROWS: Final = 640
_LARGEST_OF_A_BAG: Final = 2


def _counters(count: int, item: int = _INDEX_BYTES) -> int:
    """Keys of 16 bits are counted by each of up to 148 processors before Hopper."""
    return count // 4 + 20_480 + (148 * 10_752 if item == _HALF_BYTES else 0)


def sorted_along(call: Call) -> Bounds:
    """A short row is sorted within a block of threads; others by copies of keys and places."""
    x = call.args[0]
    dim = next((a for a in call.args[1:] if type(a) is int), call.argument("dim", -1))
    length = int(x.shape[dim]) if x.dim() else 1
    if length <= _IN_ONE_BLOCK:
        return _INDEX_BYTES * length, _INDEX_BYTES * length
    count, item = elements(x), int(x.element_size())
    rows = count // length
    # Few rows are sorted as one, with the row as a second key.
    each = 2 * item + 24 if 1 < rows < _MANY_ROWS else item + 16
    if dim not in (-1, x.dim() - 1):
        each += 2 * item + _INDEX_BYTES
    least = count * (each if item > 1 else _INDEX_BYTES)
    return least, count * each + _counters(count, item)


def shuffled(call: Call) -> Bounds:
    count = elements(call.outputs[0])
    return 16 * count, 41 * count + _counters(0)


def found_in_sorted(call: Call) -> Bounds:
    """CUB sorts the ordered elements twice more, with and without their places."""
    least, most = found_in(call, sorting_bytes=41)
    return least, most + _counters(0) if most else 0


def middle(call: Call) -> Bounds:
    """The median of all: the elements in order."""
    x = call.args[0]
    if call.argument("dim") is not None:
        return 0, 0
    count, item = elements(x), int(x.element_size())
    return count * (item + 16), count * (2 * item + 26) + _counters(count, item)


def added_at(call: Call) -> Bounds:
    """Places are sorted, so that what meets at one place is added up in order."""
    if not call.argument("accumulate", False):
        return 0, 0
    x, given, values = call.args[:3]
    named = [d for d, t in enumerate(given) if t is not None and t.dtype != torch.bool]
    count = max((elements(given[d]) for d in named), default=0)
    rows = math.prod(int(x.shape[d]) for d in named)
    copied = 0 if values.is_contiguous() else nbytes(values)
    least = count * (48 if count > _IN_ONE_BLOCK and rows > _ROWS_OF_ONE_PASS else 32)
    return copied + least, copied + 48 * count + _counters(count)


def rows_backward(call: Call) -> Bounds:
    """The gradient of an embedding: few indices are added up at once."""
    indices, rows = call.args[1], int(call.args[2])
    if elements(indices) <= _FEW_INDICES and not call.argument("scale_grad_by_freq", False):
        return 0, 0
    return _parts_of_rows(indices, rows, int(call.args[0].shape[-1]))


def bags_backward(call: Call) -> Bounds:
    copied = copied_unless_contiguous(0)(call)
    if call.argument("mode") == _LARGEST_OF_A_BAG:
        return copied, copied
    least, most = _parts_of_rows(call.args[1], int(call.args[6]), int(call.args[0].shape[-1]))
    return copied + least, copied + most


def _parts_of_rows(indices: torch.Tensor, rows: int, width: int) -> Bounds:
    """Sorted indices are added up in parts of ten, and these for each row that there may be."""
    count, item = elements(indices), int(indices.element_size())
    segments = min(count, rows)
    parts = count // _ROWS_OF_A_PART + segments
    added = item * (3 * count + parts + 2 * segments) + parts * width * WIDE_BYTES
    in_order = 5 * item * count
    most = max(added, in_order + _counters(count))
    # Few rows may be added up in another way.
    return 4 * item * count if rows <= _FEW_ROWS else max(added, in_order - count), most


# The largest of many.

_THREADS: Final = 256
_BLOCKS_PER_PROCESSOR: Final = 6
# From how many elements of a row on several blocks share it, by the number of rows.
_SHARED_FROM: Final = (
    (20, 20_000),
    (40, 10_000),
    (80, 8_000),
    (199, 5_000),
    (799, 3_000),
    (4000, 800),
    (65_535, 400),
)


def largest_values(call: Call) -> int:
    """Rows that several blocks share have counts of digits: ``TensorTopK.cu``."""
    x = call.args[0]
    length = int(x.shape[call.argument("dim", -1)]) if x.dim() else 1
    rows = elements(x) // max(1, length)
    shared = next((least for most, least in _SHARED_FROM if rows <= most), None)
    if shared is None or length < shared:
        return 0
    threads = call.processors.count * _BLOCKS_PER_PROCESSOR * _THREADS
    of_a_thread = max(4, min(64, -(-rows * length // threads)))
    blocks = rows * -(-length // (of_a_thread * _THREADS))
    digits = _THREADS * WIDE_BYTES + 4 * WIDE_BYTES + int(x.element_size())
    return blocks * (2 * _THREADS + 2 * WIDE_BYTES) + rows * digits
