"""Keeps the Python calls of TorchScript's parser out of a recording.

``torch.jit.script`` calls a function or more for each token of a source: a tenth of a second would
take two, and hundreds of megabytes. What is allocated meanwhile is recorded as ever.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import TracingPause
from pytest_torchmem.record.torch_api import compiler


class ScriptingWatch:
    """Suspends the Python tracer while the calling thread parses for TorchScript."""

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        here = threading.get_ident()

        def resting(original: Callable[..., object]) -> Callable[..., object]:
            @wraps(original)
            def parse(*args: object, **kwargs: object) -> object:
                # Who measures coverage with a trace function must see the calls.
                if threading.get_ident() != here or sys.gettrace() is not None:
                    return original(*args, **kwargs)
                # A parser calls another: each has a pause of its own.
                tracing = TracingPause()
                tracing.suspend()
                try:
                    return original(*args, **kwargs)
                finally:
                    tracing.resume()

            return parse

        for name in compiler.SCRIPTING:
            patches.replace(name, resting)
