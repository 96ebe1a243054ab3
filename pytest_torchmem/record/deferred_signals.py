"""Has the handlers of signals wait while a recording is neither begun nor ended.

What a handler raises, a time limit of the test's for one, comes out of whatever Python runs at that
moment. In the middle of a cut it would leave a session that nobody knows, for the whole process.
"""

from __future__ import annotations

# The module `signal` makes a text of a handler; that of asyncio's has all its task refers to.
import _signal  # type: ignore[import-not-found]
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from signal import Signals, valid_signals
from threading import get_ident, main_thread
from types import FrameType
from typing import Final

from pytest_torchmem.record.patches.python_tracing import quiet

_Handler = Callable[[int, FrameType | None], object]

_OURS: Final = f"{Path(__file__).parents[1]}/"
# The process cannot go on without an answer to these.
_FAULTS: Final = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGSYS"}
_NUMBERS: Final = sorted(
    int(number)
    for number in valid_signals()
    if not isinstance(number, Signals) or number.name not in _FAULTS
)


class DeferredSignals(AbstractContextManager[None]):
    """Keeps the handlers written in Python from running in the block.

    Those whose signals came run at its end, in their order, with the frame of the program's that
    was interrupted; what one raises is raised there. Python runs handlers on the main thread alone,
    so elsewhere there is nothing to do.
    """

    _is_on = False

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._came: list[int] = []
        #: One within another does nothing.
        self._defers = get_ident() == main_thread().ident and not DeferredSignals._is_on

    def __enter__(self) -> None:
        if self._defers:
            DeferredSignals._is_on = True
            try:
                self._put_ours()
            except BaseException:
                self._put_back()
                raise

    @quiet
    def _put_ours(self) -> None:
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        self._came.append(number)

    @quiet
    def _put_back(self) -> None:
        DeferredSignals._is_on = False
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:
                _signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        if self._defers:
            self._put_back()
        if self._came:
            with ExitStack() as later:
                for number in reversed(self._came):
                    later.callback(self._handlers[number], number, _programs_frame())


def _programs_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame
