"""Operators whose results lie otherwise in memory on the CPU than torch says of fake tensors.

A later operator copies what does not lie as it needs it, so a wrong layout is a wrong estimate.
Checked on torch 2.6 and 2.13, with each operator's arguments permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch


def _rows(made: torch.Tensor, _: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(made, memory_format=torch.contiguous_format)


def _as_first(made: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.empty_like(args[0]) if args[0].shape == made.shape else made


def _like(number: int) -> Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]:
    """As one argument lies; where that repeats elements the others decide, as torch says."""

    def laid_out(made: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
        given = args[number]
        is_whole = given.shape == made.shape and all(given.stride())
        return torch.empty_like(given) if is_whole else made

    return laid_out


def _in_format_of(number: int) -> Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]:
    def laid_out(made: torch.Tensor, args: Sequence[torch.Tensor]) -> torch.Tensor:
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(made.dim())
        by_channels = last is not None and args[number].is_contiguous(memory_format=last)
        format_ = last if by_channels else torch.contiguous_format
        return torch.empty_like(made, memory_format=format_)

    return laid_out


_LAYOUTS: Final = {
    "aten::_log_softmax_backward_data": _rows,
    "aten::binary_cross_entropy": _as_first,
    "aten::binary_cross_entropy_backward": _like(1),
    "aten::elu_backward": _like(0),
    "aten::glu_backward": _rows,
    "aten::hardsigmoid_backward": _like(0),
    "aten::hardswish_backward": _like(0),
    "aten::hardtanh_backward": _like(0),
    "aten::huber_loss_backward": _rows,
    "aten::log_sigmoid_backward": _as_first,
    "aten::log_sigmoid_forward": _rows,
    "aten::mse_loss_backward": _rows,
    "aten::native_batch_norm": _in_format_of(0),
    "aten::native_batch_norm_backward": _in_format_of(1),
    "aten::native_layer_norm_backward": _rows,
    "aten::reflection_pad2d": _in_format_of(0),
    "aten::reflection_pad2d_backward": _in_format_of(1),
    "aten::replication_pad2d": _in_format_of(0),
    "aten::replication_pad2d_backward": _in_format_of(1),
    "aten::roll": _in_format_of(0),
    "aten::smooth_l1_loss_backward": _rows,
    "aten::softplus_backward": _like(0),
}


def as_on_the_cpu(name: str, args: Sequence[torch.Tensor], out: object) -> object:
    """Return what an operator made of fake tensors, laid out as the CPU lays it out."""
    layout = _LAYOUTS.get(name)
    made = out[0] if isinstance(out, tuple) else out
    if layout is None or not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return out
    laid_out = layout(made, args)
    if laid_out.stride() == made.stride():
        return out
    return (laid_out, *out[1:]) if isinstance(out, tuple) else laid_out
