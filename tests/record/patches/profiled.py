"""Runs code with a profile function that stands for torch's tracer: it rests when that does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


class TraceContext:
    """Has the name of torch's, by which that is told from a profile function of a program's own."""

    def __init__(self, note: Callable[[FrameType, str, object], None]) -> None:
        self._note = note

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        self._note(frame, event, argument)


def profiled(note: Callable[[FrameType, str, object], None], body: Callable[[], object]) -> None:
    """Call ``body`` and tell ``note`` of each call in it; then have the function of before."""
    before = sys.getprofile()
    sys.setprofile(TraceContext(note))
    try:
        body()
    finally:
        sys.setprofile(before)
