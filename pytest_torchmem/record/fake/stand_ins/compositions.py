"""Operators that torch makes of others, made of others than usual while a program is estimated.

The dispatcher looks them up, so that it is all one how a program came to the function, and whether
it is torch's own C++ that calls. Only the thread that estimates takes the other way.

Some take another way for fake tensors than for real ones, and are brought to the real way: torch
avoids writing into tensors of subclasses, which fake ones are, and computes for them what a
subclass might want to differentiate. See ``isTensorSubclassLike`` in ``aten/src/ATen/native``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed, found
from pytest_torchmem.record.torch_api import autograd, dispatcher, fake_tensors

#: Gets torch's own way, and what the operator is called with.
Composition = Callable[..., object]

_LOCK: Final = threading.Lock()
_BY_THREAD: Final[dict[str, dict[int, Composition]]] = {}
_PUT_BACK: Final[dict[str, Callable[[], None]]] = {}


def compose(patches: Installed, compositions: Mapping[str, Composition]) -> None:
    """Let operators be made of others in this thread, by names of the table."""
    for name, composition in compositions.items():
        patches.note(name, _put(name, composition))


def _put(name: str, composition: Composition) -> Callable[[], None]:
    thread = get_ident()
    with _LOCK:
        threads = _BY_THREAD.setdefault(name, {})
        if not threads:
            operator = found(name)
            _PUT_BACK[name] = dispatcher.implement(operator, partial(run, operator))
        threads[thread] = composition

    def take_out() -> None:
        with _LOCK:
            del threads[thread]
            if not threads:
                _PUT_BACK.pop(name)()

    return take_out


def run(operator: dispatcher.Operator, /, *args: object, **kwargs: object) -> object:
    """Call the operators that this thread makes an operator of, or torch's own."""
    plain = dispatcher.composed(operator)
    composition = _BY_THREAD.get(f"torch.ops.{operator}", {}).get(get_ident())
    return plain(*args, **kwargs) if composition is None else composition(plain, *args, **kwargs)


_Tensor = torch.Tensor
_Function = Callable[..., _Tensor]
_ROWS: Final = 2
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_ATTENDING: Final = threading.local()


def take_real_routes(patches: Installed) -> None:
    """Let the program run the operators that it runs on real tensors."""
    for_fakes = (_linear, _svdvals, _eigvalsh, _attention, _ctc_loss)
    compose(patches, dict(zip(fake_tensors.DIFFERENT_FOR_FAKES, for_fakes, strict=True)))
    where, _, question = fake_tensors.ASKED_BY_TRANSFORMERS.rpartition(".")
    if hasattr(sys.modules.get(where), question):
        patches.replace(fake_tensors.ASKED_BY_TRANSFORMERS, lambda _: lambda tensor: False)


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
