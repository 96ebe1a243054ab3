"""Partial results of CUDA's reductions: what ``sum``, ``norm`` or ``max`` take for themselves.

A reduction with few results and much to read is split over blocks of threads. Their partial
results, and a counter for each group of blocks, are memory of its own, which can be larger than
the input: a matrix of 4096 rows summed up by columns takes 64 rows of 128 partial results for each
column. This follows ``setReduceConfig`` in ``aten/src/ATen/native/cuda/Reduce.cuh``, and the axes
that ``TensorIterator`` hands to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import Processors
from pytest_torchmem.record.torch_api import fake_tensors

_WARP: Final = 32
_COUNTER_BYTES: Final = 4
_FEWEST_VALUES: Final = 16
_MOST_VALUES: Final = 256
_WORTH_A_VECTOR: Final = 128
_LARGEST_OFFSET: Final = 2**31 - 1
_WIDEST: Final = 16  # complex numbers of 128 bits


@dataclass(frozen=True, slots=True)
class Reduction:
    """The sizes that a kernel reduces with.

    Attributes:
        partial_bytes: The size of one partial result: a sum in 32 bits, a mean with its variance.
        out_bytes: The size of an element of the result.
        unrolled: The values that a thread reads at a time.
    """

    partial_bytes: int
    out_bytes: int
    unrolled: int = 4


@dataclass(frozen=True, slots=True)
class Read:
    """The input of a reduction: a tensor, or its copy of another type. Steps are in elements."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]
    offset: int
    item_bytes: int

    @classmethod
    def of(cls, tensor: torch.Tensor, copied_to: torch.dtype | None = None) -> Read:
        """Return the tensor as it is, or what is computed of it element by element, in a type."""
        if copied_to is None:
            steps, offset = list(tensor.stride()), tensor.storage_offset()
        else:
            steps, offset = _dense(tensor), 0
        item_bytes = (copied_to or tensor.dtype).itemsize
        return cls(_whole(tensor.shape), _whole(steps), int(offset), item_bytes)


def _whole(numbers: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
    return tuple(map(fake_tensors.size_hint, numbers))


def _dense(tensor: torch.Tensor) -> list[int]:
    """Return the steps of a copy without gaps, in the order of the tensor's own steps."""
    steps, step = [0] * tensor.dim(), 1
    places = list(range(tensor.dim()))[::-1]
    # An expanded axis has no order.
    if all(tensor.stride()):
        places.sort(key=tensor.stride)
    for place in places:
        steps[place] = step
        step *= int(tensor.shape[place])
    return steps


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis of what is read: its length, and its steps in bytes in the input and the result."""

    size: int
    step: int
    out_step: int

    @property
    def reduced(self) -> bool:
        return self.out_step == 0


def partial_bytes(read: Read, dims: Iterable[int], kind: Reduction, processors: Processors) -> int:
    """Return what a reduction over some axes, by default all, takes for itself."""
    if not read.shape or not math.prod(read.shape):
        return 0
    all_dims = range(len(read.shape))
    axes = _axes(read, {all_dims[d] for d in dims} or set(all_dims), kind)
    return _of_parts(axes, read, kind, processors)


def _of_parts(axes: list[_Axis], read: Read, kind: Reduction, processors: Processors) -> int:
    """Reduce in halves what cannot be counted in 32 bits, one after the other."""
    if _counted_in_32_bits(axes):
        return _taken_bytes(axes, read, kind, processors)
    largest = max(axes, key=lambda a: (a.size - 1) * a.step)
    halved = [_Axis(-(-a.size // 2), a.step, a.out_step) if a is largest else a for a in axes]
    return _of_parts(halved, read, kind, processors)


def _counted_in_32_bits(axes: Sequence[_Axis]) -> bool:
    furthest = 1 + sum((a.size - 1) * max(a.step, a.out_step) for a in axes)
    return max(furthest, math.prod(a.size for a in axes)) <= _LARGEST_OFFSET


# Axes, the fastest first.


def _axes(read: Read, dims: set[int], kind: Reduction) -> list[_Axis]:
    """Return the axes as ``TensorIterator`` orders and joins them: the reduced ones come first."""
    axes: list[_Axis] = []
    out_step = kind.out_bytes
    for place in reversed(range(len(read.shape))):
        size, step = read.shape[place], read.steps[place] * read.item_bytes
        reduced = place in dims
        axes.append(_Axis(size, step, 0 if reduced else out_step))
        out_step *= 1 if reduced else size
    return _joined(_ordered(axes))


def _ordered(axes: list[_Axis]) -> list[_Axis]:
    """Sort by insertion, as torch does: some pairs have no order."""
    found = list(axes)
    for start in range(1, len(found)):
        place = start
        for other in reversed(range(start)):
            order = _order(found[other], found[place])
            if order > 0:
                found[other], found[place] = found[place], found[other]
                place = other
            elif order < 0:
                break
    return found


def _order(left: _Axis, right: _Axis) -> int:
    """Return 1 if the left axis belongs behind the right one, -1 if ahead of it, 0 if neither."""
    if left.reduced != right.reduced:
        return 1 if right.reduced else -1
    for mine, others in ((left.out_step, right.out_step), (left.step, right.step)):
        if not mine or not others:
            continue
        if mine != others:
            return 1 if mine > others else -1
        if left.size > right.size:
            return 1
    return 0


def _joined(axes: list[_Axis]) -> list[_Axis]:
    """Join neighbours that are one axis in memory, and drop those of one element."""
    found = axes[:1]
    for axis in axes[1:]:
        last = found[-1]
        follows = last.size * last.step == axis.step and last.size * last.out_step == axis.out_step
        if last.size == 1:
            found[-1] = axis
        elif axis.size == 1 or follows:
            found[-1] = _Axis(last.size * axis.size, last.step, last.out_step)
        else:
            found.append(axis)
    return found


# The split.


def _taken_bytes(axes: Sequence[_Axis], read: Read, kind: Reduction, processors: Processors) -> int:
    """Return the partial results and counters of a launch; 0 if no output is split over blocks."""
    outer = [a for a in axes if not a.reduced]
    inner = [a for a in axes if a.reduced]
    outputs, inputs = (math.prod(a.size for a in some) for some in (outer, inner))
    reduces_fastest = not outer or bool(inner and inner[0].step < outer[0].step)
    vector = 1
    wide, high = (inputs, outputs) if reduces_fastest else (outputs, inputs)
    fastest = (inner or outer)[0] if reduces_fastest else outer[0]
    if fastest.step == read.item_bytes:
        if not reduces_fastest:
            vector = _vector_of_outputs(axes, read)
            wide //= vector
        elif wide >= _WORTH_A_VECTOR and len(inner) == 1:
            wide //= kind.unrolled
    width, height = _block(wide, high, (256 if read.item_bytes == _WIDEST else 512) // vector)
    read_at_once, made_at_once = (width, 1) if reduces_fastest else (1, width)
    if -(-inputs // read_at_once) < min(height * _FEWEST_VALUES, _MOST_VALUES):
        return 0
    values = -(-inputs // (read_at_once * height))
    grid = -(-(outputs // vector) // made_at_once)
    wanted = processors.count * (processors.threads // (width * height))
    if values < _MOST_VALUES or grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-values // _FEWEST_VALUES)), -(-values // _MOST_VALUES))
    if blocks == 1:
        return 0
    of_a_block = 1 if reduces_fastest else width * vector
    return kind.partial_bytes * outputs * blocks * of_a_block + _COUNTER_BYTES * grid


def _block(wide: int, high: int, most: int) -> tuple[int, int]:
    """Return the width and the height of a block of threads."""
    wide, high = (min(power_below(n), most) for n in (wide, high))
    height = min(high, most // min(wide, _WARP))
    return min(wide, most // height), height


def _vector_of_outputs(axes: Sequence[_Axis], read: Read) -> int:
    """Return how many outputs a thread makes: 4 if all steps and the first address allow it."""
    output = next(a for a in axes if not a.reduced)
    steps = [a.step // read.item_bytes for a in axes if a is not output]
    return math.gcd(4, read.offset, output.size, *steps)


def power_below(number: int) -> int:
    """Return the largest power of two up to a number, and 1 for 0."""
    return 1 << max(0, number.bit_length() - 1)
