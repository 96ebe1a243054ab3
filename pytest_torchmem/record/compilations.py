"""Hears of compilations while a body runs, to learn what the generated code stands for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_torchmem.record import torch_api


class CompilationWatch:
    """Calls ``done`` after each compilation, while its graphs are alive.

    The recording goes on meanwhile: operators around a compilation are open, and the profiler must
    not be stopped and started below an open one.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._callbacks: Any = None

    def install(self) -> None:
        """Begin to listen, unless the compiler is not even imported or this listens already."""
        callbacks = torch_api.compiler_callbacks()
        if callbacks is not None and self._callbacks is None:
            callbacks.register_end_callback(self._end)
            self._callbacks = callbacks

    def remove(self) -> None:
        if self._callbacks is not None:
            self._callbacks.remove_end_callback(self._end)
            self._callbacks = None

    def _end(self, *args: Any) -> None:
        self._done()
