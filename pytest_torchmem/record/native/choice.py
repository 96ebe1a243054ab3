"""The choice of what records: the library in C++, or why it cannot be had here."""

from __future__ import annotations

import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from pytest_torchmem.building.compiler import BuildError
from pytest_torchmem.record.native.compiled_library import CompiledLibrary
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.self_test import tried
from pytest_torchmem.values.errors import RecordingError

_MACHINES: Final = ("x86_64", "aarch64")
_NO_LAYOUT: Final = -1


class Choice:
    """What records in this process.

    Attributes:
        library: None where it cannot be had here.
        has_stacks: Whether it knows the functions of Python around an allocation.
        reasons: Why there is no library, or no stacks: a sentence each.
    """

    _made: ClassVar[Choice | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    @classmethod
    def of_process(cls, say: Callable[[str], None] = lambda _: None) -> Choice:
        """Return the choice, which is made once in a process.

        ``say`` is called before the library is compiled, which takes 10 to 30 s.
        """
        with cls._lock:
            if cls._made is None:
                cls._made = cls(say)
            return cls._made

    def __init__(self, say: Callable[[str], None]) -> None:
        self.library: Library | None = None
        self.has_stacks = False
        self.reasons: list[str] = []
        system, machine = platform.system(), platform.machine()
        if system != "Linux" or machine not in _MACHINES:
            self.reasons.append(
                f"the recorder runs on Linux x86-64 and aarch64, and this is {system} {machine}"
            )
            return
        for library in self._loaded(say):
            if self._install(library):
                break

    def _loaded(self, say: Callable[[str], None]) -> Iterator[Library]:
        """Yield the libraries that could be loaded, the shipped one first."""
        built = CompiledLibrary(Path(torch.__file__).parent, torch.__version__)
        shipped = built.shipped()
        if shipped and (library := self._load(shipped)):
            yield library
        for anew in (False, True):
            try:
                path = built.cached(say, anew=anew)
            except BuildError as error:
                self.reasons.append(_in_short(error))
                return
            if library := self._load(path):
                yield library
                return

    def _load(self, path: Path) -> Library | None:
        try:
            return Library(path)
        except (OSError, AttributeError) as error:
            self.reasons.append(f"the recorder cannot be loaded: {error}")
            return None

    def _install(self, library: Library) -> bool:
        """Take a library if it sees what it must, and note what it does not see."""
        if library.install():
            self.reasons.append("torch's allocator for the CPU is one that cannot be followed")
            return False
        unknown = self._follow_python(library)
        faults = tried(library)
        if faults.memory:
            self.reasons.append(f"the recorder failed its test: {faults.memory}")
            return False
        self.library, self.has_stacks = library, not unknown and not faults.stacks
        # What failed before this one does not matter.
        self.reasons = [] if self.has_stacks else [unknown or f"no stacks: {faults.stacks}"]
        if not self.has_stacks:
            library.follow_python(_NO_LAYOUT, None)
        return True

    @staticmethod
    def _follow_python(library: Library) -> str:
        """Have the library read Python's frames; return why it cannot."""
        call: Any = torch.nn.Module._wrapped_call_impl
        if library.follow_python(_layout(), call.__code__):
            return (
                f"the frames of Python {platform.python_version()}"
                f"{' without its lock' if _is_free_threaded() else ''} are not known: "
                "memory has no source lines"
            )
        return ""


def load() -> Library:
    """Return the library. Raises `RecordingError` where it cannot be had."""
    choice = Choice.of_process()
    if choice.library is None:
        raise RecordingError("; ".join(choice.reasons))
    return choice.library


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
