"""Operators that take another way for fake tensors than for real ones, brought to the real way.

torch avoids writing into tensors of subclasses, which fake ones are, and computes for them what a
subclass might want to differentiate. See ``isTensorSubclassLike`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch

from pytest_torchmem.record.fake.stand_ins.compositions import compose
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, fake_tensors

_Tensor = torch.Tensor
_Function = Callable[..., _Tensor]
_ROWS: Final = 2
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATTENDING: Final = threading.local()


def take_real_routes(patches: Installed) -> None:
    """Let the program run the operators that it runs on real tensors."""
    for_fakes = (_linear, _svdvals, _eigvalsh, _attention, _ctc_loss)
    compose(patches, dict(zip(fake_tensors.DIFFERENT_FOR_FAKES, for_fakes, strict=True)))


def _linear(
    plain: _Function, input: _Tensor, weight: _Tensor, bias: _Tensor | None = None
) -> _Tensor:
    """The bias is added in place to a product of what is not laid out as rows."""
    if bias is None or not _is_plain(bias):
        return plain(input, weight, bias)
    as_rows = input.dim() <= _ROWS or input.is_contiguous()
    if as_rows or torch.is_autocast_enabled(input.device.type):
        return plain(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def _attention(plain: Callable[..., object], *args: object, **named: object) -> object:
    """Add the mask in place to the scores; meanwhile `adds_in_place` says so."""
    before = adds_in_place()
    _ATTENDING.now = all(map(_is_plain, fake_tensors.tensors_in([*args])))
    try:
        return plain(*args, **named)
    finally:
        _ATTENDING.now = before


def adds_in_place() -> bool:
    """Return whether this thread is in a function that adds in place to what it alone has."""
    return getattr(_ATTENDING, "now", False)


def _is_plain(tensor: _Tensor) -> bool:
    """Return whether a real tensor would be of no subclass, and within no transform."""
    known = isinstance(tensor, fake_tensors.FakeTensor)
    return known or (type(tensor) in _PLAIN and not autograd.is_wrapper(tensor))


def _svdvals(plain: _Function, matrix: _Tensor, **named: object) -> _Tensor:
    """Vectors are computed for a gradient alone."""
    if named or _wants_gradient(matrix):
        return plain(matrix, **named)
    values: _Tensor = fake_tensors.SVD(matrix, False, False)[1]
    return values


def _eigvalsh(plain: _Function, matrix: _Tensor, triangle: str = "L") -> _Tensor:
    if _wants_gradient(matrix):
        return plain(matrix, triangle)
    values: _Tensor = fake_tensors.EIGH(matrix, triangle, False)[0]
    return values


def _ctc_loss(
    _: _Function,
    log_probs: _Tensor,
    targets: _Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    *how: object,
) -> _Tensor:
    """Lengths that are tensors: C++ would write numbers into a fake one to divide by."""
    lengths = map(torch.tensor, (input_lengths, target_lengths))
    made: _Tensor = torch.ops.aten.ctc_loss.Tensor(log_probs, targets, *lengths, *how)
    return made


def _wants_gradient(tensor: _Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad
