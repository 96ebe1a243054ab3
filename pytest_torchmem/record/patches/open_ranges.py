"""The calls of torch's that are open around a program's line, and the ranges that it opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.errors import RecordingError

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
    again below one.

    A loader opens one around each ``__next__``, in which a dataset may run for as long as it likes.
    It is opened only for a profiler of the body's.
    """

    def __init__(self) -> None:
        self._open = 0
        #: How many of torch's functions were being called when the recording began.
        self.around = 0

    def install(self, patches: Installed) -> None:
        """Begin to count. What torch is calling already, as ``mp.spawn`` does, is not counted."""
        self.around = _calls_by_torch(_HARMLESS)
        annotation = "torch.autograd.profiler.record_function"
        patches.replace(f"{annotation}.__enter__", self._opening)
        patches.replace(f"{annotation}.__exit__", self._closing)

    def _opening(self, enter: Callable[..., object]) -> Callable[..., object]:
        def opened(block: torch.autograd.profiler.record_function) -> object:
            if _is_loaders(block) and not profiler.front_end_is_active():
                return block
            self._open += 1
            return enter(block)

        return opened

    def _closing(self, leave: Callable[..., object]) -> Callable[..., object]:
        def closed(block: torch.autograd.profiler.record_function, *error: object) -> object:
            if block.record is None and _is_loaders(block):
                return None
            try:
                return leave(block, *error)
            finally:
                self._open -= 1

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
        return self._open <= 0 and _calls_by_torch(but) <= self.around

    def may_be_cut(self) -> bool:
        """Return whether nothing is open, and torch neither opens or closes a range nor compiles.

        Torch's other functions in Python are as good as the body's: an operator that calls Python
        is found on the stack of the process.
        """
        return self._open <= 0 and not any(file.startswith(_UNCUT) for file in _files_called())


def _is_loaders(block: torch.autograd.profiler.record_function) -> bool:
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
