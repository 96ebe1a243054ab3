"""Keeps the compiler's own work out of a recording.

The Python tracer would see every call of it, which makes a compilation thirty times slower, and
what it allocates on the way depends on what its cache on disk holds: none of it is memory of the
body.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pytest_torchmem.record import torch_api


class CompilationPause:
    """Pauses something while torch.compile compiles, on the thread that made this object.

    ``pause`` says whether there was anything to pause; only then ``resume`` follows. ``done`` is
    called after each compilation, on whatever thread, while its graphs are alive.

    A backward graph may be compiled inside the backward pass, where no profiler session can be
    ended and begun. There only the Python tracer stops, and ``lost_stacks`` is set: until the next
    session what is allocated can be seen, but not from which line.
    """

    def __init__(
        self, pause: Callable[[], bool], resume: Callable[[], None], done: Callable[[], None]
    ) -> None:
        self.lost_stacks = False
        self._pause = pause
        self._resume = resume
        self._done = done
        self._thread = threading.get_ident()
        self._paused = False
        self._callbacks: Any = None

    def install(self) -> None:
        """Begin to listen, unless the compiler is not even imported or this listens already."""
        callbacks = torch_api.compiler_callbacks()
        if callbacks is not None and self._callbacks is None:
            callbacks.register_start_callback(self._begin)
            callbacks.register_end_callback(self._end)
            self._callbacks = callbacks

    def remove(self) -> None:
        if self._callbacks is not None:
            self._callbacks.remove_start_callback(self._begin)
            self._callbacks.remove_end_callback(self._end)
            self._callbacks = None

    def _begin(self, *args: Any) -> None:
        if self._paused:
            return
        if threading.get_ident() != self._thread or torch_api.in_backward():
            self.lost_stacks |= torch_api.stop_python_tracer()
        else:
            self._paused = self._pause()

    def _end(self, *args: Any) -> None:
        self._done()
        if self._paused and threading.get_ident() == self._thread:
            self._paused = False
            self._resume()
