"""Keeps the count of new objects after which Python's collector runs as it is without us."""

from __future__ import annotations

import gc
from collections.abc import Callable
from gc import disable, enable, get_count, get_threshold, isenabled, set_threshold

from pytest_torchmem.contexts import Around
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api.compiler import untraced


class KeptCount:
    """Keeps what a block makes out of the count of new objects after which the collector runs.

    Then a program's own cycles are freed at the moment at which they are freed without us. The
    count itself cannot be set, and an object that Python keeps for its next use is never taken off
    it. So the threshold goes up by what the block has left in the count, until the next collection
    sets the count to zero.

    A cut, which has such a block, may come after any call of a function of C, also of one here. So
    what is noted of the threshold is noted before the threshold is set.
    """

    def __init__(self) -> None:
        self._own = get_threshold()
        self._moved: tuple[int, int, int] | None = None

    def install(self, patches: Installed) -> None:
        """Notice the collector's runs, and tell whoever asks the program's own threshold."""
        gc.callbacks.append(self._on_collection)

        def own(_: object) -> Callable[[], tuple[int, int, int]]:
            return lambda: self._own if self._is_moved() else get_threshold()

        patches.replace("gc.get_threshold", own)

    def remove(self) -> None:
        """Let the collector run when it would."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self._move_back()

    def kept(self) -> Around[tuple[bool, int]]:
        """Keep the collector from running in the block, and its count as if there were no block."""
        return Around(_pause, self._restore)

    def _restore(self, before: tuple[bool, int]) -> None:
        was_enabled, count = before
        first, second, third = own = get_threshold()
        more = get_count()[0] - count
        # With a threshold of zero the collector is off.
        if first and more:
            if not self._is_moved():
                self._own = own
            self._moved = moved = (max(1, first + more), second, third)
            set_threshold(*moved)
        if was_enabled:
            enable()

    @untraced
    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._move_back()

    def _move_back(self) -> None:
        moved = self._moved
        if self._is_moved():
            set_threshold(*self._own)
        # A cut may have moved it again.
        if self._moved is moved:
            self._moved = None

    def _is_moved(self) -> bool:
        """Return whether the threshold is still ours: the body may have set another."""
        moved = self._moved
        return moved is not None and moved == get_threshold()


def _pause() -> tuple[bool, int]:
    was_enabled = isenabled()
    disable()
    return was_enabled, get_count()[0]
