"""Memory that operators take for themselves and give back before they return.

A fake run sees what goes into an operator and what comes out. These rules say what some take in
between; each names the source it was read from. Operators without a rule are taken to need none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pytest_torchmem.record import fx_api


def scratch_bytes(operator: str, args: Sequence[Any]) -> int:
    """Return the bytes that an operator (``aten::mm``) holds beside its inputs and outputs."""
    rule = _RULES.get(operator)
    return rule(args) if rule is not None else 0


def _copied_matrices(operands: Sequence[Any]) -> int:
    return sum(_nbytes(m) for m in operands if not _blas_takes(m))


def _blas_takes(matrix: Any) -> bool:
    """Whether a BLAS can read a matrix in place, as rows or as columns.

    An expanded one (the gradient of ``.sum()``) it cannot, so it is copied first:
    ``addmm_impl_cpu_`` in ``aten/src/ATen/native/LinearAlgebra.cpp``, ``prepare_matrix_for_cublas``
    in ``aten/src/ATen/native/cuda/Blas.cpp``.
    """
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    by_columns = row_step == 1 and column_step >= max(1, rows)
    by_rows = column_step == 1 and row_step >= max(1, columns)
    return bool(by_columns or by_rows)


def _nbytes(tensor: Any) -> int:
    return fx_api.size_hint(tensor.numel()) * int(tensor.element_size())


_RULES: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten::mm": lambda args: _copied_matrices(args[:2]),
    "aten::addmm": lambda args: _copied_matrices(args[1:3]),
}
