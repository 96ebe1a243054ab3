"""The gaps of a simulated GPU: what it cannot know, counted while a program runs on it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytest_torchmem.simulate import GPU_VARIABLE

# Their numbers in runtime/libraries.cpp.
_LIBRARIES: Final = ("cuDNN", "cuSOLVER", "cuFFT", "cuSPARSE", "cuSPARSELt")


@dataclass(frozen=True, slots=True)
class Gaps:
    """Counts since the program began; all are 0 where no GPU is simulated.

    Attributes:
        scratch: For each library, how often it was called and would have wanted scratch memory.
        reads: How often the host read values that are not exact.
    """

    scratch: tuple[int, ...] = ()
    reads: int = 0


def gaps_so_far() -> Gaps:
    """Return the counts of this process."""
    if not os.environ.get(GPU_VARIABLE):
        return Gaps()
    import ctypes  # without a simulated GPU nobody waits for it

    try:
        # Where torch has loaded the runtime, its symbols are global.
        runtime = ctypes.CDLL(None)
        scratch, reads = runtime.torchmem_unknown_scratch, runtime.torchmem_unknown_reads
    except AttributeError:
        return Gaps()
    scratch.restype = reads.restype = ctypes.c_long
    return Gaps(tuple(int(scratch(number)) for number in range(len(_LIBRARIES))), int(reads()))


def gap_sentences(before: Gaps) -> tuple[str, ...]:
    """Return a sentence for each gap that has opened since ``before`` was counted."""
    now = gaps_so_far()
    earlier = before.scratch or (0,) * len(now.scratch)
    calls = [count - old for count, old in zip(now.scratch, earlier, strict=True)]
    lower = tuple(
        f"the figures are a lower bound: the body called {name} {_times(count)}, and on a "
        "simulated GPU the scratch of its kernels counts as 0 bytes"
        for name, count in zip(_LIBRARIES, calls, strict=False)
        if count
    )
    read = inexact_reads_sentence(before)
    return (*lower, read) if read else lower


def inexact_reads_sentence(before: Gaps) -> str:
    """Return a sentence if values that are not exact were read since ``before``, or ``""``."""
    if not (reads := gaps_so_far().reads - before.reads):
        return ""
    line = _line_of_read(before.reads)
    return (
        f"the body read values that are not exact on a simulated GPU {_times(reads)}"
        f"{f', first in {line}' if line else ''}; "
        "a shape or a branch that depends on them may be another one"
    )


def _line_of_read(number: int) -> str:
    """Return the line of the program that read a value, as a path from here; ``""`` if none did."""
    import ctypes

    line_of = ctypes.CDLL(None).torchmem_unknown_read_line
    line_of.restype = ctypes.c_char_p
    file, _, line = line_of(ctypes.c_long(number)).decode(errors="replace").rpartition(":")
    if not file:
        return ""
    here = os.path.relpath(file)
    shown = Path(file).parts[-2:] if here.startswith(os.pardir) else [here]
    return f"{os.path.join(*shown)}:{line}"  # noqa: PTH118  # a path only to show


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
