"""Notices compilations, and keeps the compiler's own Python calls out of a recording.

The Python tracer would see every call of the compiler: millions of them for a small model, which
makes its compilation thirty times slower.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import TracingPause
from pytest_torchmem.record.torch_api import autograd, compiler
from pytest_torchmem.record.torch_api.dynamo import untraced


class CompilationWatch:
    """Suspends the Python tracer while torch.compile compiles.

    ``done`` is called after each compilation, on whatever thread, while its graphs are alive.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._tracing = TracingPause()
        self._thread = threading.get_ident()

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        callbacks = compiler.callbacks()
        if callbacks is None:
            return
        patches.finally_do(self._tracing.resume)

        def clearing(clear: Callable[[], None]) -> Callable[[], None]:
            def clear_others() -> None:
                try:
                    clear()
                finally:
                    callbacks.register_start_callback(self._begin)
                    callbacks.register_end_callback(self._end)

            return clear_others

        callbacks.register_start_callback(self._begin)
        patches.note(compiler.START_CALLBACK, lambda: callbacks.remove_start_callback(self._begin))
        callbacks.register_end_callback(self._end)
        patches.note(compiler.END_CALLBACK, lambda: callbacks.remove_end_callback(self._end))
        patches.replace(compiler.CLEAR_CALLBACKS, clearing)

    @untraced
    def _begin(self, *args: object) -> None:
        # The threads of the autograd engine, where backward graphs may be compiled, never end.
        if threading.get_ident() == self._thread or autograd.in_backward():
            self._tracing.suspend()

    @untraced
    def _end(self, *args: object) -> None:
        self._done()
        self._tracing.resume()
