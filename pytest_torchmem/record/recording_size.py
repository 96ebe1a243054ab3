"""Says once, while a body runs, that its recording has become large, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from pytest_torchmem.contexts import ORIGINALS
from pytest_torchmem.record.devices import HostGrowth
from pytest_torchmem.record.patches.open_ranges import COMPILES
from pytest_torchmem.record.patches.python_tracing import quiet
from pytest_torchmem.record.safe_points import PASSING
from pytest_torchmem.record.tree.growing_tables import Tables
from pytest_torchmem.record.tree.python_calls import library_paths
from pytest_torchmem.values.errors import LongBodyError
from pytest_torchmem.values.units import format_size

# Where the tables of a body take more, we say so: some 1,500,000 small operators.
_MUCH_BYTES: Final = 512 * 2**20
# Where a session that cannot be cut has grown to that, we say so: 40,000 small operators.
_MUCH_UNCUT_BYTES: Final = 128 * 2**20
#: What is in the way of a cut there.
IMPORTS: Final = "a module is imported there"
# While the tracer rests, what grows is the importer's or the compiler's.
_OTHERS: Final = (IMPORTS, COMPILES)


class RecordingSize:
    """Follows the size of a recording: of its tables, and of a session that cannot be cut.

    ``say`` gets a sentence at most, which is in ``notes`` then.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._held_bytes = self._event_count = 0
        self._growth = HostGrowth()
        self.notes: tuple[str, ...] = ()

    def begin_session(self) -> None:
        """Forget how large the last session became."""
        self._growth.begin()

    @quiet
    def look(self, reason: str) -> None:
        """Say that a session has become large which cannot be cut, for that ``reason``."""
        # The body may have replaced ``open``: what that raises would be raised in the body.
        with ORIGINALS.back():
            self._growth.look(counts=reason not in _OTHERS)
            if self._growth.size_bytes >= _MUCH_UNCUT_BYTES and reason not in (*_OTHERS, PASSING):
                self._say_once(
                    f"this body's recording cannot be cut in {_place()}: {reason}; the process has "
                    f"grown by {format_size(self._growth.size_bytes)} beside its tensors "
                    "meanwhile, and the end of the recording takes up to ten times as much again; "
                    "let the body do less there, or measure a part of it in a test of its own"
                )

    def add(self, tables: Tables) -> None:
        """Add the tables of a session, and say so where all are large."""
        self._held_bytes += tables.size_bytes
        self._event_count += len(tables.events)
        if self._held_bytes >= _MUCH_BYTES:
            self._say_once(
                f"this body's recording has {self._event_count:,} events and holds "
                f"{format_size(self._held_bytes)} by now, and the analysis takes twice as much "
                "again; let the body do less (a second step needs what the first one does), or "
                "measure a part of it in a test of its own"
            )

    def _say_once(self, text: str) -> None:
        if not self.notes:
            self.notes = (str(LongBodyError(text)),)
            self._say(self.notes[0])


def _place() -> str:
    """Return the function of the program's that is running, and its line."""
    libraries, frame = tuple(f"{folder}/" for folder in library_paths()), sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"
