"""Notices compilations, and keeps the compiler's own Python calls out of a recording.

The Python tracer would see every call of the compiler: millions of them for a small model, which
makes its compilation thirty times slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pytest_torchmem.record.patches.python_tracing import TracingPause
from pytest_torchmem.record.torch_api import autograd, compiler


class CompilationWatch:
    """Suspends the Python tracer while torch.compile compiles.

    ``done`` is called after each compilation, on whatever thread, while its graphs are alive.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._tracing = TracingPause()
        self._thread = threading.get_ident()
        self._callbacks: Any = None

    def install(self) -> None:
        """Begin to listen, unless the compiler is not even imported or this listens already."""
        callbacks = compiler.callbacks()
        if callbacks is None or self._callbacks is not None:
            return
        self._callbacks = callbacks
        self._register()
        clear = callbacks.clear

        def clear_others() -> None:
            """What ``torch._dynamo.reset()`` calls, in the middle of a body."""
            try:
                clear()
            finally:
                self._register()

        callbacks.clear = clear_others

    def _register(self) -> None:
        self._callbacks.register_start_callback(self._begin)
        self._callbacks.register_end_callback(self._end)

    def remove(self) -> None:
        if self._callbacks is not None:
            del self._callbacks.clear
            self._callbacks.remove_start_callback(self._begin)
            self._callbacks.remove_end_callback(self._end)
            self._callbacks = None
        self._tracing.resume()

    def _begin(self, *args: Any) -> None:
        # The threads of the autograd engine, where backward graphs may be compiled, never end.
        if threading.get_ident() == self._thread or autograd.in_backward():
            self._tracing.suspend()

    def _end(self, *args: Any) -> None:
        self._done()
        self._tracing.resume()
