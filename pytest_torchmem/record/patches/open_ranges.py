"""Knows whether the recording may be interrupted.

An operator or annotation that is open when the profiler stops writes its end into the session that
is gone, as soon as the next one has begun. So the profiler must not be stopped and started again
below one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from pytest_torchmem.values.errors import RecordingError

_TORCH: Final = f"{Path(torch.__file__).parent}/"
# Decorators of torch's, such as no_grad, call the user's code without an operator around it.
_HARMLESS: Final = ("/utils/_contextlib.py",)
# Neither do these, between a conversion of a module and the swap of its tensors.
_CONVERSION: Final = (*_HARMLESS, "/nn/modules/module.py", "/torch/utils/__init__.py")


class OpenRanges:
    """Counts the ``record_function`` ranges that are open, and looks for calls of torch around."""

    def __init__(self) -> None:
        self._open = 0
        self._around = 0
        self._original: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Begin to count. What torch is calling already, as ``mp.spawn`` does, is not counted."""
        self._around = _calls_by_torch()
        annotation: Any = torch.autograd.profiler.record_function
        enter, leave = self._original = (annotation.__enter__, annotation.__exit__)

        def counted_enter(block: Any) -> Any:
            self._open += 1
            return enter(block)

        def counted_leave(block: Any, *error: Any) -> None:
            self._open -= 1
            leave(block, *error)

        annotation.__enter__ = counted_enter
        annotation.__exit__ = counted_leave

    def remove(self) -> None:
        if self._original is not None:
            annotation: Any = torch.autograd.profiler.record_function
            annotation.__enter__, annotation.__exit__ = self._original
            self._original = None

    def require_none_open(self) -> None:
        """Raise `RecordingError` inside a ``record_function`` block or a call of torch."""
        if not self.none_open():
            raise RecordingError(
                "this cannot be done inside a record_function block, an autograd function, a hook "
                "or anything else that torch calls; read a region's numbers, or estimate, after it"
            )

    def none_open(self) -> bool:
        """Whether `require_none_open` raises nothing."""
        return self._open <= 0 and _calls_by_torch() <= self._around

    def in_conversion_at_most(self) -> bool:
        """Whether nothing is open, and torch is calling nothing but a module's conversion."""
        return self._open <= 0 and _calls_by_torch(_CONVERSION) <= self._around


def _calls_by_torch(harmless: tuple[str, ...] = _HARMLESS) -> int:
    """Return how many functions of torch's are being called, below pytest where that is."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/_pytest/" not in frame.f_code.co_filename:
        file = frame.f_code.co_filename
        count += file.startswith(_TORCH) and not file.endswith(harmless)
        frame = frame.f_back
    return count
