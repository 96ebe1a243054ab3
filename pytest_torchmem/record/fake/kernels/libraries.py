"""The libraries of a GPU that take memory nobody can bound without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from pytest_torchmem.values.static_graph import StaticGraph
from pytest_torchmem.values.units import listed

_CUBLAS: Final = "a workspace of cuBLAS for each stream (8 MiB, 32 MiB from Hopper on)"
_CUDNN: Final = "cuDNN"
_CUDNN_KEEPS: Final = "what recurrent layers of cuDNN keep for the backward"
_CUDNN_ATTENDS: Final = "cuDNN's attention, from Hopper on"
# Sentences name them in this order.
_WORKSPACES: Final = (_CUDNN, _CUDNN_ATTENDS, "cuFFT", "cuSOLVER")
_USED_BY: Final[Mapping[str, str]] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), _CUBLAS),
    **dict.fromkeys(("aten::convolution", "aten::convolution_backward"), _CUDNN),
    **dict.fromkeys(("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::lstm"), _CUDNN_KEEPS),
    **dict.fromkeys(
        (
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_cudnn_attention_backward",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_backward",
        ),
        _CUDNN_ATTENDS,
    ),
    **dict.fromkeys(
        (
            "aten::_linalg_det",
            "aten::_linalg_eigh",
            "aten::_linalg_slogdet",
            "aten::_linalg_solve_ex",
            "aten::_linalg_svd",
            "aten::cholesky_inverse",
            "aten::cholesky_solve",
            "aten::linalg_cholesky_ex",
            "aten::linalg_eig",
            "aten::linalg_inv_ex",
            "aten::linalg_ldl_factor_ex",
            "aten::linalg_lstsq",
            "aten::linalg_lu",
            "aten::linalg_lu_factor_ex",
            "aten::linalg_matrix_exp",
            "aten::linalg_pinv",
            "aten::linalg_qr",
            "aten::linalg_solve_triangular",
        ),
        "cuSOLVER",
    ),
    **dict.fromkeys(("aten::_fft_c2c", "aten::_fft_c2r", "aten::_fft_r2c"), "cuFFT"),
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
