"""Where a test is, as its body and its fixture see it."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where a test is, seen from its body."""

    BEFORE = "before the test body"
    WARMING_UP = "in a warm-up run"
    COUNTING = "in a run that is not recorded, and whose allocator is asked"
    MEASURING = "in the measured run"
    UNMEASURED = "in a run that cannot be measured"
    AFTER = "after the test body"


class WarmupOver(BaseException):
    """Ends a warm-up run where the body reads a measured number: there is none to give it.

    Not an `Exception`, so that no handler in the body takes it for one of its own.
    """
