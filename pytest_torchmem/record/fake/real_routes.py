"""Functions that take another way for fake tensors than for real ones, brought to the real way.

torch avoids writing into tensors of subclasses, which fake ones are, and computes for them what a
subclass might want to differentiate. See ``isTensorSubclassLike`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, fake_tensors

_Tensor = torch.Tensor
_Function = Callable[..., _Tensor]
_ROWS: Final = 2
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


def take_real_routes(patches: Installed) -> None:
    """Let functions of the program run the operators that they run on real tensors."""
    for name, replacement in zip(fake_tensors.DIFFERENT_FOR_FAKES, _REPLACEMENTS, strict=True):
        patches.replace(name, _bound_to(replacement))


def _bound_to(replacement: Callable[..., _Tensor]) -> Callable[[_Function], _Function]:
    return lambda plain: partial(replacement, plain)


def _linear(
    plain: _Function, input: _Tensor, weight: _Tensor, bias: _Tensor | None = None
) -> _Tensor:
    """The bias is added in place to a product of what is not laid out as rows."""
    if not isinstance(input, _Tensor) or bias is None or not _is_plain(bias):
        return plain(input, weight, bias)
    as_rows = input.dim() <= _ROWS or input.is_contiguous()
    if as_rows or torch.is_autocast_enabled(input.device.type):
        return plain(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


def _is_plain(tensor: _Tensor) -> bool:
    """Return whether a real tensor would be of no subclass, and within no transform."""
    known = isinstance(tensor, fake_tensors.FakeTensor)
    return known or (type(tensor) in _PLAIN and not autograd.is_wrapper(tensor))


def _svdvals(plain: _Function, A: _Tensor, **named: object) -> _Tensor:  # noqa: N803
    """Vectors are computed for a gradient alone."""
    if named or _wants_gradient(A):
        return plain(A, **named)
    values: _Tensor = fake_tensors.SVD(A, False, False)[1]
    return values


def _eigvalsh(
    plain: _Function,
    A: _Tensor,  # noqa: N803
    UPLO: str = "L",  # noqa: N803
    **named: object,
) -> _Tensor:
    if named or _wants_gradient(A):
        return plain(A, UPLO, **named)
    values: _Tensor = fake_tensors.EIGH(A, UPLO, False)[0]
    return values


def _wants_gradient(tensor: _Tensor) -> bool:
    return torch.is_grad_enabled() and getattr(tensor, "requires_grad", False)


_REPLACEMENTS: Final[tuple[Callable[..., _Tensor], ...]] = (_linear, _svdvals, _eigvalsh)
