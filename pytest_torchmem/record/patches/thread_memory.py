"""The memory that other threads take on the CPU, counted by torch's older profiler.

The profiler of a recording sees the thread that started it. The older one keeps its state with a
thread, too, so it can run on others beside it: it notes the size and the time of each allocation
and free, without an address. That tells how much other threads hold at a time, and not what for.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from functools import wraps
from threading import current_thread, get_ident
from time import time_ns
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.patches import RUN_ITEM, Installed
from pytest_torchmem.record.torch_api import profiler

# The number in a thread's name: it depends on how many threads ran before.
_NUMBER: Final = re.compile(r"[-_]\d+")
# A recording keeps no more moments than these of what other threads held.
_MOMENTS: Final = 8192


def thread_name() -> str:
    """Return the calling thread's name, without its number."""
    # To ask for the current thread makes one of a thread that `threading` does not know.
    name: str = getattr(_LOCAL, "name", "") or current_thread().name
    return _NUMBER.sub("", name)


def name_thread(name: str) -> None:
    """Give the calling thread a name that nobody else knows."""
    _LOCAL.name = name


class ThreadMemory:
    """Counts what other threads allocate on the CPU, in stretches that each opens and closes.

    Memory of other devices cannot be counted so: who allocates there is known by name. ``seen`` is
    called on such a thread before it runs torch.
    """

    def __init__(self, device: torch.device, seen: Callable[[], None]) -> None:
        self._is_counted = device.type == "cpu"
        self._seen = seen
        self._changes: list[tuple[int, int]] = []
        self._names: set[str] = set()
        self._uncounted: set[str] = set()
        self._open: dict[int, str] = {}
        self.is_over = False
        #: Threads of executors whose work was counted, as torch numbers them.
        self.of_executors: set[int] = set()

    def install(self, patches: Installed) -> None:
        """Count all work of executors from now on, those that were there before included."""
        patches.finally_do(self._end)
        if "concurrent.futures.thread" in sys.modules:
            patches.replace(RUN_ITEM, self._counted_item)

    def _end(self) -> None:
        self.is_over = True
        self._uncounted |= set(self._open.values())

    def _counted_item(self, run: Callable[..., object]) -> Callable[..., object]:
        @wraps(run)
        def counted(*args: object, **kwargs: object) -> object:
            opened = self.open(is_of_executor=True)
            try:
                return run(*args, **kwargs)
            finally:
                if opened:
                    self.close()

        return counted

    def open(self, *, is_of_executor: bool = False) -> bool:
        """Begin to count on the calling thread; False where that cannot be, or was done before."""
        if hasattr(_LOCAL, "stretch"):
            return False
        name = thread_name()
        self._seen()
        if not self._is_counted or profiler.profiler_is_active():
            self._uncounted.add(name)
            return False
        _LOCAL.stretch = _Counting(self, is_of_executor=is_of_executor)
        self._open[get_ident()] = name
        return True

    def close(self) -> None:
        """End what `open` began on the calling thread; nothing where that is over."""
        _LOCAL.__dict__.pop("stretch", None)

    def add(self, changes: list[tuple[int, int]], executors: int | None) -> None:
        """Take what the calling thread counted; ``executors`` numbers a thread of an executor."""
        name = self._open.pop(get_ident(), "")
        if executors is not None:
            self.of_executors.add(executors)
        if changes and not self.is_over:
            self._changes += changes
            self._names.add(name)

    @property
    def was_used(self) -> bool:
        """True once another thread has run torch."""
        return bool(self._names or self._open or self._uncounted)

    def uncounted(self) -> set[str]:
        """Return the names of threads of which it is not known what they took.

        They profile themselves, or had not come to the end of a stretch.
        """
        return {*self._uncounted, *self._open.values()}

    def held(self) -> dict[str, list[int] | list[str]]:
        """Return who allocated, and the bytes that all of them held after each change, by time.

        Times are in nanoseconds on the recording's clock. Bytes may be below zero: a thread frees
        what another one made.
        """
        changes = np.array(sorted(self._changes), np.int64).reshape(-1, 2)
        times, held = changes[:, 0], np.cumsum(changes[:, 1])
        kept = _outline(held)
        return {
            "names": sorted(self._names),
            "times_ns": times[kept].tolist(),
            "held_bytes": held[kept].tolist(),
        }


def _outline(held: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows that tell how a curve rises: all, or the least and most of equal parts."""
    if len(held) <= _MOMENTS:
        return np.arange(len(held))
    parts = np.array_split(np.arange(len(held)), _MOMENTS // 2)
    ends = [(part[held[part].argmin()], part[held[part].argmax()]) for part in parts]
    return np.unique(np.array(ends).ravel())


class _Counting:
    """A time in which torch counts on one thread; it is over when that thread lets go of it."""

    def __init__(self, memory: ThreadMemory, *, is_of_executor: bool) -> None:
        self._memory = memory
        self._is_of_executor = is_of_executor
        self._thread = get_ident()
        self._began_ns = time_ns()
        profiler.begin_counting()

    def __del__(self) -> None:
        # Python lets go of it where a thread ends, on that thread.
        if get_ident() == self._thread:
            counted = profiler.end_counting()
            began_ns = self._began_ns
            changes = [(began_ns + ns, size) for ns, size in counted.changes]
            self._memory.add(changes, counted.thread if self._is_of_executor else None)


# Each thread's stretch, and its name where nobody else has one for it; it goes with the thread.
_LOCAL: Final = threading.local()
