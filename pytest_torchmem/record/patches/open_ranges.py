"""The calls of torch's that are open around a program's line, and the ranges that it opened."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final, TypeAlias

import torch

from pytest_torchmem.contexts import Around
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import quiet
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.errors import RecordingError

_Range: TypeAlias = torch.autograd.profiler.record_function
_TORCH: Final = f"{Path(torch.__file__).parent}/"
# These files of torch's call the user's code without an operator around it: decorators such as
# no_grad,
_HARMLESS: Final = ("/utils/_contextlib.py",)
# modules,
_MODULES: Final = (*_HARMLESS, "/nn/modules/module.py", "/nn/modules/container.py")
# and the conversion of a module, down to the swap of its tensors.
CONVERSION: Final = (*_HARMLESS, "/nn/modules/module.py", "/torch/utils/__init__.py")
# These call the engine.
BACKWARD: Final = (*_MODULES, "/torch/_tensor.py", "/autograd/__init__.py", "/autograd/graph.py")
# These begin and end ranges and sessions,
_PROFILERS: Final = ("autograd/profiler.py", "profiler/profiler.py")
# and these compile, while the Python tracer may be suspended.
_COMPILERS: Final = (
    *("_dynamo/", "_inductor/", "_functorch/_aot_autograd/", "_functorch/aot_autograd.py"),
    *("_export/", "export/", "fx/", "jit/"),
)
_UNCUT: Final = tuple(f"{_TORCH}{place}" for place in (*_PROFILERS, *_COMPILERS))


class OpenRanges:
    """Counts the ``record_function`` ranges that are open, and looks for calls of torch around.

    An operator or annotation that is open when the profiler stops writes its end into the session
    that is gone, as soon as the next one has begun. So the profiler must not be stopped and started
    again below one; a cut closes the ranges before it, and opens them again after it.

    A loader opens one around each ``__next__``, in which a dataset may run for as long as it likes.
    It is opened only for a profiler of the body's.
    """

    def __init__(self) -> None:
        # Those that are open, with their threads.
        self._open: list[tuple[_Range, int]] = []
        self._enter: Callable[[_Range], object] = _Range.__enter__
        self._leave: Callable[..., object] = _Range.__exit__
        #: How many of torch's functions were being called when the recording began.
        self.around = 0

    def install(self, patches: Installed) -> None:
        """Begin to count. What torch is calling already, as ``mp.spawn`` does, is not counted."""
        self.around = _calls_by_torch(_HARMLESS)
        annotation = "torch.autograd.profiler.record_function"
        patches.replace(f"{annotation}.__enter__", self._opening)
        patches.replace(f"{annotation}.__exit__", self._closing)

    def _opening(self, enter: Callable[..., object]) -> Callable[..., object]:
        self._enter = enter

        def opened(block: _Range) -> object:
            if _is_loaders(block) and not profiler.front_end_is_active():
                return block
            self._open.append((block, threading.get_ident()))
            return enter(block)

        return opened

    def _closing(self, leave: Callable[..., object]) -> Callable[..., object]:
        self._leave = leave

        def closed(block: _Range, *error: object) -> object:
            if block.record is None and _is_loaders(block):
                return None
            try:
                return leave(block, *error)
            finally:
                self._open = [one for one in self._open if one[0] is not block]

        return closed

    def require_none_open(self) -> None:
        """Raise `RecordingError` inside a ``record_function`` block or a call of torch."""
        if not self.none_open():
            raise RecordingError(
                "this cannot be done inside a record_function block, an autograd function, a hook "
                "or anything else that torch calls; read a region's numbers, or estimate, after it"
            )

    def none_open(self, but: tuple[str, ...] = _HARMLESS) -> bool:
        """Return whether `require_none_open` raises nothing, for calls in the files ``but`` too."""
        return not self._open and _calls_by_torch(but) <= self.around

    def may_be_cut(self, *, has_calls: bool) -> bool:
        """Return whether what is open can be `closed`, and torch opens no range and compiles not.

        Torch's other functions in Python are as good as the body's: an operator that calls Python
        is found on the stack of the process. Where a session ``has_calls`` of Python, a range is
        within the call that opened it. Elsewhere it is around all that follows.
        """
        here = threading.get_ident()
        can_be_closed = all(
            has_calls and thread == here and block.run_callbacks_on_exit
            for block, thread in self._open
        )
        return can_be_closed and not any(file.startswith(_UNCUT) for file in _files_called())

    def closed(self) -> Around[None]:
        """Have no range open in the block; those that were are opened again after it."""
        return Around(self._close, self._open_again)

    @quiet
    def _close(self) -> None:
        for block, _ in reversed(self._open):
            self._leave(block, None, None, None)

    @quiet
    def _open_again(self, _: None) -> None:
        for block in [block for block, _ in self._open]:
            self._enter(block)


def _is_loaders(block: _Range) -> bool:
    return str(block.name).startswith("enumerate(DataLoader)#")


def _calls_by_torch(harmless: tuple[str, ...]) -> int:
    """Return how many functions of torch's are being called, below pytest where that is."""
    return sum(file.startswith(_TORCH) and not file.endswith(harmless) for file in _files_called())


def _files_called() -> Iterator[str]:
    """Yield the file of each function that is being called, below pytest where that is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/_pytest/" not in (file := frame.f_code.co_filename):
        yield file
        frame = frame.f_back
