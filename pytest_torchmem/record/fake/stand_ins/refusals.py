"""Refuses programs that would go wrong without a word.

Two questions only a CUDA device could answer. On a machine without one autograd ends the process at
the sight of a tensor on a device that torch was built without, and ``autocast("cuda")`` switches
itself off.

Dispatch modes are of one thread: in another one the operators run, and nobody records them. C++
asks fake tensors in places where an error would end the process, so the other thread goes on, and
the refusal comes where the program ends.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Final

import torch

from pytest_torchmem.record.fake.origin import user_line
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import compiler, fake_tensors
from pytest_torchmem.values.errors import EstimateError

_NO_CASTS: Final = (
    "the program casts with autocast('cuda'), which torch switches off on a machine without a CUDA "
    "device; `pytest --torchmem-simulate=H100` measures it on a simulated GPU"
)


class GradientsWanted(BaseException):
    """The program enables gradients, and its tensors are on a device that autograd lacks.

    No ``except Exception`` of a program may take it.
    """


def watch(patches: Installed, *, shown: torch.device, runs_on: torch.device) -> None:
    """Notice both questions in a program that is run for ``shown`` on fakes of ``runs_on``."""
    if not fake_tensors.lacks_device(shown.type):
        return
    if runs_on == shown and not torch.is_grad_enabled():
        patches.replace(fake_tensors.SET_GRAD, _beginning_anew)
    if shown.type == "cuda":
        _watch_casts(patches)


def _beginning_anew(set_grad_enabled: Callable[[bool], None]) -> Callable[[bool], None]:
    def enabling(mode: bool) -> None:
        if mode:
            raise GradientsWanted
        set_grad_enabled(mode)

    return enabling


def _watch_casts(patches: Installed) -> None:
    """Refuse casts. torch has forgotten whether one that was made before would be on."""
    off_on_purpose: set[int] = set()

    def making(init: Callable[..., None]) -> Callable[..., None]:
        def made(
            self: object,
            device_type: str,
            dtype: object = None,
            enabled: bool = True,
            **rest: object,
        ) -> None:
            if device_type == "cuda" and enabled:
                raise EstimateError(_NO_CASTS)
            off_on_purpose.add(id(self))
            init(self, device_type, dtype, enabled, **rest)

        return made

    def entering(enter: Callable[[object], object]) -> Callable[[object], object]:
        def entered(self: object) -> object:
            if getattr(self, "device", "") == "cuda" and id(self) not in off_on_purpose:
                raise EstimateError(_NO_CASTS)
            return enter(self)

        return entered

    patches.replace(fake_tensors.MAKE_AUTOCAST, making)
    patches.replace(fake_tensors.ENTER_AUTOCAST, entering)


_COMPILED: Final = (
    "the program calls what torch.compile compiles{}, whose code keeps and frees other tensors "
    "than the program as it is written; measure it with pytest_torchmem.measure, or for a GPU "
    "with `pytest --torchmem-simulate=H100`. Where torch.compiler.set_stance('force_eager') lets "
    "it run as written, it is estimated so"
)


@contextlib.contextmanager
def refused_if_compiled(patches: Installed) -> Iterator[None]:
    """Raise `EstimateError` where a program has called a compiled function.

    Until its end nothing is compiled: dynamo would never again compile the frames that it meets in
    a dispatch mode. Raised from within, an error would leave the compiler's options behind.
    """
    called: list[str] = []

    def begun(callback: object) -> None:
        now, runs_as_written = compiler.stance()
        if callback and not (runs_as_written and now is not ours):
            line = user_line(sys._getframe(1))
            called.append(f" at {line.file_name}:{line.line}" if line else "")

    _, as_written = compiler.stance()
    try:
        patches.note(compiler.STANCE, compiler.run_as_written())
    except RuntimeError as error:
        raise EstimateError(
            "estimate is called in a function that torch.compile compiles; call it outside"
        ) from error
    ours, _ = compiler.stance()
    if not as_written:
        patches.replace(compiler.BEGIN, lambda _: begun)
    yield
    if called:
        raise EstimateError(_COMPILED.format(called[0]))


_ELSEWHERE: Final = (
    "the program works on tensors in another thread, whose memory an estimate does not see; let it "
    "call the function itself, or measure with pytest_torchmem.measure"
)
_Dispatch = Callable[..., object]


@contextlib.contextmanager
def refused_in_other_threads(
    patches: Installed, mode: fake_tensors.FakeTensorMode
) -> Iterator[set[int]]:
    """Raise `EstimateError` where another thread has worked on fake tensors of ``mode``.

    Yield the threads in which a mode records: autograd's of a device that is there becomes one.
    """
    recording, seen = {get_ident()}, threading.Event()

    def refusing(plain: _Dispatch) -> object:
        def dispatched(
            func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            elsewhere = get_ident() not in recording
            if elsewhere and fake_tensors.has_any_of(mode, (args, kwargs)):
                seen.set()
            return plain(func, types, args, kwargs)

        return staticmethod(dispatched)

    patches.replace(fake_tensors.ELSEWHERE, refusing)
    try:
        yield recording
    except Exception as error:
        if not seen.is_set() or isinstance(error, EstimateError):
            raise
        raise EstimateError(_ELSEWHERE) from error
    if seen.is_set():
        raise EstimateError(_ELSEWHERE)
