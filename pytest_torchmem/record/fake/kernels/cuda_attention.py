"""Memory that attention takes on CUDA: parts that are put together at the end, and sums of rows.

See ``flash_api.cpp`` of flash attention, and ``attention_backward.cu`` and ``kernel_backward.h`` of
memory-efficient attention, in ``aten/src/ATen/native/transformers/cuda``.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import WIDE_BYTES, Call, elements, nbytes

_COUNTERS_BYTES: Final = 16
_NARROW: Final = 64
_WIDE: Final = 128
_MIDDLE: Final = 96
_MANY_THREADS: Final = 2048


def efficient_forward(call: Call) -> int:
    """Halves are added up in 32 bits where a head is wide."""
    query = call.args[0]
    wide = int(query.shape[-1]) > _WIDE and query.element_size() < WIDE_BYTES
    return elements(query) * WIDE_BYTES * wide


def efficient_backward(call: Call) -> int:
    """The product of gradient and result with its sum for each row; then the sums and blocks."""
    grad, query, key = call.args[0], call.args[1], call.args[2]
    batch, heads, length, width = map(int, query.shape)
    item = int(query.element_size())
    product = length * (width * item + WIDE_BYTES)
    rows, columns = _block_of_query(width, item, call.processors.threads)
    blocks = -(-length // rows) * -(-width // columns)
    sums = blocks * (_COUNTERS_BYTES + rows * columns * WIDE_BYTES)
    if item < WIDE_BYTES and (width > _WIDE or (rows, columns) == (_NARROW, _WIDE)):
        sums += 2 * _filled(key.shape[2], _NARROW) * _filled(width, _NARROW) * WIDE_BYTES
    copied = 0 if grad.transpose(1, 2).is_contiguous() else nbytes(grad)
    return copied + batch * heads * (length * WIDE_BYTES + max(product, sums))


def _block_of_query(width: int, item: int, threads: int) -> tuple[int, int]:
    """Rows and columns of the query's gradient that are added up at a time.

    GPUs for games and for inference, with fewer threads, have less memory beside them.
    """
    few_threads = threads < _MANY_THREADS
    if width <= _NARROW or (few_threads and item == WIDE_BYTES):
        return _NARROW, _NARROW
    if few_threads and width <= _WIDE:
        return (_WIDE, _NARROW) if width <= _MIDDLE else (_NARROW, _WIDE)
    return _WIDE, _NARROW if item == WIDE_BYTES else _WIDE


def _filled(length: int, block: int) -> int:
    return -(-int(length) // block) * block


def flash_forward(call: Call) -> int:
    """Few heads leave processors without work: then the keys are split, and joined at the end."""
    query, key = call.args[0], call.args[1]
    if call.argument("dropout_p", 0.0):
        return 0
    batch, heads, length, width = map(int, query.shape)
    block = 256 if width <= _NARROW else 128 if width <= _WIDE else 64
    work = batch * heads * -(-length // _NARROW)
    parts = _parts(work, 2 * call.processors.count, -(-int(key.shape[2]) // block))
    if parts == 1:
        return 0
    return parts * batch * heads * length * (_width_of_sums(width) + 1) * WIDE_BYTES


def _parts(work: int, processors: int, blocks: int) -> int:
    """Return the fewest parts that keep nearly as many processors at work as any number can."""
    if work >= 0.8 * processors:
        return 1
    busy: dict[int, float] = {}
    for parts in range(1, min(128, processors, blocks) + 1):
        if parts == 1 or -(-blocks // parts) != -(-blocks // (parts - 1)):
            waves = work * parts / processors
            busy[parts] = waves / math.ceil(waves)
    best = max(busy.values())
    return next(parts for parts, share in busy.items() if share >= 0.85 * best)


def _width_of_sums(width: int) -> int:
    return _filled(width, 32 if width <= _WIDE else _NARROW)


def flash_backward(call: Call) -> int:
    """The query's gradient in 32 bits and sums of rows; gradients of keys that heads share."""
    grad, query, key, _, out = call.args[:5]
    batch, heads, length, width = map(int, query.shape)
    rows = _filled(length, _WIDE)
    sums = batch * heads * rows * (_width_of_sums(width) + 1) * WIDE_BYTES
    shared = int(key.shape[1]) != heads
    item = int(query.element_size())
    each_head = 2 * batch * heads * int(key.shape[2]) * width * item * shared
    return sums + each_head + sum(map(_copied, (grad, out)))


def _copied(tensor: torch.Tensor) -> int:
    return 0 if tensor.transpose(1, 2).is_contiguous() else nbytes(tensor)
