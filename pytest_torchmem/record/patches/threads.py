"""Threads whose allocations nobody sees.

The profiler records the thread that started it, and on a GPU the engine's own. A thread that the
body starts, or a pool that was there before, allocates unseen on the CPU. What it did cannot be
known, but that it ran torch can: then the result says so instead of being too small in silence.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.record.torch_api.dynamo import untraced

# Which of how many threads it is depends on what ran before.
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
        for event in _events(root):
            if not _is_python(event):
                self._recorded.add(thread)
                return
            if thread not in self._calling and _is_torch(event):
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
    return isinstance(event.extra_fields, (profiler.PyCallFields, profiler.PyCCallFields))


def _events(root: profiler.ProfilerEvent) -> Iterator[profiler.ProfilerEvent]:
    waiting = [root]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
