"""Has the handlers of signals wait while a session begins or ends, and while a hook of ours runs.

What a handler raises, a time limit of the test's for one, comes out of whatever Python runs at that
moment. In the middle of a cut it would leave a session that nobody knows, for the whole process,
and where we ask an object that may not answer, it would be taken for the object's answer.
"""

from __future__ import annotations

# The module `signal` makes a text of a handler; that of asyncio's has all its task refers to.
import _signal  # type: ignore[import-not-found]
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from signal import Signals, valid_signals
from threading import get_ident, main_thread
from types import FrameType
from typing import Final

from pytest_torchmem.record.recursion_room import RecursionRoom

_Handler = Callable[[int, FrameType | None], object]

_OURS: Final = f"{Path(__file__).parents[1]}/"
# The process cannot go on without an answer to these.
_FAULTS: Final = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGSYS"}
_NUMBERS: Final = sorted(
    int(number)
    for number in valid_signals()
    if not isinstance(number, Signals) or number.name not in _FAULTS
)


class DeferredSignals:
    """Keeps the handlers written in Python from running between `begin` and `end`.

    Those whose signals came run in `handle`, in their order, with the frame of the program's that
    was interrupted; what one raises is raised there. Python runs handlers on the main thread alone,
    so elsewhere there is nothing to do. Nor do ours reach the recursion limit meanwhile.
    """

    _is_on = False

    def __init__(self) -> None:
        self._handlers: dict[int, _Handler] = {}
        self._room = RecursionRoom()
        #: The numbers of the signals that came.
        self.came: list[int] = []
        #: One within another does nothing.
        self._defers = get_ident() == main_thread().ident and not DeferredSignals._is_on

    def begin(self) -> None:
        """Put our own in the place of each handler."""
        if self._defers:
            self._room.begin()
            DeferredSignals._is_on = True
            try:
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._note)
            except BaseException:
                self.end()
                raise

    def _note(self, number: int, _: FrameType | None) -> None:
        self.came.append(number)

    def end(self) -> None:
        """Put the handlers back, where they are still ours."""
        if self._defers:
            self._room.end()
            DeferredSignals._is_on = False
            try:
                self._put_back()
            finally:
                # One that is back already may have raised before the others were.
                self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) == self._note:
                _signal.signal(number, handler)

    def handle(self) -> None:
        """Run the handlers of the signals that came, though one raises."""
        with ExitStack() as later:
            for number in reversed(self.came):
                later.callback(self._handlers[number], number, _programs_frame())


def _programs_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame
