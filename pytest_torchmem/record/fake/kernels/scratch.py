"""Memory that operators take for themselves, beside what goes in and what comes out.

A fake run sees what goes into an operator and what comes out. The rules here say what some kernels
take in between and give back before they return: `cpu` and `cuda` have those of each device,
`onednn` those for which only a bound is known. They were read from torch's sources or found by
measuring over shapes, and ``tests/record/fake/kernels/test_scratch_is_measured.py`` and
``tests/simulate/test_scratch_on_a_simulated_gpu.py`` measure them again. An operator without a rule
takes none: the samples that torch's own tests have for its operators were measured for that, on
both devices. What libraries of a GPU take, nobody can bound without one: they are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels import cpu, cuda, onednn
from pytest_torchmem.record.fake.kernels.operator_call import (
    Call,
    Rules,
    Scratch,
    bounds_by,
    broadcast_elements,
    copied_matrices,
    copied_unless_contiguous,
    elements,
    nbytes,
    of,
)
from pytest_torchmem.values.static_graph import StaticGraph
from pytest_torchmem.values.units import listed


def scratch_of(call: Call, *, on_cpu: bool) -> Scratch:
    """Return the memory that a call takes for itself on the CPU, or on a GPU."""
    least, most = bounds_by(_EVERYWHERE, call)
    if not on_cpu:
        others = [cuda.cuda_bounds(call)]
    else:
        cast = cpu.cast_bytes(call)
        others = [bounds_by(cpu.RULES, call), bounds_by(onednn.RULES, call), (cast, cast)]
    return Scratch(least + sum(o[0] for o in others), most + sum(o[1] for o in others))


def kept_bytes(call: Call, *, on_cpu: bool) -> Mapping[int, int]:
    """Return sizes of outputs, by place, whose storages are others than a fake tensor knows."""
    if call.name in _REDUCED_IN_PLACE and not call.outputs[0].dim():
        of_each = broadcast_elements(call) * int(call.outputs[0].element_size())
        return {0: max(of_each, call.out_bytes)}
    if call.name.startswith("aten::_embedding_bag") and not on_cpu and len(call.outputs) > 1:
        # Which bag each row is of, and which row is the largest: the CPU has that for other bags.
        has_largest = call.argument("mode", 0) == _LARGEST
        return {1: nbytes(call.args[1]), 3: nbytes(call.outputs[3]) * has_largest}
    if call.name == "aten::log_sigmoid_forward" and not on_cpu:
        return {1: 0}  # the CPU alone keeps exponents
    if call.name in _SHRUNK:
        # The result was as large as what is read, and is made smaller in its memory.
        return {0: max(nbytes(call.args[0]), call.out_bytes)}
    # Without a graph nothing is kept.
    if call.name == "aten::mkldnn_rnn_layer" and on_cpu and torch.is_grad_enabled():
        return {len(call.outputs) - 1: onednn.lstm_workspace_bytes(call.args)}
    return {}


def _safe_softmax(call: Call) -> int:
    """It marks the elements that are masked, and the rows that are masked whole."""
    x, dim = call.args[0], call.args[1]
    rows = elements(x) // max(1, int(x.shape[dim])) if x.dim() else 1
    return elements(x) + rows


def _rolled(call: Call) -> int:
    """Each dimension after the first is rolled anew, while what the ones before made is there."""
    again = nbytes(call.args[0]) * (len(call.args[1]) - 1)
    return max(copied_unless_contiguous(0)(call), again)


def _mean_of_scattered(call: Call) -> int:
    """Ones to count by, the counts, and where they are zero."""
    x, source = call.args[0], call.args[3]
    return nbytes(x) + nbytes(source) + elements(x) if call.args[4] == "mean" else 0


def _unfolded_backward(call: Call) -> int:
    """It numbers the places that windows reach, where these lie over each other."""
    grad, sizes, dim, window, step = call.args
    if window <= step or not sizes:
        return 0
    reached = (int(grad.shape[dim % len(sizes)]) - 1) * step + window
    return _PLACE_BYTES * min(int(sizes[dim]), int(reached))


# The loss of each element is computed in the memory that the reduced loss keeps.
_REDUCED_IN_PLACE: Final = frozenset(
    {
        "aten::mse_loss",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::binary_cross_entropy",
    }
)


# The mode of bags of which each column has its largest value.
_LARGEST: Final = 2
# Kernels that read how much memory they need.
DECIDED_BY_VALUES: Final = frozenset(
    {"aten::linalg_matrix_exp", "aten::isin", "aten::masked_scatter_backward"}
)
_PLACE_BYTES: Final = 8
_SORTING_BYTES: Final = 1 << 15
_SHRUNK: Final = ("aten::col2im", "aten::im2col")
_EVERYWHERE: Final[Rules] = {
    "aten::mm": lambda call: copied_matrices(call.args[:2]),
    "aten::addmm": lambda call: copied_matrices(call.args[1:3]),
    # Each calls ``.contiguous()`` on these arguments in ``aten/src/ATen/native``.
    **of("_softmax _log_softmax embedding_dense_backward", copied_unless_contiguous(0)),
    **of("_log_softmax_backward_data native_layer_norm_backward", copied_unless_contiguous(0, 1)),
    # Gradients that are read as if they were contiguous.
    **of(
        "_adaptive_avg_pool3d_backward _upsample_bicubic2d_aa_backward "
        "_upsample_bilinear2d_aa_backward "
        "_upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward "
        "_upsample_nearest_exact3d_backward adaptive_max_pool3d_backward avg_pool3d_backward "
        "col2im "
        "fractional_max_pool2d_backward max_pool3d_with_indices_backward reflection_pad1d_backward "
        "reflection_pad2d_backward upsample_bicubic2d_backward upsample_linear1d_backward "
        "upsample_nearest1d_backward upsample_nearest3d_backward upsample_trilinear3d_backward",
        copied_unless_contiguous(0),
    ),
    "aten::abs": lambda call: nbytes(call.args[0]) * call.args[0].is_complex(),
    # Each element has a part in the gradients of the scale and of the zero point.
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": lambda call: (
        2 * nbytes(call.args[1])
    ),
    "aten::dist": lambda call: broadcast_elements(call) * int(call.args[0].element_size()),
    "aten::_safe_softmax": _safe_softmax,
    "aten::soft_margin_loss_backward": lambda call: 2 * call.out_bytes,
    "aten::mv": lambda call: copied_matrices(call.args[:1]),
    "aten::roll": _rolled,
    # Sums of all counts before, in 64 bits.
    "aten::repeat_interleave": lambda call: _PLACE_BYTES * elements(call.args[0]),
    # Sorted values and where they were; how it is done decides.
    "aten::_unique2": lambda call: (
        2 * nbytes(call.args[0]),
        4 * nbytes(call.args[0]) + _SORTING_BYTES,
    ),
    "aten::scatter_reduce": _mean_of_scattered,
    "aten::unfold_backward": _unfolded_backward,
}


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
