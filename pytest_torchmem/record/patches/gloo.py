"""Gloo's threads: a wait for a collective waits for them, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from time import monotonic, sleep
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.quiet import quiet

#: The threads of this process, on Linux.
TASKS: Final = Path("/proc/self/task")


def _name_of_task(task: Path) -> bytes:
    """Return the name that a thread has for Linux; nothing once it has ended."""
    return _read_task(task / "comm").strip()


def _read_task(file: Path) -> bytes:
    """Return what a file says of a thread; nothing once that has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


_NAME: Final = b"pt_gloo_runloop"
# A thread may have work of another collective: nobody waits longer than this for it.
_AT_MOST_S: Final = 2.0
_STEP_S: Final = 20e-6


class GlooWatch:
    """Has each wait for a collective wait for gloo's threads, too.

    A thread of the backend holds a collective's tensors until a moment after it has woken who waits
    for the collective. Whichever of the two is last frees what nobody else holds, and the profiler
    sees no free of a thread that it does not know. So whoever waits goes on only when the threads
    are at rest: all frees are then the program's own, and the numbers those of a program in which
    gloo is quick.
    """

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        if torch.distributed.is_available() and TASKS.is_dir():
            patches.replace("torch.distributed.Work.wait", _waiting)


def _waiting(wait: Callable[..., object]) -> Callable[..., object]:
    @wraps(wait)
    def watched(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
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
    threads = [thread for thread in TASKS.iterdir() if _name_of_task(thread) == _NAME]
    until = monotonic() + _AT_MOST_S
    quiet_count = 0
    while threads and quiet_count < 2 and monotonic() < until:
        sleep(_STEP_S)
        quiet_count = 0 if any(map(_is_running, threads)) else quiet_count + 1


def _is_running(thread: Path) -> bool:
    # The letter after the name, which is in parentheses and may hold any.
    return _read_task(thread / "stat").rpartition(b") ")[2].startswith((b"R", b"D"))
