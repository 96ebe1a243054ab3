"""Looking for what keeps retained memory alive, where a test fails for it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_torchmem.analysis.verdict import RETAINED, Verdict, explain_retained

if TYPE_CHECKING:
    from pytest_torchmem.analysis.gpu_questions import Estimate
    from pytest_torchmem.measurement import BodyMeasurement, Region


def explained(verdict: Verdict, source: BodyMeasurement | Region | Estimate) -> Verdict:
    """Return a verdict that says what keeps alive what was retained, if that is what failed."""
    find_holders = getattr(source, "find_holders", None)  # an estimate has left nothing behind
    if find_holders is None or not any(f.key in RETAINED for f in verdict.findings):
        return verdict
    return explain_retained(verdict, find_holders())


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
