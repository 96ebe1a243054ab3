"""Runs code with a profile function of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def profiled(note: Callable[[FrameType, str, object], None], body: Callable[[], object]) -> None:
    """Call ``body`` and tell ``note`` of each call in it; then have the function of before."""
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(before)
