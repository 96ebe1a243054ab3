"""Keeping Python's garbage collector away while something is looked at."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep the garbage collector from running on its own in the block.

    What is in a cycle when the body ends must still be there when somebody asks what holds it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
