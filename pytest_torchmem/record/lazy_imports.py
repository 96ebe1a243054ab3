"""Keeps torch's own lazy imports out of a recording.

The first optimizer of a process imports torch's compiler, and with it some thousand modules. The
Python tracer would record every call of that: half a minute instead of two seconds, and none of it
is memory of the body.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from pytest_torchmem.record import torch_api

_OWN_PACKAGES: Final = ("torch.", "functorch", "sympy", "triton")


class ImportPause:
    """A finder for ``sys.meta_path`` that pauses something while torch imports parts of itself.

    Only imports by the thread that made this object count, and of nested ones the outermost.
    """

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause = pause
        self._resume = resume
        self._thread = threading.get_ident()
        self._busy = False

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the module as it would have been found, with a loader that pauses."""
        if self._busy or not name.startswith(_OWN_PACKAGES):
            return None
        if threading.get_ident() != self._thread:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None
            if find is not None and finder is not self:
                spec = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    stand_in: Any = _PausingLoader(spec.loader, self)
                    spec.loader = stand_in
                return spec
        return None

    def run(self, execute: Callable[[], None]) -> None:
        """Execute a module's code with the recording paused."""
        # The autograd engine puts back what its thread had when it is done, and with that the
        # profiler session of that time: no other can begin inside.
        if self._busy or torch_api.in_backward():
            execute()
            return
        self._busy = True
        self._pause()
        try:
            execute()
        finally:
            self._resume()
            self._busy = False


class _PausingLoader:
    """Stands in for a loader until its module has run, and then steps aside."""

    def __init__(self, loader: Any, pause: ImportPause) -> None:
        self._loader = loader
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._pause.run(lambda: self._loader.exec_module(module))
