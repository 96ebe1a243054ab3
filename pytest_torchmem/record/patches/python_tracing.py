"""Suspends the Python tracer of a thread, and nothing else.

A profiler session must not be ended and begun again while an operator or an annotation is open:
torch notes the end of these in the session that they began in, which would be gone. CPython itself
can stop calling a tracer for a while instead. Operators and allocations are seen all the time.
"""

from __future__ import annotations

import ctypes
from typing import Any


def _interpreter_call(name: str, result: Any, arguments: list[Any]) -> Any:
    call = getattr(ctypes.pythonapi, name, None)
    if call is not None:
        call.restype, call.argtypes = result, arguments
    return call


# Python 3.10 lacks the two: nothing is suspended there, which costs time but no truth.
_enter = _interpreter_call("PyThreadState_EnterTracing", None, [ctypes.c_void_p])
_leave = _interpreter_call("PyThreadState_LeaveTracing", None, [ctypes.c_void_p])
_current = _interpreter_call("PyThreadState_Get", ctypes.c_void_p, [])


class TracingPause:
    """Suspends tracers and profilers that were set in Python, on one thread.

    The tracer sees neither that the functions on the stack at `suspend` return nor that those on
    the stack at `resume` were called. So both have to be called at the same depth below a function
    that is there all the time.
    """

    def __init__(self) -> None:
        self._thread_state: int | None = None

    def suspend(self) -> None:
        """Suspend on the calling thread; does nothing while suspended."""
        if self._thread_state is None and _enter is not None and _leave is not None:
            self._thread_state = _current()
            _enter(self._thread_state)

    def resume(self) -> None:
        """Undo `suspend`; does nothing where nothing is suspended."""
        if self._thread_state is not None:
            thread_state, self._thread_state = self._thread_state, None
            _leave(thread_state)
