"""Memory that operators take for themselves and give back before they return.

A fake run sees what goes into an operator and what comes out. These rules say what some take in
between; each names the source it was read from. Operators without a rule are taken to need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pytest_torchmem.record.torch_api import fake_tensors


def scratch_bytes(operator: str, args: Sequence[Any]) -> int:
    """Return the bytes that an operator (``aten::mm``) holds beside its inputs and outputs."""
    rule = _RULES.get(operator)
    return rule(args) if rule is not None else 0


def uncounted(operators: Iterable[str], device: str) -> str:
    """Return a sentence on scratch that an estimate leaves out, or ``""`` if none is known."""
    if device != "cpu":
        return "the estimate leaves out the workspaces of libraries (cuBLAS, cuDNN)"
    found = sorted(_UNCOUNTED_ON_CPU.intersection(operators))
    if not found:
        return ""
    return f"the estimate leaves out the scratch that these operators allocate: {', '.join(found)}"


def _copied_matrices(operands: Sequence[torch.Tensor]) -> int:
    return sum(_nbytes(m) for m in operands if not _blas_takes(m))


def _blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS can read a matrix in place, as rows or as columns.

    It cannot read an expanded one (the gradient of ``.sum()``), so torch copies that first:
    ``addmm_impl_cpu_`` in ``aten/src/ATen/native/LinearAlgebra.cpp``, ``prepare_matrix_for_cublas``
    in ``aten/src/ATen/native/cuda/Blas.cpp``.
    """
    (rows, columns), (row_step, column_step) = matrix.shape, matrix.stride()
    by_columns = row_step == 1 and column_step >= max(1, rows)
    by_rows = column_step == 1 and row_step >= max(1, columns)
    return bool(by_columns or by_rows)


def _copied_unless_contiguous(*positions: int) -> Callable[[Sequence[Any]], int]:
    """The operator copies what is not contiguous, such as an expanded gradient."""

    def rule(args: Sequence[Any]) -> int:
        tensors = [args[i] for i in positions if i < len(args)]
        return sum(_nbytes(t) for t in tensors if hasattr(t, "stride") and not t.is_contiguous())

    return rule


def _nbytes(tensor: torch.Tensor) -> int:
    return fake_tensors.size_hint(tensor.numel()) * int(tensor.element_size())


_RULES: dict[str, Callable[[Sequence[Any]], int]] = {
    "aten::mm": lambda args: _copied_matrices(args[:2]),
    "aten::addmm": lambda args: _copied_matrices(args[1:3]),
    # Each calls ``.contiguous()`` on these arguments in ``aten/src/ATen/native``.
    "aten::_softmax_backward_data": _copied_unless_contiguous(0, 1),
    "aten::_log_softmax_backward_data": _copied_unless_contiguous(0, 1),
    "aten::native_layer_norm_backward": _copied_unless_contiguous(0, 1),
    "aten::embedding_dense_backward": _copied_unless_contiguous(0),
    "aten::avg_pool2d_backward": _copied_unless_contiguous(0),
    "aten::max_pool2d_with_indices_backward": _copied_unless_contiguous(0),
    "aten::roll": _copied_unless_contiguous(0),
}

# Seen by benchmarks/estimate_operators.py.
_UNCOUNTED_ON_CPU = frozenset(
    {
        # oneDNN works on layouts of its own, chosen for the processor.
        "aten::convolution",
        "aten::convolution_backward",
        "aten::mkldnn_rnn_layer",
        "aten::mkldnn_rnn_layer_backward",
        # One buffer for each thread.
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_embedding_bag",
        "aten::_embedding_bag_backward",
        "aten::_fft_r2c",
        "aten::_linalg_det",
        "aten::_linalg_svd",
        "aten::_trilinear",
        "aten::col2im",
        "aten::gelu_backward",
        "aten::im2col",
        "aten::linalg_inv_ex",
        "aten::logsumexp",
        "aten::reflection_pad2d_backward",
        "aten::upsample_bilinear2d",
        "aten::upsample_bilinear2d_backward",
    }
)
