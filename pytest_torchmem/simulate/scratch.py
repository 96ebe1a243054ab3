"""Scratch memory of CUDA's libraries whose size the simulated runtime does not know."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Final

from pytest_torchmem.simulate.process import simulated_here

# Their numbers in runtime/libraries.cpp.
_LIBRARIES: Final = ("cuDNN", "cuSOLVER", "cuFFT", "NCCL")


def unknown_scratch() -> dict[str, int]:
    """Return how often each library was called so far that would have wanted scratch memory.

    There is none where no GPU is simulated.
    """
    if not simulated_here():
        return {}
    try:
        # torch has loaded the runtime for all to see, or not at all.
        count = ctypes.CDLL(None).torchmem_unknown_scratch
    except AttributeError:
        return {}
    count.restype = ctypes.c_long
    return {name: int(count(number)) for number, name in enumerate(_LIBRARIES)}


def scratch_sentences(before: Mapping[str, int]) -> tuple[str, ...]:
    """Return a sentence for each library that was called since ``before`` was counted."""
    now = unknown_scratch()
    calls = {name: count - before.get(name, 0) for name, count in now.items()}
    return tuple(
        f"the figures are a lower bound: {name} was called {_times(count)} on a simulated GPU, "
        f"and what it takes for itself is counted as 0 bytes"
        for name, count in calls.items()
        if count
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
