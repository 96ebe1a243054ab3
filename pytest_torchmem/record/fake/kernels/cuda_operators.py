"""The operators that CUDA has where the CPU, which stands for it, has others.

A program for a GPU that is not there runs on fake tensors of the CPU, as autograd needs a device
that exists. Most functions come down to the same operators on both; these do not, and keep other
memory for the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final, Protocol

import torch

from pytest_torchmem.record.fake.kernels.operator_call import HALVES
from pytest_torchmem.record.fake.stand_ins.compositions import compose
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, fake_tensors
from pytest_torchmem.values.errors import EstimateError

_Tensor = torch.Tensor
_Optional = torch.Tensor | None
_Function = Callable[..., object]
_WIDEST_FLASH_HEAD: Final = 256
_ALIGNED: Final = 8
_WITHOUT_CUDNN: Final = (
    "attention of 16 bits keeps what it keeps on GPUs before Hopper; from Hopper on cuDNN computes "
    "it, unless torch.backends.cuda.enable_cudnn_sdp(False): the lower end is without scratch"
)


class _Context(Protocol):
    """Autograd's context of a function: what it keeps for its backward."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[_Tensor, ...]
    # Of a cell, and of layers.
    has_biases: bool
    batch_first: bool
    state_count: int
    room: int

    def save_for_backward(self, *tensors: _Optional) -> None: ...


def take_cudas_operators(patches: Installed, notes: set[str]) -> None:
    """Let functions call the operators that they call on CUDA; ``notes`` says what is in doubt."""
    others = (_dropout, _lstm_cell, _gru_cell, _group_norm, _rms_norm)
    on_cuda: list[_Function] = [partial(_attention, notes), *others]
    on_cuda += (partial(_recurrent, mode) for mode in range(4))
    compose(patches, dict(zip(fake_tensors.DIFFERENT_ON_CUDA, on_cuda, strict=True)))


def _require_no_transform(what: str) -> None:
    """Raise `EstimateError` in a transform of torch.func, which takes no function like these."""
    if autograd.within_transform():
        raise EstimateError(
            f"the program calls {what} within a transform of torch.func (vmap, grad, jvp), where "
            "an estimate does not know the kernel of a GPU; `pytest --torchmem-simulate=H100` "
            "measures it"
        )


def _dropout(plain: _Function, input: _Tensor, p: float, train: bool) -> object:
    """The mask has a byte for each element, where that of the CPU has the input's type."""
    if not train or not 0 < p < 1 or not input.numel():
        return plain(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def _group_norm(plain: _Function, input: _Tensor, *rest: object, **named: object) -> object:
    return plain(input.contiguous(), *rest, **named)


def _rms_norm(
    plain: _Function,
    input: _Tensor,
    normalized_shape: list[int],
    weight: _Optional = None,
    eps: float | None = None,
) -> object:
    """One kernel does it where input and weight have one type."""
    mixed = weight is not None and weight.dtype != input.dtype
    if mixed or not fake_tensors.FUSES_RMS_NORM:
        return plain(input, normalized_shape, weight, eps)
    dims = len(normalized_shape)
    _require_no_transform("rms_norm")
    return _FusedRmsNorm.apply(input, weight, dims)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """``_fused_rms_norm``, which is taken apart on the CPU: it keeps a number for each row."""

    @staticmethod
    def forward(ctx: _Context, input: _Tensor, weight: _Optional, dims: int) -> _Tensor:
        x = input.contiguous()
        made = torch.empty_like(x)
        kept = x.new_empty(x.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, kept)
        return made

    @staticmethod
    def backward(ctx: _Context, grad: _Tensor) -> object:
        x, weight, _ = ctx.saved_tensors
        of_x = torch.empty_like(x)
        wanted = weight is not None and ctx.needs_input_grad[1]
        of_weight = torch.empty_like(weight) if wanted else None
        # The kernel reads it as if it were contiguous.
        grad = grad.contiguous()
        return of_x, of_weight, None


# Attention.


def _attention(
    notes: set[str],
    plain: _Function,
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    attn_mask: _Optional = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> object:
    """See ``sdp_utils.cpp``: flash attention if it can, memory-efficient attention if that can."""
    sixteen_bits = query.dtype in HALVES
    given = query, key, value
    whole = all(t.dim() == 4 and t.stride(-1) == 1 for t in given)
    whole = whole and (attn_mask is None or attn_mask.stride(-1) == 1)
    # Fused kernels do not broadcast heads.
    whole = whole and (enable_gqa or query.shape[:2] == key.shape[:2] == value.shape[:2])
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    switches: Any = torch.backends.cuda
    flash = switches.flash_sdp_enabled() and attn_mask is None and sixteen_bits
    if whole and alike and flash and query.shape[-1] <= _WIDEST_FLASH_HEAD:
        # Grouped heads are read as they are.
        return _flash(given, dropout_p, is_causal, scale)
    if sixteen_bits and switches.cudnn_sdp_enabled():
        notes.add(_WITHOUT_CUDNN)
    efficient = switches.mem_efficient_sdp_enabled() and not enable_gqa
    aligned = query.shape[-1] % (8 if sixteen_bits else 4) == 0
    if whole and efficient and aligned and (sixteen_bits or query.dtype == torch.float32):
        return _efficient(given, attn_mask, dropout_p, is_causal, scale)
    how = {"scale": scale, "enable_gqa": enable_gqa}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return plain(*given, attn_mask, dropout_p, is_causal, **how)


def _flash(
    given: Sequence[_Tensor], dropout_p: float, is_causal: bool, scale: float | None
) -> object:
    width = given[0].shape[-1]
    scale = width**-0.5 if scale is None else scale
    missing = -width % 8
    if missing:
        given = [torch.nn.functional.pad(t, [0, missing]) for t in given]
    out = fake_tensors.FLASH_ATTENTION(*given, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if missing else out


def _efficient(
    given: Sequence[_Tensor],
    mask: _Optional,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> object:
    keeps_sums = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if mask is not None:
        mask = _bias_of(mask, *given[:2])
    return fake_tensors.EFFICIENT_ATTENTION(
        *given, mask, keeps_sums, dropout_p, is_causal, scale=scale
    )[0]


def _bias_of(mask: _Tensor, query: _Tensor, key: _Tensor) -> _Tensor:
    """A mask as numbers that are added, with rows that begin at aligned addresses."""
    if mask.dtype == torch.bool:
        numbers = torch.zeros_like(mask, dtype=query.dtype)
        mask = numbers.masked_fill_(mask.logical_not(), float("-inf"))
    if any(step % _ALIGNED for step in mask.stride()[:-1]):
        missing = _ALIGNED - mask.shape[-1] % _ALIGNED
        mask = torch.nn.functional.pad(mask, [0, missing])[..., :-missing]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


# Cells.


def _lstm_cell(
    plain: _Function,
    input: _Tensor,
    hx: tuple[_Tensor, _Tensor],
    w_ih: _Tensor,
    w_hh: _Tensor,
    b_ih: _Optional = None,
    b_hh: _Optional = None,
) -> object:
    gates = torch.mm(input, w_ih.t()), torch.mm(hx[0], w_hh.t())
    return fake_tensors.FUSED_LSTM_CELL(*gates, hx[1], b_ih, b_hh)[:2]


def _gru_cell(
    plain: _Function,
    input: _Tensor,
    hx: _Tensor,
    w_ih: _Tensor,
    w_hh: _Tensor,
    b_ih: _Optional = None,
    b_hh: _Optional = None,
) -> object:
    _require_no_transform("gru_cell")
    gates = torch.mm(input, w_ih.t()), torch.mm(hx, w_hh.t())
    biases = (b_ih, b_hh) if b_ih is not None else (None, None)
    return _FusedGru.apply(*gates, hx, *biases)  # type: ignore[no-untyped-call]


class _FusedGru(torch.autograd.Function):
    """``_thnn_fused_gru_cell``, which has no rule for fake tensors: it keeps five gates."""

    @staticmethod
    def forward(
        ctx: _Context,
        inner: _Tensor,
        outer: _Tensor,
        hx: _Tensor,
        b_ih: _Optional,
        b_hh: _Optional,
    ) -> _Tensor:
        made = torch.empty_like(hx)
        kept = hx.new_empty(hx.shape[0], 5 * hx.shape[1])
        # The gates are there for a second derivative.
        ctx.save_for_backward(kept, inner, outer, hx)
        ctx.has_biases = b_ih is not None
        return made

    @staticmethod
    def backward(ctx: _Context, grad: _Tensor) -> object:
        kept, *_ = ctx.saved_tensors
        rows, width = kept.shape[0], kept.shape[1] // 5 * 3
        of_inner, of_outer = kept.new_empty(rows, width), kept.new_empty(rows, width)
        of_state = torch.empty_like(grad)
        sums = (of_inner.sum(0), of_outer.sum(0)) if ctx.has_biases else (None, None)
        return of_inner, of_outer, of_state, *sums


# Layers. Libraries count them as relu 0, tanh 1, LSTM 2, GRU 3.


def _recurrent(
    mode: int,
    plain: _Function,
    input: _Tensor,
    hx: _Tensor | tuple[_Tensor, _Tensor],
    weights: list[_Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    both_ways: bool,
    batch_first: bool,
) -> object:
    if not torch.backends.cudnn.enabled:
        return plain(input, hx, weights, has_biases, layers, dropout, train, both_ways, batch_first)
    _require_no_transform("a recurrent layer")
    states = (hx,) if isinstance(hx, _Tensor) else tuple(hx)
    # The library's buffer has room for biases; weights without any are copied into one.
    gates = weights[0].shape[0]
    room = 0 if has_biases else sum(w.shape[0] for w in weights if w.shape[0] == gates)
    width, hidden = states[0].shape[2], states[-1].shape[2]
    projected = width if width != hidden else 0
    sizes = (mode, hidden, projected, layers, False, dropout, train, both_ways)
    layer = partial(_cudnn_layers, 4 if has_biases else 2, sizes)
    return _CudnnRnn.apply(  # type: ignore[no-untyped-call]
        layer, batch_first, room, len(states), input, *states, *weights
    )


def _cudnn_layers(
    stride: int,
    sizes: tuple[object, ...],
    x: _Tensor,
    states: Sequence[_Tensor],
    weights: Sequence[_Tensor],
    flat: _Tensor,
) -> tuple[_Tensor, ...]:
    """Call the library on a sequence, time first; return the result and the last states."""
    cell = states[1] if len(states) > 1 else None
    given = (x, list(weights), stride, flat, states[0], cell)
    found = fake_tensors.CUDNN_RNN(*given, *sizes, [], None)
    return tuple(found[: 1 + len(states)])


class _CudnnRnn(torch.autograd.Function):
    """``_cudnn_rnn``, which has no rule for its backward: gradients of weights are one buffer.

    What cuDNN reserves for the backward is left out, as nobody knows it without the library.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        layer: Callable[..., tuple[_Tensor, ...]],
        batch_first: bool,
        room: int,
        state_count: int,
        input: _Tensor,
        *given: _Tensor,
    ) -> tuple[_Tensor, ...]:
        states, weights = given[:state_count], given[state_count:]
        flat = weights[0].new_empty(room and room + sum(w.numel() for w in weights))
        made, *last = layer(_time_first(input, batch_first).contiguous(), states, weights, flat)
        made = _time_first(made, batch_first)
        ctx.save_for_backward(input, made, flat, *given)
        ctx.batch_first, ctx.state_count, ctx.room = batch_first, state_count, room
        return made, *last

    @staticmethod
    def backward(ctx: _Context, grad: _Tensor, *of_last: _Tensor) -> object:
        input, _, _, *given = ctx.saved_tensors
        states, weights = given[: ctx.state_count], given[ctx.state_count :]
        x = _time_first(input, ctx.batch_first).contiguous()
        grad = _time_first(grad, ctx.batch_first).contiguous()
        of_x = _time_first(torch.empty_like(x), ctx.batch_first)
        of_states = tuple(map(torch.empty_like, states))
        del x, grad, of_last
        # Gradients of weights are another call of the library, which copies once more.
        again = _time_first(input, ctx.batch_first).contiguous()
        of_weights = _parts_of_one(weights, ctx.room)
        del again
        return None, None, None, None, of_x, *of_states, *of_weights


def _time_first(tensor: _Tensor, batch_first: bool) -> _Tensor:
    """Exchange batch and time, either way."""
    return tensor.transpose(0, 1) if batch_first else tensor


def _parts_of_one(weights: list[_Tensor], room: int) -> list[_Tensor]:
    """Make one buffer of zeros with room for more, and return a part of it for each weight."""
    counts = [weight.numel() for weight in weights]
    whole = weights[0].new_zeros(sum(counts) + room)
    begins = accumulate(counts, initial=0)
    return [whole[b : b + w.numel()].view(w.shape) for b, w in zip(begins, weights, strict=False)]
