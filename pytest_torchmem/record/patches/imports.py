"""Keeps the Python calls of imports out of a recording.

An import is millions of calls: what takes two seconds would take half a minute, and gigabytes. What
is allocated meanwhile is recorded as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import TracingPause
from pytest_torchmem.record.torch_api.dynamo import untraced

# An import statement calls it, and only for a module that is not there yet.
_FIND_AND_LOAD: Final = "importlib._bootstrap._find_and_load"


class ImportWatch:
    """Suspends the Python tracer while the calling thread imports, and calls ``done`` after it.

    Attributes:
        importing: Whether it imports now.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = untraced(done)
        self._tracing = TracingPause()
        self.importing = False

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        patches.finally_do(self._tracing.resume)
        patches.replace(_FIND_AND_LOAD, self._resting)

    def _resting(self, original: Any) -> Any:
        here, tracing, done = threading.get_ident(), self._tracing, self._done

        def _find_and_load(name: str, import_: Any) -> Any:
            # Who measures coverage with a trace function must see the calls.
            if self.importing or threading.get_ident() != here or sys.gettrace() is not None:
                return original(name, import_)
            self.importing = True
            tracing.suspend()
            try:
                return original(name, import_)
            finally:
                tracing.resume()
                self.importing = False
                done()

        # Python leaves the frames of importing out of tracebacks, by the name of their file.
        code = _find_and_load.__code__
        _find_and_load.__code__ = code.replace(co_filename=original.__code__.co_filename)
        return _find_and_load
