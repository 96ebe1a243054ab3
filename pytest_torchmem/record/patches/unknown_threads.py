"""Threads that neither `threading` nor `_thread` has begun, such as those of a library in C.

Python numbers the states of its threads. A library's thread that calls Python gets a state for that
call, so a number that no known thread has tells that there was such a thread, also after its end.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ClassVar, Final

from pytest_torchmem.record.patches import THREAD_STARTERS, Installed
from pytest_torchmem.record.patches.python_tracing import interpreter_call

_interpreter = interpreter_call("PyInterpreterState_Get", ctypes.c_void_p)
_new_state = interpreter_call("PyThreadState_New", ctypes.c_void_p)
_number_of = interpreter_call("PyThreadState_GetID", ctypes.c_uint64)
_clear = interpreter_call("PyThreadState_Clear", None)
_delete = interpreter_call("PyThreadState_Delete", None)

#: In this folder Linux describes each thread of the process.
TASKS: Final = Path("/proc/self/task")
# Threads of autograd's engine, which a process's first backward pass begins for its GPUs. They are
# recorded.
_ENGINE: Final = b"pt_autograd"
# All of torch's: those of its process groups call Python as often as a hook or an object wants it.
_TORCHS: Final = b"pt_"


class UnknownThreads:
    """Counts the threads that called Python since `install` and that nobody knows."""

    #: How often threads of the recorder's own timers called Python.
    ours: ClassVar[int] = 0

    def __init__(self) -> None:
        self._known: list[str] = []
        self._ours_before = 0
        self._tasks: frozenset[Path] = frozenset()
        self._first = 0

    def install(self, patches: Installed) -> None:
        """Begin to count."""
        patches.replace(THREAD_STARTERS[sys.version_info < (3, 13)], self.counted)
        self._tasks = _tasks()
        self._ours_before = UnknownThreads.ours
        self._first = _next_number()

    def counted(self, start: Callable[..., int]) -> Callable[..., int]:
        """Return a function that starts threads, with what it starts known."""

        @wraps(start)
        def start_thread(*args: object, **kwargs: object) -> int:
            started = start(*args, **kwargs)
            # Other threads start some, too, and only this is done at once.
            self._known.append("")
            return started

        return start_thread

    def count(self) -> int:
        """Return how many there were; a thread that calls Python twice may count twice.

        None are told where torch has threads of its own beside the engine's, as in a job of several
        ranks: these cannot be told apart from others.
        """
        number = _next_number()
        ours = UnknownThreads.ours - self._ours_before
        unknown = number - self._first - len(self._known) - ours - 1
        # This look had a number, too.
        self._known.append("")
        if unknown > 0:
            names = {task: name_of_task(task) for task in _tasks()}
            if any(n.startswith(_TORCHS) and not n.startswith(_ENGINE) for n in names.values()):
                return 0
            unknown -= sum(names[task].startswith(_ENGINE) for task in names.keys() - self._tasks)
        return max(0, unknown)


def _next_number() -> int:
    """Return the number that a new thread's state has."""
    state = ctypes.c_void_p(_new_state(ctypes.c_void_p(_interpreter())))
    number = int(_number_of(state))
    _clear(state)
    _delete(state)
    return number


def _tasks() -> frozenset[Path]:
    return frozenset(TASKS.iterdir()) if sys.platform == "linux" else frozenset()


def name_of_task(task: Path) -> bytes:
    """Return the name that a thread has for Linux; nothing once it has ended."""
    return read_task(task / "comm").strip()


def read_task(file: Path) -> bytes:
    """Return what a file says of a thread; nothing once that has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
