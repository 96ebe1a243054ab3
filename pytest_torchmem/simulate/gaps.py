"""The gaps of a simulated GPU: what it cannot know, counted while a program runs on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import dropwhile
from pathlib import Path
from types import CodeType
from typing import Final

from pytest_torchmem.simulate import GPU_VARIABLE, RELEASES_VARIABLE
from pytest_torchmem.simulate.uses import decides
from pytest_torchmem.values.results import Result

# Their numbers in runtime/libraries.cpp.
_LIBRARIES: Final = ("cuDNN", "cuSOLVER", "cuSPARSE", "cuSPARSELt")
_CUDNN, _CUFFT = 0, 4
# What was read, see operators/device_memory.h.
_SHAPE, _COUNT, _NUMBER, _MASK = range(4)
_SHOWN_BY_TORCH: Final = ("_tensor_str.py", "testing" + os.sep)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Counts since the program began; all are 0 where no GPU is simulated.

    Attributes:
        scratch: For each library, how often it was called and would have wanted scratch memory.
        bounded: How often that was of a size that is known to be below some number.
        reads: How often the host read values that are not exact.
        decisions: How often what nobody computed chose a shape, a count or a branch, or may have.
    """

    scratch: tuple[int, ...] = ()
    bounded: int = 0
    reads: int = 0
    decisions: int = 0


def gaps_so_far() -> Gaps:
    """Return the counts of this process."""
    if not os.environ.get(GPU_VARIABLE):
        return Gaps()
    import ctypes  # without a simulated GPU nobody waits for it

    try:
        # Where torch has loaded the runtime, its symbols are global.
        runtime = ctypes.CDLL(None)
        scratch, reads = runtime.torchmem_unknown_scratch, runtime.torchmem_unknown_reads
        decisions = runtime.torchmem_decisions
    except AttributeError:
        return Gaps()
    scratch.restype = reads.restype = decisions.restype = ctypes.c_long
    counts = tuple(int(scratch(number)) for number in range(len(_LIBRARIES)))
    return Gaps(counts, _bounded_scratch(0, 0, None), int(reads()), int(decisions()))


def bounded_scratch(before: Gaps, device: str) -> list[tuple[int, int, int]]:
    """Return when a library took scratch on a device since ``before``, how much more than what was
    counted it may have been, and which library.

    Times are in nanoseconds since 1970, sizes in bytes.
    """
    import ctypes

    count = gaps_so_far().bounded - before.bounded
    rows = (ctypes.c_int64 * (4 * count))()
    _bounded_scratch(before.bounded, count, rows)
    calls = zip(rows[::4], rows[1::4], rows[2::4], rows[3::4], strict=True)
    return [
        (time_ns, most, library)
        for time_ns, most, number, library in calls
        if device == f"cuda:{number}"
    ]


def _why(libraries: Collection[int]) -> str:
    """Return why a peak has two ends, where these libraries took scratch."""
    cudnn = os.environ.get(RELEASES_VARIABLE, "").rpartition(", ")[2] or "cuDNN"
    reasons = {
        _CUDNN: f"{cudnn} planned, and another release may choose one of the seven plans that it "
        "ranks next",
        _CUFFT: "a GPU decides how much memory cuFFT takes for itself, which is at most 8 complex "
        "elements for each that it transforms",
    }
    return "; ".join(reasons[library] for library in sorted({*libraries}))


def _bounded_scratch(first: int, room: int, out: object) -> int:
    import ctypes

    scratch = ctypes.CDLL(None).torchmem_bounded_scratch
    scratch.restype = ctypes.c_long
    return int(scratch(ctypes.c_long(first), ctypes.c_long(room), out))


def lower_bound_sentences(before: Gaps) -> tuple[str, ...]:
    """Return a sentence for each library that took since ``before`` what nobody can bound."""
    now = gaps_so_far()
    earlier = before.scratch or (0,) * len(now.scratch)
    calls = [count - old for count, old in zip(now.scratch, earlier, strict=True)]
    return tuple(
        f"the figures are a lower bound: the body called {name} {_times(count)}, and on a "
        "simulated GPU the scratch of its kernels counts as 0 bytes"
        for name, count in zip(_LIBRARIES, calls, strict=False)
        if count
    )


def inexact_reads_sentence(before: Gaps) -> str:
    """Return a sentence if values that are not exact were read since ``before``, or ``""``."""
    if not (reads := gaps_so_far().reads - before.reads):
        return ""
    line = _noted_line("torchmem_unknown_read_line", before.reads)
    return (
        f"the body read values that are not exact on a simulated GPU {_times(reads)}"
        f"{f', first in {line}' if line else ''}; "
        "a shape or a branch that depends on them may differ"
    )


def decision_sentence(before: Gaps) -> str:
    """Return a sentence if what nobody computed has decided since ``before``, or ``""``.

    The memory of such a body may be any other: a loop that finds no work takes none.
    """
    if not (decisions := gaps_so_far().decisions - before.decisions):
        return ""
    import ctypes

    place_of = ctypes.CDLL(None).torchmem_decision_place
    place_of.restype = ctypes.c_long
    numbers = range(before.decisions, before.decisions + decisions)
    places = [place for n in numbers if _decides(place := int(place_of(ctypes.c_long(n))))]
    if not places:
        return ""
    line = _noted_line("torchmem_place_line", places[0])
    return (
        f"a shape, a count or a branch rests {_times(len(places))} on values that a simulated GPU "
        f"did not compute{f', first in {line}' if line else ''}: a GPU may need other memory"
    )


@cache
def _decides(place: int) -> bool:
    """Tell whether what nobody computed decides where it is read at a place.

    What torch prints and compares in tests decides nothing. A number may have been read in torch
    for the program, which goes on with it.
    """
    import ctypes

    runtime = ctypes.CDLL(None)
    kind = runtime.torchmem_place_kind(ctypes.c_long(place))
    frames: list[tuple[CodeType, int]] = []
    code, instruction = ctypes.c_void_p(), ctypes.c_int()
    here = ctypes.c_long(place), ctypes.byref(code), ctypes.byref(instruction)
    while runtime.torchmem_place_frame(here[0], ctypes.c_size_t(len(frames)), *here[1:]):
        frames.append((ctypes.cast(code, ctypes.py_object).value, instruction.value))
    torch = str(Path(sys.modules["torch"].__file__ or "").parent) + os.sep
    shown = tuple(torch + name for name in _SHOWN_BY_TORCH)
    if any(code.co_filename.startswith(shown) for code, _ in frames):
        return False
    if kind == _SHAPE:
        return True
    if kind != _COUNT:
        frames = list(dropwhile(lambda frame: frame[0].co_filename.startswith(torch), frames))
    return decides(frames, is_count=kind == _COUNT, is_mask=kind == _MASK)


def _noted_line(symbol: str, number: int) -> str:
    """Return a line of the program that was noted, as a path from here; ``""`` if none was."""
    import ctypes

    line_of = getattr(ctypes.CDLL(None), symbol)
    line_of.restype = ctypes.c_char_p
    file, _, line = line_of(ctypes.c_long(number)).decode(errors="replace").rpartition(":")
    if not file:
        return ""
    here = os.path.relpath(file)
    parts = Path(file).parts[-2:] if here.startswith(os.pardir) else [here]
    return f"{os.path.join(*parts)}:{line}"  # noqa: PTH118  # a path only to show


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def with_gaps(
    result: Result, before: Gaps, most_with: Callable[[Iterable[tuple[int, int]]], int]
) -> Result:
    """Return a result that says what could not be known since ``before`` was counted.

    ``most_with`` returns the most that the peak can be where scratch of libraries was there, too: a
    time and a size for each call. Of a region only that is said, and nothing of a real device.
    """
    if not before.scratch:
        return result
    lower = lower_bound_sentences(before)
    if not lower:
        scratch = bounded_scratch(before, result.device)
        at_most = most_with((time_ns, most) for time_ns, most, _ in scratch)
        result = replace(result, at_most=at_most if scratch else result.peak.total)
    sentences = [result.interval and f"{result.interval}: {_why([call[2] for call in scratch])}"]
    if not result.name:
        sentences += [*lower, decision_sentence(before), inexact_reads_sentence(before)]
    return replace(result, blind_spots=(*result.blind_spots, *filter(None, sentences)))
