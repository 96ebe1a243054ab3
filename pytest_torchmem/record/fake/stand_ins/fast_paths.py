"""Layers of a transformer that one operator computes, made of the operators that it calls.

Without gradients ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` go to one operator
each, whose kernels call others behind the dispatcher's back. See ``attention.cpp`` and
``transformer.cpp`` in ``aten/src/ATen/native/transformers``; on a GPU attention is fused where
``cuda/attention.cu`` finds a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn import functional

from pytest_torchmem.record.torch_api import dispatcher, fake_tensors
from pytest_torchmem.values.errors import EstimateError

_Tensor = torch.Tensor
_Weights = tuple[_Tensor, _Tensor]
_RAGGED: Final = "the sizes of ragged tensors depend on values; estimate with padded ones"


def made_of_others(operator: dispatcher.Operator) -> Callable[..., object] | None:
    """Return what calls the operators that an operator's kernel calls; None for most operators."""
    return _FAST_PATHS.get(operator)


def _layer(
    src: _Tensor,
    width: int,
    heads: int,
    qkv: _Tensor,
    qkv_bias: _Tensor,
    out: _Tensor,
    out_bias: _Tensor,
    gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> _Tensor:
    first, second, up, down = (rest[place : place + 2] for place in (0, 2, 4, 6))
    mask, mask_type = (*rest[8:], None, None)[:2]

    def norm(x: _Tensor, weights: _Weights) -> _Tensor:
        return functional.layer_norm(x, (width,), *weights, eps)

    x = norm(src, first) if norm_first else src
    x = _attention(
        x, x, x, width, heads, qkv, qkv_bias, out, out_bias, mask, False, True, mask_type
    )[0]
    x.add_(src)
    if not norm_first:
        x = norm(x, first)
    before = x
    if norm_first:
        x = norm(x, second)
    x = functional.linear(x, *up)
    x = functional.gelu(x) if gelu and x.device.type == "cuda" else x.relu_()
    x = functional.linear(x, *down)
    x.add_(before)
    return x if norm_first else norm(x, second)


def _attention(
    query: _Tensor,
    key: _Tensor,
    value: _Tensor,
    width: int,
    heads: int,
    qkv: _Tensor,
    qkv_bias: _Tensor,
    out: _Tensor,
    out_bias: _Tensor,
    mask: _Tensor | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> tuple[_Tensor, _Tensor | None]:
    if query.is_nested:
        raise EstimateError(_RAGGED)
    fits = mask is None and not need_weights and width // heads % 8 == 0
    if query.device.type == "cuda" and fits:
        # The projections are there until the end.
        projected, attended = _fused(query, heads, qkv, qkv_bias)
        return functional.linear(attended, out, out_bias), None
    batch, length, _ = query.shape
    projected = functional.linear(query, qkv)
    parts = projected.new_empty(3, batch, heads, length, width // heads)
    del projected
    q, k, v = parts.unbind()
    scores = torch.matmul(q, k.transpose(2, 3))
    if mask is not None:
        mask = mask.to(torch.bool).contiguous()
        scores = torch.empty_like(scores)
    # The result is written to where the query was.
    weights = None if not need_weights else scores
    del scores, k, v
    found = functional.linear(q.transpose(1, 2).reshape(batch, length, width), out, out_bias)
    del q, parts
    if weights is not None and average:
        weights = weights.sum(1).div_(heads)
    return found, weights


def _fused(query: _Tensor, heads: int, qkv: _Tensor, qkv_bias: _Tensor) -> tuple[_Tensor, _Tensor]:
    """Return the projections and what attends to them, as a fused kernel computes it."""
    batch, width = len(query), query.shape[-1]
    x = functional.linear(query, qkv, qkv_bias)
    q, k, v = (c.view(batch, -1, heads, width // heads).transpose(1, 2) for c in x.chunk(3, -1))
    if x.dtype in (torch.float16, torch.bfloat16):
        found = fake_tensors.FLASH_ATTENTION(q, k, v)[0]
    else:
        found = fake_tensors.EFFICIENT_ATTENTION(q, k, v, None, False)[0]
    return x, found.transpose(1, 2).reshape(batch, -1, width)


_FAST_PATHS: Final[Mapping[object, Callable[..., object]]] = {
    fake_tensors.ENCODER_LAYER: _layer,
    fake_tensors.MULTI_HEAD_ATTENTION: _attention,
}
