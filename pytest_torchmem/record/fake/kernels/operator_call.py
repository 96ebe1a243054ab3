"""A call of an operator, and copies that several kernels make of what they cannot read."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, TypeVar

import torch

from pytest_torchmem.record.torch_api import dispatcher, fake_tensors

WIDE_BYTES: Final = 4
HALVES: Final = (torch.float16, torch.bfloat16)

# A complex number has two parts of eight bytes.
_NUMBER_BYTES: Final = 16
_OF_NUMBERS: Final = ("Tensor", "number", "Optional[Tensor]", "Optional[number]")
# Kernels take these as they are.
_FACTORS: Final = ("alpha", "beta")

_Value = TypeVar("_Value")
Arguments = Sequence[Any]
# At least and at most.
Bounds = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that an operator holds beside its inputs and outputs while it runs.

    ``at_most_bytes`` is larger than ``bytes_`` where the kernel decides by what is not known here.
    """

    bytes_: int = 0
    at_most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Processors:
    """The multiprocessors of a GPU, and the threads that run on each at a time."""

    count: int
    threads: int


# As few and as many as GPUs have, from Ampere on: a GeForce RTX 3050 and a B200.
EXTREMES: Final = (Processors(16, 1536), Processors(148, 2048))


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator (``aten::mm``), what it returned, and the GPU that it may run on."""

    func: dispatcher.Operator
    name: str
    args: Arguments
    kwargs: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]
    processors: Processors = EXTREMES[0]

    def argument(self, name: str, default: object = None) -> Any:
        """Return what was given for an argument, by its name in the schema."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = [a.name for a in dispatcher.schema_of(self.func).arguments]
        place = names.index(name) if name in names else len(self.args)
        return self.args[place] if place < len(self.args) else default

    @property
    def inputs(self) -> list[torch.Tensor]:
        return fake_tensors.tensors_in(list(self.args))

    @property
    def numbers(self) -> list[Number]:
        """Python's numbers among the operands."""
        names = [(a.name, str(a.type)) for a in dispatcher.schema_of(self.func).arguments]
        given = dict(zip(names, self.args, strict=False))
        given |= {pair: self.kwargs[pair[0]] for pair in names if pair[0] in self.kwargs}
        return [
            value
            for (name, kind), value in given.items()
            if kind in _OF_NUMBERS and name not in _FACTORS and isinstance(value, Number)
        ]

    @property
    def numbers_bytes(self) -> int:
        """The most that the CPU takes for these.

        It makes a tensor of each, and another one of the type that it computes in.
        """
        return 2 * _NUMBER_BYTES * len(self.numbers)

    @property
    def out_bytes(self) -> int:
        return sum(map(nbytes, self.outputs))


def elements(tensor: torch.Tensor) -> int:
    return fake_tensors.size_hint(tensor.numel())


def nbytes(tensor: torch.Tensor) -> int:
    return elements(tensor) * int(tensor.element_size())


def broadcast_elements(call: Call) -> int:
    left, right = (list(map(int, t.shape)) for t in call.inputs[:2])
    dims = itertools.zip_longest(reversed(left), reversed(right), fillvalue=1)
    return math.prod(max(a, b) for a, b in dims)


def layout(tensor: torch.Tensor) -> torch.memory_format:
    by_channels = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if by_channels and not tensor.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def copied_unless_contiguous(*positions: int) -> Callable[[Call], int]:
    """The operator copies what is not contiguous, such as an expanded gradient."""

    def rule(call: Call) -> int:
        tensors = [call.args[i] for i in positions if i < len(call.args)]
        return sum(nbytes(t) for t in tensors if hasattr(t, "stride") and not t.is_contiguous())

    return rule


def copied_in_the_layout_of(place: int) -> Callable[[Call], int]:
    """The operator works in the layout of an argument, and copies its first one of another."""

    def rule(call: Call) -> int:
        fits = call.args[0].is_contiguous(memory_format=layout(call.args[place]))
        return 0 if fits else nbytes(call.args[0])

    return rule


def copied_matrices(operands: Sequence[torch.Tensor]) -> int:
    return sum(nbytes(m) for m in operands if not blas_takes(m))


def blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS can read a matrix in place, as rows or as columns.

    It cannot read an expanded one (the gradient of ``.sum()``), so torch copies that first:
    ``addmm_impl_cpu_`` in ``aten/src/ATen/native/LinearAlgebra.cpp``, ``prepare_matrix_for_cublas``
    in ``aten/src/ATen/native/cuda/Blas.cpp``. It conjugates what it transposes alone.
    """
    (rows, columns), (row_step, column_step) = matrix.shape[-2:], matrix.stride()[-2:]
    by_columns = row_step == 1 and column_step >= max(1, rows)
    by_rows = column_step == 1 and row_step >= max(1, columns)
    return bool(by_columns or (by_rows and not matrix.is_conj()))


def products_of_three(call: Call) -> Bounds:
    """Return what ``_trilinear`` takes for two products of a part; operands may be copied for them.

    See ``_trilinear`` in ``aten/src/ATen/native/Linear.cpp``.
    """
    parts, expanded, summed = call.args[:3], call.args[3:6], call.args[6]
    unrolled = call.argument("unroll_dim", 1)
    sizes = [_unsqueezed(t, added) for t, added in zip(parts, expanded, strict=True)]
    first = both = int(parts[0].element_size())
    for dim, (left, right, third) in enumerate(zip(*sizes, strict=True)):
        if dim != unrolled:
            first *= 1 if dim in summed and dim in expanded[2] else max(left, right)
            both *= 1 if dim in summed else max(left, right, third)
    return first + both, 2 * first + both + sum(map(nbytes, parts))


def _unsqueezed(tensor: torch.Tensor, added: Sequence[int]) -> list[int]:
    sizes = list(map(int, tensor.shape))
    for dim in sorted(added):
        sizes.insert(dim, 1)
    return sizes


def powers_of_matrix(call: Call) -> Bounds:
    """Return what ``linalg_matrix_exp`` takes for the powers that it adds up.

    The norm of a single matrix decides how many those are; a batch has all of them. See
    ``mexp_impl`` in ``aten/src/ATen/native/LinearAlgebra.cpp``.
    """
    x = call.args[0]
    size = int(x.shape[-1])
    if size <= 1:
        return 0, 0
    matrices = elements(x) // (size * size)
    norms = _NORMS_BYTES * (matrices + 1)
    least, most = (4, 12) if matrices == 1 else (10, 10)
    return least * nbytes(x), most * nbytes(x) + norms


_NORMS_BYTES: Final = 64
_FEW_BYTES: Final = 1024


def gathered_by_mask(call: Call) -> Bounds:
    """Return what the gradient of ``masked_scatter`` takes: what a mask chooses, and its places."""
    grad = call.args[0]
    return 0, nbytes(grad) + elements(grad) * (17 + 8 * max(1, grad.dim()))


def found_in(call: Call, *, sorting_bytes: int) -> Bounds:
    """Return what ``isin`` takes: many are put in order with those that they are looked up in.

    See ``isin_Tensor_Tensor_out`` in ``aten/src/ATen/native/TensorCompare.cpp``.
    """
    counts = [elements(t) if isinstance(t, torch.Tensor) else 1 for t in call.args[:2]]
    if counts[1] < 10 * counts[0] ** 0.145:
        return 0, 0
    item = max(int(t.element_size()) for t in fake_tensors.tensors_in(list(call.args[:2])))
    return 0, 8 * counts[0] + sum(counts) * (4 * item + sorting_bytes) + _FEW_BYTES


def copied_for_fft(call: Call, strides: Sequence[int] | None = None) -> int:
    """The other dimensions become one, if they can without a copy."""
    x, dims = call.args[0], [d % call.args[0].dim() for d in call.args[1]]
    steps = x.stride() if strides is None else strides
    others = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: -steps[d])
    merge = all(steps[a] == steps[b] * x.shape[b] for a, b in itertools.pairwise(others))
    return 0 if merge else nbytes(x)


def contiguous_strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides that a contiguous copy would have."""
    sizes = [int(size) for size in tensor.shape[1:]]
    return [*itertools.accumulate(reversed(sizes), operator.mul, initial=1)][::-1][: tensor.dim()]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether each element has an address of its own, without gaps between them."""
    step = 1
    for dim in sorted(range(tensor.dim()), key=tensor.stride):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != step:
            return False
        step *= int(tensor.shape[dim])
    return True


#: Bytes that an operator takes for itself, or the least and the most that it may take.
Rule = Callable[[Call], int | Bounds]
Rules = Mapping[str, Rule]


def of(names: str, value: _Value) -> dict[str, _Value]:
    """Give operators of aten, by names between spaces, one value."""
    return {f"aten::{name}": value for name in names.split()}


def bounds_by(rules: Rules, call: Call) -> Bounds:
    """Return the least and the most that a call takes by a table."""
    found = rules[call.name](call) if call.name in rules else 0
    return found if isinstance(found, tuple) else (found, found)
