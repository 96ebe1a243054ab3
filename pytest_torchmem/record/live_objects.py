"""What is alive in this process, asked of Python's garbage collector.

A process with torch in it holds some hundred thousand objects, and looking at each of them takes
longer than a small test. So they are looked at in as few steps as Python allows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import compress
from typing import Any


def instances_of(classes: Iterable[type[Any]]) -> list[Any]:
    """Return every living object of one of ``classes`` or of a class below one.

    Looks at the type and never at ``__class__``: a proxy among the objects must not be woken.
    """
    wanted = _with_subclasses(classes)
    objects = gc.get_objects()
    # No step of this loop is in Python.
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))


def _with_subclasses(classes: Iterable[type[Any]]) -> set[type[Any]]:
    found: set[type[Any]] = set()
    waiting = list(classes)
    while waiting:
        found.add(kind := waiting.pop())
        # Of the class itself: a metaclass may have a method of that name.
        waiting += set(type.__subclasses__(kind)) - found
    return found
