"""The choice of what records: the library in C++, or why it cannot be had here."""

from __future__ import annotations

import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

import torch

from pytest_torchmem.building.cpp import BuildError
from pytest_torchmem.record.native.compiled_library import (
    GPU_OBSERVER,
    OBSERVER,
    CompiledLibrary,
    Part,
)
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.self_test import tried
from pytest_torchmem.record.torch_api import modules

_MACHINES: Final = ("x86_64", "aarch64")
_NO_LAYOUT: Final = -1


class Choice:
    """The choice of the recorder in this process.

    Attributes:
        library: None where it cannot be had here.
        has_stacks: Whether it knows the functions of Python around an allocation.
        reasons: Why there is no library, no stacks, or none for a GPU: a sentence each.
    """

    _current: ClassVar[Choice | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def of_process(cls, say: Callable[[str], None] = lambda _: None) -> Choice:
        """Return the choice, which is made once in a process.

        ``say`` is called before the library is compiled, which takes 10 to 30 s.
        """
        with cls._lock:
            if cls._current is None:
                cls._current = cls(say)
            return cls._current

    def __init__(self, say: Callable[[str], None]) -> None:
        self.library: Library | None = None
        self.has_stacks = False
        self.reasons: list[str] = []
        self._watches_gpu: bool | None = None
        system, machine = platform.system(), platform.machine()
        if system != "Linux" or machine not in _MACHINES:
            self.reasons.append(
                f"the recorder runs on Linux x86-64 and aarch64, and this is {system} {machine}"
            )
        else:
            self._take_first(OBSERVER, say, self._install)

    def library_for(
        self, device_type: str, say: Callable[[str], None] = lambda _: None
    ) -> Library | None:
        """Return the library if it sees a device's memory; a GPU has been initialised before."""
        if device_type == "cpu" or self.library is None:
            return self.library if device_type in ("cpu", "cuda") else None
        with self._lock:
            if device_type == "cuda" and self._watches_gpu is None:
                self._watches_gpu = self._take_first(GPU_OBSERVER, say, self._watch_gpu)
        return self.library if device_type == "cuda" and self._watches_gpu else None

    def _take_first(
        self, part: Part, say: Callable[[str], None], take: Callable[[Path], bool]
    ) -> bool:
        """Take the first library that can be loaded; one that was built is built again once."""
        built = CompiledLibrary(part, Path(torch.__file__).parent, torch.__version__)
        problems = []
        try:
            for path in _candidates(built, say):
                try:
                    return take(path)
                except (OSError, AttributeError) as error:
                    problems.append(f"the recorder cannot be loaded: {error}")
        except BuildError as error:
            problems.append(_in_short(error))
        self.reasons += problems
        return False

    def _install(self, path: Path) -> bool:
        """Take a library if it sees what it must, and note what it does not see."""
        library = Library(path)
        if library.install():
            self.reasons.append("torch's allocator for the CPU is one that cannot be followed")
            return False
        unknown = self._follow_python(library)
        faults = tried(library)
        if faults.memory:
            self.reasons.append(f"the recorder failed its test: {faults.memory}")
            return False
        self.library, self.has_stacks = library, not unknown and not faults.stacks
        if not self.has_stacks:
            library.follow_python(_NO_LAYOUT, None)
            self.reasons.append(unknown or f"memory has no source lines: {faults.stacks}")
        return True

    def _watch_gpu(self, path: Path) -> bool:
        watches = self.library is not None and self.library.watch_gpu(path)
        if not watches:
            self.reasons.append("the GPU's allocator is one that cannot be followed")
        return watches

    @staticmethod
    def _follow_python(library: Library) -> str:
        """Have the library read Python's frames; return why it cannot."""
        if library.follow_python(_layout(), modules.CALL_CODE):
            without = " without its lock" if _is_free_threaded() else ""
            return (
                "memory has no source lines: the frames of Python "
                f"{platform.python_version()}{without} are not known"
            )
        return ""


def _candidates(built: CompiledLibrary, say: Callable[[str], None]) -> Iterator[Path]:
    if shipped := built.shipped():
        yield shipped
    yield built.cached(say)
    yield built.cached(say, anew=True)


def _is_free_threaded() -> bool:
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def _layout() -> int:
    """Return the minor release of Python whose frames are as here, or `_NO_LAYOUT`."""
    is_usual = sys.implementation.name == "cpython" and not hasattr(sys, "getobjects")
    return sys.version_info.minor if is_usual and not _is_free_threaded() else _NO_LAYOUT


def _in_short(error: BuildError) -> str:
    """Return what a compiler said first of its errors, or last."""
    lines = str(error).splitlines()
    compiler, _, said = lines[0].partition(" failed: ")
    if not said:
        return lines[0]
    lines[0] = said
    first = next((line for line in lines if "error" in line), lines[-1])
    return f"the recorder could not be compiled: {compiler} says {first.strip()}"
