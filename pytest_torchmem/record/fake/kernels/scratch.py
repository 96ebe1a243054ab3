"""Memory that operators take for themselves, beside what goes in and what comes out.

A fake run sees what goes into an operator and what comes out. The rules here say what some kernels
take in between and give back before they return; `onednn` has those for which only a bound is
known. They were read from torch's sources or found by measuring over shapes, and
``tests/record/fake/test_scratch_is_measured.py`` measures them again. An operator without a rule
takes none: the samples that torch's own tests have for its operators were measured for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from pytest_torchmem.record.fake.kernels import onednn
from pytest_torchmem.record.torch_api import dispatcher, fake_tensors


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes that an operator holds beside its inputs and outputs while it runs.

    ``at_most_bytes`` is larger than ``bytes_`` where the kernel decides by what is not known here.
    """

    bytes_: int = 0
    at_most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator (``aten::mm``) and what it returned."""

    func: dispatcher.Operator
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]

    @property
    def inputs(self) -> list[torch.Tensor]:
        return fake_tensors.tensors_in(list(self.args))

    @property
    def out_bytes(self) -> int:
        return sum(map(_nbytes, self.outputs))


def scratch_of(call: Call, *, on_cpu: bool) -> Scratch:
    """Return the memory that a call takes for itself on the CPU, or on a GPU."""
    known = _size_of(_EVERYWHERE, call)
    if not on_cpu:
        known += _size_of(_ON_GPUS, call)
        return Scratch(known, known)
    known += _size_of(_ON_CPU, call) + _cast_bytes(call)
    bounded = onednn.bounds(call.name, call.args, call.outputs)
    if bounded is None:
        return Scratch(known, known)
    return Scratch(known + bounded[0], known + bounded[1])


def kept_bytes(call: Call, *, on_cpu: bool) -> tuple[int, int] | None:
    """Return an output's place and size where its storage is larger than a fake tensor knows."""
    if call.name in _REDUCED_IN_PLACE and not call.outputs[0].dim():
        return 0, _broadcast_elements(call) * int(call.outputs[0].element_size())
    # Without a graph nothing is kept.
    if call.name == "aten::mkldnn_rnn_layer" and on_cpu and torch.is_grad_enabled():
        return len(call.outputs) - 1, onednn.workspace_bytes(call.args)
    return None


def _size_of(rules: dict[str, Callable[[Call], int]], call: Call) -> int:
    rule = rules.get(call.name)
    return rule(call) if rule is not None else 0


# Casts before an operator: kernels of the CPU work in one type.


def _cast_bytes(call: Call) -> int:
    """Bytes of the inputs that an elementwise kernel or a sum of the CPU casts beforehand.

    ``TensorIterator::compute_types``: each tensor that has not the common type is copied into it,
    and so is what is written in place.
    """
    tensors = [t for t in call.inputs if t.dim()]
    if not tensors or not call.outputs:
        return 0
    if call.name in _SUMS:
        working = torch.float32 if call.name == "aten::mean" else call.outputs[0].dtype
        return sum(_elements(t) * working.itemsize for t in tensors[:1] if _narrower(t, working))
    if not dispatcher.is_elementwise(call.func):
        return 0
    values = [t for t in tensors if not (call.name in _MASKED and t.dtype == torch.bool)]
    working = _common_type(call, values)
    cast = sum(_elements(t) * working.itemsize for t in values if t.dtype != working)
    written = call.outputs[0]
    if dispatcher.writes_in_place(call.func) and written.dtype != working:
        cast += _elements(written) * working.itemsize
    return cast


def _narrower(tensor: torch.Tensor, working: torch.dtype) -> bool:
    return tensor.dtype != working and not tensor.dtype.is_complex


def _common_type(call: Call, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    found = tensors[0].dtype if tensors else call.outputs[0].dtype
    for tensor in tensors[1:]:
        found = torch.promote_types(found, tensor.dtype)
    result = call.outputs[0].dtype
    grows = result.is_floating_point and not (found.is_floating_point or found.is_complex)
    return result if grows else found


_SUMS: Final = frozenset({"aten::sum", "aten::mean", "aten::cumsum", "aten::prod"})
_MASKED: Final = frozenset({"aten::where", "aten::masked_fill", "aten::masked_fill_"})
# The loss of each element is computed in the memory that the reduced loss keeps.
_REDUCED_IN_PLACE: Final = frozenset(
    {
        "aten::mse_loss",
        "aten::smooth_l1_loss",
        "aten::soft_margin_loss",
        "aten::binary_cross_entropy",
    }
)


# Copies of what a kernel cannot read as it is.


def _copied_matrices(operands: Sequence[torch.Tensor]) -> int:
    return sum(_nbytes(m) for m in operands if not _blas_takes(m))


def _blas_takes(matrix: torch.Tensor) -> bool:
    """Return whether a BLAS can read a matrix in place, as rows or as columns.

    It cannot read an expanded one (the gradient of ``.sum()``), so torch copies that first:
    ``addmm_impl_cpu_`` in ``aten/src/ATen/native/LinearAlgebra.cpp``, ``prepare_matrix_for_cublas``
    in ``aten/src/ATen/native/cuda/Blas.cpp``.
    """
    (rows, columns), (row_step, column_step) = matrix.shape[-2:], matrix.stride()[-2:]
    by_columns = row_step == 1 and column_step >= max(1, rows)
    by_rows = column_step == 1 and row_step >= max(1, columns)
    return bool(by_columns or by_rows)


def _copied_of_a_batch(call: Call) -> int:
    """Matrices that a BLAS cannot read are copied one by one; small products need no BLAS."""
    left, right = call.inputs[-2:]
    if left.shape[-2] * left.shape[-1] * right.shape[-1] < _SMALL_PRODUCT:
        return 0
    return sum(_nbytes(m) // max(1, m.shape[0]) for m in (left, right) if not _blas_takes(m))


_SMALL_PRODUCT: Final = 400


def _copied_unless_contiguous(*positions: int) -> Callable[[Call], int]:
    """The operator copies what is not contiguous, such as an expanded gradient."""

    def rule(call: Call) -> int:
        tensors = [call.args[i] for i in positions if i < len(call.args)]
        return sum(_nbytes(t) for t in tensors if hasattr(t, "stride") and not t.is_contiguous())

    return rule


def _copied_to_the_layout_of(place: int, *others: int) -> Callable[[Call], int]:
    """A pooling works in the layout of one argument; others, and the result, are copied into it."""

    def rule(call: Call) -> int:
        layout = _layout(call.args[place])
        used = [call.args[place], *(call.args[i] for i in others), call.outputs[0]]
        return sum(_nbytes(t) for t in used if not t.is_contiguous(memory_format=layout))

    return rule


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    by_channels = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if by_channels and not tensor.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format


def _copied_by_cudnn(call: Call) -> int:
    """cuDNN works by channels where one of its tensors is laid out so, and the others are not."""
    used = [t for t in call.args[:3] if isinstance(t, torch.Tensor) and t.dim() == 4]
    if all(_layout(t) is torch.contiguous_format for t in used[-2:]):
        return 0
    copied = used[:-1]
    return sum(_nbytes(t) for t in copied if not t.is_contiguous(memory_format=torch.channels_last))


# Buffers.


def _gelu_backward(call: Call) -> int:
    """oneDNN, which takes a contiguous input only, copies gradients of another layout."""
    if call.kwargs.get("approximate") == "tanh" or not call.args[1].is_contiguous():
        return 0
    result = sum(_nbytes(t) for t in call.outputs if not t.is_contiguous())
    return _copied_unless_contiguous(0)(call) + result


def _layer_norm_backward(call: Call) -> int:
    """Each thread sums up the gradients of both parameters by itself."""
    weight, wanted = call.args[5], call.args[7]
    if weight is None or not any(wanted[1:]):
        return 0
    return 2 * torch.get_num_threads() * _nbytes(weight)


def _batch_norm(call: Call) -> int:
    """Sums and their squares of each channel; by channels, each thread has sums of its own."""
    if not call.args[5]:
        return 0
    x, threads = call.args[0], torch.get_num_threads()
    channels = int(x.shape[1])
    by_channels = math.prod(map(int, x.shape[2:])) == 1 or _layout(x) is torch.channels_last
    shared = by_channels and _elements(x) // max(1, channels) > threads
    return (2 + threads * shared) * channels * _WIDE_BYTES


def _batch_norm_backward(call: Call) -> int:
    """A first gradient is thrown away where both tensors have the same layout."""
    grad, x, wanted = call.args[0], call.args[1], call.args[9]
    alike = any(all(t.is_contiguous(memory_format=f) for t in (grad, x)) for f in _LAYOUTS[x.dim()])
    return _nbytes(x) if alike and wanted[0] else 0


_LAYOUTS: Final = {
    dims: (torch.contiguous_format, *((torch.channels_last,) if dims == 4 else ()))
    for dims in range(1, 6)
}


def _group_norm(call: Call) -> int:
    by_channels = _layout(call.args[0]) is torch.channels_last
    return 2 * math.prod(map(int, call.args[0].shape[:2])) * _WIDE_BYTES * by_channels


def _group_norm_backward(call: Call) -> int:
    return 2 * math.prod(map(int, call.args[1].shape[:2])) * _WIDE_BYTES


_WIDE_BYTES: Final = 4


def _logsumexp(call: Call) -> int:
    return _nbytes(call.args[0]) + call.out_bytes


def _upsample(points: int) -> Callable[[Call], int]:
    """A small picture is copied to channels-last and back; others need indices and weights.

    See ``_use_vectorized_kernel_cond_2d`` in ``aten/src/ATen/native/cpu/UpSampleKernel.cpp``.
    """

    def rule(call: Call) -> int:
        x, out = call.args[0], call.outputs[0]
        spatial = out.shape[2:]
        by_channels = _layout(x) is torch.channels_last
        if points < _CUBIC and x.dim() == 4:
            if by_channels and (x.shape[1] > 3 or sum(spatial) <= _SMALL_PICTURE):
                return 0
            if sum(spatial) <= _SMALL_PICTURE:
                return _nbytes(x) + _nbytes(out)
        return int(sum(spatial)) * points * (8 + max(_WIDE_BYTES, int(x.element_size())))

    return rule


_SMALL_PICTURE: Final = 128
_CUBIC: Final = 4


def _flash_attention(call: Call) -> int:
    """A block of scores, its sums and its results for each thread; and once more in 16 bits."""
    query, key = call.args[0], call.args[1]
    rows, columns = _blocks(query, key)
    floats = rows * columns + 2 * rows + rows * int(query.shape[-1])
    halves = 0 if query.element_size() >= _WIDE_BYTES else 2 * rows * columns
    wide = max(_WIDE_BYTES, int(query.element_size()))
    return torch.get_num_threads() * (floats * wide + halves)


def _flash_attention_backward(call: Call) -> int:
    grad, query, key = call.args[:3]
    rows, columns = _blocks(query, key)
    wide = max(_WIDE_BYTES, int(query.element_size()))
    scores = 2 * rows * columns * wide
    halves = 0 if query.element_size() >= _WIDE_BYTES else 2 * 2 * rows * columns
    return _nbytes(grad) + torch.get_num_threads() * (scores + halves) + rows * wide


def _blocks(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """The rows and columns of a block; see ``FlashAttentionKernel.cpp``."""
    length = int(query.shape[2])
    block = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(block, length), min(512, int(key.shape[2]))


def _efficient_attention_backward(call: Call) -> int:
    """A sum for each row, and blocks of 64 rows of the query's gradient while they are added up.

    See ``kernel_backward.h`` of memory-efficient attention. Floats go straight to the result where
    the rows are whole blocks.
    """
    grad, query = call.args[0], call.args[1]
    batch, heads, length, width = map(int, query.shape)
    block = 64 if width <= 64 else 128
    blocks = -(-length // 64) * -(-width // block) * (16 + 64 * block * _WIDE_BYTES)
    if query.dtype == torch.float32 and length % 64 == 0:
        blocks = 0
    copied = 0 if grad.transpose(1, 2).is_contiguous() else _nbytes(grad)
    return copied + batch * heads * (length * _WIDE_BYTES + blocks)


def _sort(call: Call) -> int:
    x = call.args[0]
    dim = next((a for a in call.args[1:] if type(a) is int), call.kwargs.get("dim", -1))
    return 8 * int(x.shape[dim]) if x.dim() else 0


def _fft(call: Call) -> int:
    """The other dimensions become one, if they can without a copy."""
    x, dims = call.args[0], [d % call.args[0].dim() for d in call.args[1]]
    others = sorted((d for d in range(x.dim()) if d not in dims), key=lambda d: -x.stride(d))
    merge = all(x.stride(a) == x.stride(b) * x.shape[b] for a, b in itertools.pairwise(others))
    return 0 if merge else _nbytes(x)


def _fft_to_real(call: Call) -> int:
    """All but the last dimension are transformed first, into a tensor of its own."""
    return 2 * _nbytes(call.args[0]) if len(call.args[1]) > 1 else _fft(call)


def _im2col(call: Call) -> int:
    """The result grows out of one that is as large as the input."""
    return _nbytes(call.args[0]) if _nbytes(call.args[0]) < call.out_bytes else 0


def _wide_indices(place: int) -> Callable[[Call], int]:
    """Indices of 32 bits are copied into 64."""

    def rule(call: Call) -> int:
        given = fake_tensors.tensors_in(call.args[place])
        return sum(8 * _elements(t) for t in given if t.dtype == torch.int32)

    return rule


def _bags_backward(call: Call) -> int:
    """Indices are sorted, and the rows of bags looked up, for the sum and the mean."""
    indices, bag_of = call.args[1], call.args[3]
    unknown_bags = 0 if bag_of.numel() else _elements(indices) + 1
    return 8 * (3 * _elements(indices) + unknown_bags) + _copied_unless_contiguous(0)(call)


def _with_logits(call: Call) -> int:
    """One more tensor as large as the loss of each element, which a reduction keeps until then."""
    size = _broadcast_elements(call) * int(call.outputs[0].element_size())
    return size if call.outputs[0].dim() else 2 * size


def _elements_once(call: Call) -> int:
    if call.outputs[0].dim():
        return 0
    return _elements(call.args[0]) * int(call.outputs[0].element_size())


def _of_complex(call: Call) -> int:
    x = call.args[0]
    return _nbytes(x) if x.is_complex() else 0


def _safe_softmax(call: Call) -> int:
    """It marks the elements that are masked, and the rows that are masked whole."""
    x, dim = call.args[0], call.args[1]
    rows = _elements(x) // max(1, int(x.shape[dim])) if x.dim() else 1
    return _elements(x) + rows


def _broadcast_elements(call: Call) -> int:
    left, right = (list(map(int, t.shape)) for t in call.inputs[:2])
    dims = itertools.zip_longest(reversed(left), reversed(right), fillvalue=1)
    return math.prod(max(a, b) for a, b in dims)


def _elements(tensor: torch.Tensor) -> int:
    return fake_tensors.size_hint(tensor.numel())


def _nbytes(tensor: torch.Tensor) -> int:
    return _elements(tensor) * int(tensor.element_size())


_Rules = dict[str, Callable[[Call], int]]
_EVERYWHERE: Final[_Rules] = {
    "aten::mm": lambda call: _copied_matrices(call.args[:2]),
    "aten::addmm": lambda call: _copied_matrices(call.args[1:3]),
    # Each calls ``.contiguous()`` on these arguments in ``aten/src/ATen/native``.
    "aten::_softmax": _copied_unless_contiguous(0),
    "aten::_log_softmax": _copied_unless_contiguous(0),
    "aten::_softmax_backward_data": _copied_unless_contiguous(0, 1),
    "aten::_log_softmax_backward_data": _copied_unless_contiguous(0, 1),
    "aten::native_layer_norm_backward": _copied_unless_contiguous(0, 1),
    "aten::embedding_dense_backward": _copied_unless_contiguous(0),
    "aten::roll": _copied_unless_contiguous(0),
}
_ON_GPUS: Final[_Rules] = {
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_attention_backward,
    # The product of gradient and output, in ``SoftMax.cu``.
    "aten::_softmax_backward_data": lambda call: _nbytes(call.args[0]),
    "aten::avg_pool2d_backward": _copied_unless_contiguous(0),
    "aten::convolution": _copied_by_cudnn,
    "aten::convolution_backward": _copied_by_cudnn,
    "aten::max_pool2d_with_indices_backward": _copied_unless_contiguous(0),
}
_ON_CPU: Final[_Rules] = {
    "aten::avg_pool2d_backward": _copied_to_the_layout_of(0),
    "aten::max_pool2d_with_indices_backward": _copied_to_the_layout_of(0, 7),
    "aten::_embedding_bag_backward": _bags_backward,
    "aten::_fft_c2c": _fft,
    "aten::_fft_c2r": _fft_to_real,
    "aten::_fft_r2c": _fft,
    "aten::_safe_softmax": _safe_softmax,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _flash_attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
    "aten::abs": _of_complex,
    "aten::baddbmm": _copied_of_a_batch,
    "aten::binary_cross_entropy_with_logits": _with_logits,
    "aten::bmm": _copied_of_a_batch,
    "aten::col2im": _copied_unless_contiguous(0),
    "aten::gather": _wide_indices(2),
    "aten::gelu_backward": _gelu_backward,
    "aten::huber_loss": _elements_once,
    "aten::im2col": _im2col,
    "aten::index": _wide_indices(1),
    "aten::index_put": _wide_indices(1),
    "aten::index_put_": _wide_indices(1),
    "aten::logsumexp": _logsumexp,
    "aten::mse_loss": _elements_once,
    "aten::native_batch_norm": _batch_norm,
    "aten::native_batch_norm_backward": _batch_norm_backward,
    "aten::native_group_norm": _group_norm,
    "aten::native_group_norm_backward": _group_norm_backward,
    "aten::native_layer_norm_backward": _layer_norm_backward,
    "aten::reflection_pad1d_backward": _copied_unless_contiguous(0),
    "aten::reflection_pad2d_backward": _copied_unless_contiguous(0),
    "aten::replication_pad2d_backward": _copied_unless_contiguous(0),
    "aten::scatter": _wide_indices(2),
    "aten::scatter_add": _wide_indices(2),
    "aten::smooth_l1_loss": _elements_once,
    "aten::soft_margin_loss_backward": lambda call: 2 * call.out_bytes,
    "aten::sort": _sort,
    "aten::tril": _copied_unless_contiguous(0),
    "aten::triu": _copied_unless_contiguous(0),
    "aten::upsample_bicubic2d": _upsample(4),
    "aten::upsample_bilinear2d": _upsample(2),
    "aten::upsample_bilinear2d_backward": _copied_unless_contiguous(0),
    "aten::upsample_bicubic2d_backward": _copied_unless_contiguous(0),
    "aten::upsample_linear1d": _upsample(2),
    "aten::upsample_nearest1d": _upsample(1),
    "aten::upsample_nearest2d": _upsample(1),
    "aten::upsample_nearest2d_backward": _copied_unless_contiguous(0),
    "aten::upsample_nearest3d": _upsample(1),
    "aten::upsample_trilinear3d": _upsample(2),
}
