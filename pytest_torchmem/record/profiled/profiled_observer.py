"""The source of a trace where the library cannot be had: a plain session of torch's profiler.

It follows each call of Python, and so costs a body many times as much. It sees the thread that
began it and the engine's, none of the program's own ranges, and no body that runs torch's profiler.
It keeps alive what a transform of `torch.func` wraps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from time import time_ns

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.profiled.kineto import MARKED, TreeReader, place_marks
from pytest_torchmem.record.recorded_tables import Tables
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.errors import RecordingError


class ProfiledObserver:
    """Records by torch's profiler; see `observers.Observer`."""

    def __init__(self) -> None:
        self._reader = TreeReader()
        self.strings, self.device_names = self._reader.strings, self._reader.device_names
        self._session: profiler.Session | None = None
        self._parts: list[Tables] = []
        self._error: RecordingError | None = None

    now_ns = staticmethod(time_ns)

    def prepare(self) -> None:
        """Do nothing: the profiler has the time of day."""

    def begin(self) -> None:
        """Begin a session. Raises `RecordingError` where another one is active."""
        session = profiler.Session()
        session.start()
        self._session = session

    def mark(self, number: int) -> None:
        """Put a mark where the body is now."""
        if self._session is not None:
            with profiler.RecordFunction(f"{MARKED}{number}"):
                pass

    def sees_end(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the recording will have the end of a storage that is there already."""
        return storage.device.type != "cpu"

    def pause(self) -> None:
        """End the session and read it."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            self._parts.append(self._reader.read(session.stop()))
        except RecordingError as error:
            self._error = error
            raise

    go_on = begin

    def end(self) -> None:
        """End what goes on; a session of the body's that took its place is left alone."""
        with contextlib.suppress(RecordingError):
            self.pause()

    def read(self, marks: NDArray[np.void], known: NDArray[np.uint64]) -> Tables:
        """Return all that was recorded, and fill where the marks stand.

        Raises `RecordingError` where the body ran a profiler of its own.
        """
        if self._error is not None:
            raise self._error
        tables = joined(self._parts)
        place_marks(tables.events, marks, self.strings)
        return tables

    def let_go(self) -> None:
        """Give back what was read."""
        self._parts.clear()


_ABOUT_EVENTS = ("tensors", "allocations", "module_calls", "details")


def joined(parts: Sequence[Tables]) -> Tables:
    """Return the tables of sessions one after the other as those of one."""
    before = np.cumsum([0, *(len(part.events) for part in parts)])[:-1].tolist()
    events = [np.array(part.events) for part in parts]
    for part, first in zip(events, before, strict=True):
        part["end"] += first
        part["parent"][part["parent"] >= 0] += first
    tables = []
    for name in _ABOUT_EVENTS:
        pieces = [np.array(getattr(part, name)) for part in parts]
        for piece, first in zip(pieces, before, strict=True):
            piece["event"] += first
        tables.append(np.concatenate(pieces))
    return Tables(np.concatenate(events), *tables)
