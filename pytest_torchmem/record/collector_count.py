"""Keeps the recorder's own objects from deciding when Python's collector runs."""

from __future__ import annotations

import gc

from pytest_torchmem.contexts import Around
from pytest_torchmem.record.torch_api.compiler import untraced


class KeptCount:
    """Keeps what a block makes out of the count of new objects after which the collector runs.

    A program's own cycles are then freed when they are without us. The count itself cannot be set,
    and an object that Python keeps for its next use is never taken off it: the threshold goes up by
    what the block has left in the count, until the next collection sets that to zero.
    """

    def __init__(self) -> None:
        self._own = gc.get_threshold()
        self._moved: tuple[int, int, int] | None = None

    def install(self) -> None:
        """Notice the collector's runs."""
        gc.callbacks.append(self._on_collection)

    def remove(self) -> None:
        """Let the collector run when it would."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)
        self._move_back()

    def kept(self) -> Around[tuple[bool, int]]:
        """Run the collector not at all in the block, and after it as if there had been none."""
        return Around(_pause, self._restore)

    def _restore(self, before: tuple[bool, int]) -> None:
        was_enabled, count = before
        first, *others = own = gc.get_threshold()
        more = gc.get_count()[0] - count
        # With a threshold of zero the collector is off.
        if first and more:
            if not self._is_moved():
                self._own = own
            gc.set_threshold(max(1, first + more), *others)
            self._moved = gc.get_threshold()
        if was_enabled:
            gc.enable()

    @untraced
    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._move_back()

    def _move_back(self) -> None:
        if self._is_moved():
            gc.set_threshold(*self._own)
        self._moved = None

    def _is_moved(self) -> bool:
        """Return whether the threshold is still ours: the body may have set another."""
        return self._moved is not None and gc.get_threshold() == self._moved


def _pause() -> tuple[bool, int]:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled, gc.get_count()[0]
