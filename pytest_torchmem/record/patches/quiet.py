"""Our calls in a body: hidden from its modes, its tracers and Python's collector."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.torch_api import dispatcher
from pytest_torchmem.record.torch_api.compiler import set_frame_callback

_P = ParamSpec("_P")
_R = TypeVar("_R")

# They get values of ctypes': to make them of others is a call, which fails deep in a recursion.
_enter: Final = ctypes.pythonapi.PyThreadState_EnterTracing
_leave: Final = ctypes.pythonapi.PyThreadState_LeaveTracing
_current: Final = ctypes.pythonapi.PyThreadState_Get
_enter.restype = _leave.restype = None
_current.restype = ctypes.c_void_p


def quiet(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide what a method does from the body's function modes, its tracers and the collector.

    A debugger, a profiler or coverage sees the calls that it sees bare. The collector runs after a
    number of new objects: if it counted the method's, it would run earlier than without us. Dynamo
    traces none of them. A signal's handler may raise after any call; tracing goes on all the same.
    """

    @wraps(method)
    def quietly(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        thread_state = None
        try:
            thread_state = ctypes.c_void_p(_current())
            _enter(thread_state)
        except BaseException as error:
            # Deep in a recursion the call itself fails, and there is nothing to undo.
            if thread_state is not None and not isinstance(error, RecursionError):
                _leave(thread_state)
            raise
        try:
            traced_by = set_frame_callback(None)
            try:
                with gc_paused(), dispatcher.unseen_by_modes():
                    return method(*args, **kwargs)
            finally:
                set_frame_callback(traced_by)
        finally:
            _leave(thread_state)

    return quietly
