"""Waits for gloo's threads to let go of what they worked on.

A thread of the backend holds a collective's tensors until a moment after it has woken who waits for
the collective. Whichever of the two is last frees what nobody else holds, and the profiler sees no
free of a thread that it does not know. So whoever waits goes on only when the threads are at rest:
all frees are then the program's own, and the numbers those of a program in which gloo is quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Final

import torch

from pytest_torchmem.record.owners.ownership_log import quiet
from pytest_torchmem.record.patches import Installed

# Linux alone tells what a thread does. Torch 2.6 gives the threads no name yet.
_THREADS: Final = Path("/proc/self/task")
_NAME: Final = b"pt_gloo_runloop"
# A thread may have work of another collective: nobody waits longer than this for it.
_AT_MOST_S: Final = 2.0
_STEP_S: Final = 20e-6


class GlooWatch:
    """Has each wait for a collective wait for gloo's threads, too."""

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        if torch.distributed.is_available() and _THREADS.is_dir():
            patches.replace("torch.distributed.Work.wait", _waiting)


def _waiting(wait: Callable[..., object]) -> Callable[..., object]:
    @wraps(wait)
    def watched(*args: object, **kwargs: object) -> object:
        try:
            return wait(*args, **kwargs)
        finally:
            await_gloo()

    return watched


@quiet
def await_gloo() -> None:
    """Return when gloo's threads in this process sleep, for want of work or for another rank.

    One that waits for Python's lock seems to sleep, so each of two looks lets it have that first.
    """
    threads = list(_gloo_threads())
    until = time.monotonic() + _AT_MOST_S
    quiet_count = 0
    while threads and quiet_count < 2 and time.monotonic() < until:
        time.sleep(_STEP_S)
        quiet_count = 0 if any(map(_is_running, threads)) else quiet_count + 1


def _gloo_threads() -> Iterator[Path]:
    """Return the folder in which Linux describes each thread of gloo's."""
    return (thread for thread in _THREADS.iterdir() if _read(thread / "comm").strip() == _NAME)


def _is_running(thread: Path) -> bool:
    # The letter after the name, which is in parentheses and may hold any.
    return _read(thread / "stat").rpartition(b") ")[2].startswith((b"R", b"D"))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the thread has ended
        return b""
