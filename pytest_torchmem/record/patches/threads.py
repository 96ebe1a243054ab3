"""Threads beside the recording one: those whose allocations nobody sees, and gloo's.

The profiler records the thread that started it, and on a GPU the engine's own. A thread that the
body starts, or a pool that was there before, allocates unseen on the CPU. What it did cannot be
known, but that it ran torch can: then the result says so instead of being too small in silence.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import quiet
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.record.torch_api.compiler import untraced

# The number in a thread's name: it depends on how many threads ran before.
_NUMBER: Final = re.compile(r"[-_]\d+")
# A thread that called this many functions and none of torch's is left alone.
_PATIENCE: Final = 20_000
_LAYERS: Final = str(Path(torch.__file__).parent / "nn")
# How the Python tracer names a builtin function: of ``torch``, of a tensor, of a layer.
_TRACED: Final = re.compile(r"<built-in (?:method (\w+) of (type|\w+) object at|function (\w+)>)")


class ThreadWatch:
    """Learns the names of other threads that run torch while a body is recorded."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._existing: list[threading.Thread] = []
        self._recorded: set[int] = set()
        self._calling: set[int] = set()

    def install(self, patches: Installed) -> None:
        """Begin to watch threads that start from now on."""
        here = threading.current_thread()
        self._existing = [thread for thread in threading.enumerate() if thread is not here]
        # Someone who profiles new threads would be thrown out.
        if threading.getprofile() is None:
            patches.note("threading.setprofile", self._stop)
            threading.setprofile(self._on_event)
        for name in profiler.GETTERS:
            patches.replace(name, self._hidden)

    def _hidden(self, getter: Callable[[], object]) -> Callable[[], object]:
        @wraps(getter)
        def getprofile() -> object:
            found = getter()
            is_ours = isinstance(found, _Watched) or found == self._on_event
            return None if is_ours else profiler.users_function(found)

        return getprofile

    def _stop(self) -> None:
        if threading.getprofile() == self._on_event:
            threading.setprofile(None)

    def look_at(self, result: profiler.ProfilerResult) -> None:
        """Look for torch's functions in threads that the Python tracer saw and nothing else did.

        ``result`` is the kineto result of a finished session.
        """
        if not self._existing:
            return
        for root in result.experimental_event_tree():
            if root.start_tid not in self._recorded:
                self._look_at_thread(root)

    def _look_at_thread(self, root: profiler.ProfilerEvent) -> None:
        """Note whether a call's thread is one that is recorded, or runs torch unseen."""
        thread = root.start_tid
        # To read what is called takes much longer: it is not done for the recording's own thread.
        if not all(map(_is_python, _events(root))):
            self._recorded.add(thread)
        elif thread not in self._calling and any(map(_is_torch, _events(root))):
            self._calling.add(thread)

    def names(self) -> list[str]:
        # A stretch in which the recording thread itself ran no operator says nothing of it.
        unseen = self._calling - self._recorded
        return sorted({*self._names, *(["one from before the body"] if unseen else [])})

    def _on_event(self, frame: FrameType, event: str, function: object) -> None:
        watched = _Watched(self._names)
        sys.setprofile(watched)
        watched(frame, event, function)


class _Watched:
    """The profile function of one thread, until it is known to run torch."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._left = _PATIENCE

    @untraced
    def __call__(self, frame: FrameType, event: str, function: object) -> None:
        self._left -= 1
        of_torch = (event == "c_call" and _makes_tensors(function)) or (
            event == "call" and frame.f_code.co_filename.startswith(_LAYERS)
        )
        if of_torch:
            self._names.add(_NUMBER.sub("", threading.current_thread().name))
        if of_torch or self._left <= 0:
            sys.setprofile(None)


def _makes_tensors(function: object) -> bool:
    """Return whether a builtin function is one of torch's that work on tensors."""
    owner = getattr(function, "__self__", None)
    return (
        isinstance(owner, torch.Tensor) or getattr(function, "__module__", "") in dispatcher.MAKERS
    )


def _is_torch(event: profiler.ProfilerEvent) -> bool:
    """Return whether an event of the Python tracer is a call of such a function."""
    if not (match := _TRACED.match(profiler.name_of(event))):
        return False
    method, owner, function = match.groups()
    if function:
        return dispatcher.is_layer_function(function)
    return owner in ("Tensor", "Parameter") or (owner == "type" and hasattr(torch, method))


def _is_python(event: profiler.ProfilerEvent) -> bool:
    return type(profiler.fields_of(event)) in (profiler.PyCallFields, profiler.PyCCallFields)


def _events(root: profiler.ProfilerEvent) -> Iterator[profiler.ProfilerEvent]:
    waiting = [root]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += reversed(event.children)


# Linux alone tells what a thread does. Torch 2.6 gives the threads no name yet.
_THREADS: Final = Path("/proc/self/task")
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
