"""The libraries of a GPU that take memory nobody can bound without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import of
from pytest_torchmem.values.static_graph import StaticGraph
from pytest_torchmem.values.units import listed

_CUBLAS: Final = "a workspace of cuBLAS for each stream (8 MiB, 32 MiB from Hopper on)"
_CUDNN: Final = "cuDNN"
_CUDNN_KEEPS: Final = "what recurrent layers of cuDNN keep for the backward"
_CUDNN_ATTENDS: Final = "cuDNN's attention, from Hopper on"
# Sentences name them in this order.
_WORKSPACES: Final = (_CUDNN, _CUDNN_ATTENDS, "cuFFT", "cuSOLVER")
_USED_BY: Final[Mapping[str, str]] = {
    **of("mm addmm bmm baddbmm", _CUBLAS),
    **of("convolution convolution_backward", _CUDNN),
    **of("mkldnn_rnn_layer _cudnn_rnn lstm", _CUDNN_KEEPS),
    "aten::_scaled_dot_product_cudnn_attention": _CUDNN_ATTENDS,
    "aten::_scaled_dot_product_cudnn_attention_backward": _CUDNN_ATTENDS,
    "aten::_scaled_dot_product_flash_attention": _CUDNN_ATTENDS,
    "aten::_scaled_dot_product_flash_attention_backward": _CUDNN_ATTENDS,
    **of("_fft_c2c _fft_c2r _fft_r2c", "cuFFT"),
    **of(
        "_linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky_inverse "
        "cholesky_solve linalg_cholesky_ex linalg_eig linalg_inv_ex linalg_ldl_factor_ex "
        "linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv linalg_qr "
        "linalg_solve_triangular",
        "cuSOLVER",
    ),
}


_LSTM: Final = (
    "the estimate is a lower bound: before torch 2.13 an LSTM keeps more for its backward than is "
    "known here"
)


def uncounted_on_the_cpu(graph: StaticGraph) -> tuple[str, ...]:
    """Return a sentence if a release of oneDNN is at work that nobody measured."""
    recurs = any(n.operator == "aten::mkldnn_rnn_layer" for n in graph.nodes)
    return (_LSTM,) if recurs and torch.__version__ < "2.13" else ()


def uncounted_on_gpus(graph: StaticGraph) -> tuple[str, ...]:
    """Return a sentence about the libraries that the operators of a graph use on a GPU."""
    used = {_USED_BY[n.operator] for n in graph.nodes if n.operator in _USED_BY}
    if _CUDNN_KEEPS in used:
        used.add(_CUDNN)
    if _CUDNN in used:
        used.discard(_CUDNN_ATTENDS)
    of_workspaces = [name for name in _WORKSPACES if name in used]
    parts = [_CUBLAS] if _CUBLAS in used else []
    if of_workspaces:
        parts.append(f"the workspaces of {listed(of_workspaces)}")
    if _CUDNN_KEEPS in used:
        parts.append(_CUDNN_KEEPS)
    return (f"the estimate is a lower bound: it leaves out {listed(parts)}",) if parts else ()
