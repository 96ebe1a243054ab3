"""The choice of what records: the library in C++ once it was tested, or why there is none here."""

from __future__ import annotations

import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

import numpy as np
import torch

from pytest_torchmem.building import BuildError
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.native.compiled_library import (
    GPU_OBSERVER,
    OBSERVER,
    CompiledLibrary,
    Part,
)
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import RowReader, resolved
from pytest_torchmem.record.recorded_tables import Tables
from pytest_torchmem.record.torch_api import modules
from pytest_torchmem.record.torch_api.dispatcher import undispatched, unseen_by_modes
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import EventKind, Role

_MACHINES: Final = ("x86_64", "aarch64")
_NO_LAYOUT: Final = -1
#: What ``x + 1`` takes for three numbers: 1 as an integer, as a number like x, and the sum.
_BYTES = [4, 8, 12]
# It calls these in all releases; more may stand between them.
_CALLED = {"aten::empty_strided", "aten::copy_"}


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


# One small sum is recorded before anything that the library sees is believed.


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of what the library sees, in words; ``""`` where there is none.

    Attributes:
        memory: Of operators and memory.
        stacks: Of the functions of Python around them.
    """

    memory: str
    stacks: str


def tried(library: Library) -> Faults:
    """Record one small sum with a library and compare."""
    columns, frame = RowReader(library), sys._getframe()
    with gc_paused(), unseen_by_modes(), undispatched():
        numbers = torch.ones(3, dtype=torch.float32, device="cpu")
        library.prepare()
        library.begin()
        try:
            result, line = numbers + 1, frame.f_lineno
            del result
        finally:
            library.end()
    try:
        tables = columns.read()
        memory = _wrong_memory(tables, columns, numbers.untyped_storage().data_ptr())
        stacks = memory or _wrong_stack(tables, columns, _calls(frame, line))
        return Faults(memory, stacks)
    except Exception as error:  # of rows that make no sense, anything may come
        return Faults(f"{type(error).__name__}: {error}", "")
    finally:
        library.let_go()


def _wrong_memory(tables: Tables, columns: RowReader, input_address: int) -> str:
    events, strings = tables.events, columns.strings.values()
    operators = np.flatnonzero((events["kind"] == EventKind.TORCH_OP) & (events["thread"] == 0))
    names = [strings[number] for number in events["name"][operators].tolist()]
    if not names or names[0] != "aten::add" or not set(names) >= _CALLED:
        return f"x + 1 called {', '.join(names) or 'no operator'}"
    first = operators[0]
    if not (operators < events["end"][first]).all():
        return "the operators that aten::add calls are not within it"
    mentioned = tables.tensors[tables.tensors["event"] == first]
    is_mention = (mentioned["ptr"] == input_address) & (mentioned["role"] == Role.OPERATOR_INPUT)
    if mentioned["size_bytes"][is_mention].tolist() != [12]:
        return "the input of aten::add was not seen"
    return _wrong_allocations(np.array(tables.allocations), np.array(events))


def _wrong_allocations(allocations: Table, events: Table) -> str:
    live, sizes = set(), []
    for row in np.asarray(allocations)[events["thread"][allocations["event"]] == 0]:
        if row["size_bytes"] > 0:
            live.add(int(row["ptr"]))
            sizes.append(int(row["size_bytes"]))
        else:
            live.discard(int(row["ptr"]))
    if sorted(sizes) != _BYTES:
        return f"x + 1 took {sizes} bytes, and not {_BYTES}"
    return f"{len(live)} of {len(sizes)} allocations were not seen to be freed" if live else ""


def _calls(frame: FrameType | None, line: int) -> list[tuple[str, str, int]]:
    """Return the functions that run, outermost first: name, file, and the line each is on."""
    calls = []
    while frame is not None:
        calls.append((frame.f_code.co_name, resolved(frame.f_code.co_filename), line))
        frame = frame.f_back
        line = frame.f_lineno or 0 if frame else 0
    return calls[::-1]


def _wrong_stack(tables: Tables, columns: RowReader, calls: list[tuple[str, str, int]]) -> str:
    events, strings = tables.events, columns.strings.values()
    row, line, seen_calls = int(tables.allocations["event"][0]), 0, []
    line = int(events["line"][row])
    while (row := int(events["parent"][row])) >= 0:
        if events["kind"][row] == EventKind.PY_CALL:
            name, file = (strings[int(events[part][row])] for part in ("name", "file"))
            seen_calls.append((name, file, line))
            line = int(events["line"][row])
    seen_calls.reverse()
    for seen, there in zip(seen_calls, calls, strict=False):
        if seen != there:
            return "{} ({}:{}) was seen where {} ({}:{}) ran".format(*seen, *there)
    if len(seen_calls) != len(calls):
        return f"{len(seen_calls)} functions were seen where {len(calls)} ran"
    return ""
