"""The library in C++ that notes operators, memory and the Python around them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

_INT, _LONG, _TEXT, _OUT = ctypes.c_int, ctypes.c_int64, ctypes.c_char_p, ctypes.c_void_p

Pieces: TypeAlias = list[NDArray[np.void]]
"""A table in some arrays, one after the other."""

# What is wrapped in a method of its own.
_READ: Final = ("name", "code", "threads", "row_count", "mention_count", "rows", "mentions")
# As `Growing::FIRST` in ``observer/rows.h``.
_FIRST: Final = 1024


class Library:
    """The functions of the library, under Python's lock: a call hands it to no other thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        functions: Any = ctypes.PyDLL(str(path))
        self._functions = functions
        for name, result, arguments in (
            ("install", _INT, ()),
            ("follow_python", _INT, (_INT, ctypes.py_object)),
            ("prepare", None, ()),
            ("begin", None, ()),
            ("end", None, ()),
            ("pause", None, ()),
            ("go_on", None, ()),
            ("let_go", None, ()),
            ("sees_end", _INT, (_OUT,)),
            ("mark", _LONG, (_LONG,)),
            ("now_ns", _LONG, ()),
            ("threads", _INT, ()),
            ("row_count", _LONG, (_INT,)),
            ("mention_count", _LONG, (_INT,)),
            ("rows", _OUT, (_INT, _INT)),
            ("mentions", _OUT, (_INT, _INT)),
            ("name", _TEXT, (_INT,)),
            ("code", _TEXT, (_INT,)),
            ("collection_callback", ctypes.py_object, (ctypes.py_object,)),
        ):
            function = getattr(functions, f"torchmem_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, f"_{name}" if name in _READ else name, function)

    prepare: Any
    begin: Any
    end: Any
    pause: Any
    go_on: Any
    let_go: Any
    sees_end: Any
    mark: Any
    now_ns: Any
    install: Any
    follow_python: Any
    collection_callback: Any
    _threads: Any
    _row_count: Any
    _mention_count: Any
    _rows: Any
    _mentions: Any
    _name: Any
    _code: Any

    def watch_gpu(self, path: Path) -> bool:
        """Have a GPU's memory noted, too, by the library at ``path``; CUDA has been initialised.

        Returns False where the allocator of the GPU lets nobody watch.
        """
        address = ctypes.cast
        functions = self._functions
        noted, refused = functions.torchmem_note_memory, functions.torchmem_note_refusal
        gpu: Any = ctypes.PyDLL(str(path))
        return not gpu.torchmem_watch_gpu(address(noted, _OUT), address(refused, _OUT))

    def threads(
        self, row: np.dtype[np.void], mention: np.dtype[np.void]
    ) -> Iterator[tuple[Pieces, Pieces]]:
        """Yield the rows and the mentions of each thread, the calling one first.

        They lie where the library has them, until it lets go.
        """
        for number in range(self._threads()):
            # The owner may go on: mentions are those of the rows that are counted before.
            count = self._row_count(number)
            yield (
                _pieces(partial(self._rows, number), count, row),
                _pieces(partial(self._mentions, number), self._mention_count(number), mention),
            )

    @cache  # noqa: B019 - there is one library in a process
    def name(self, number: int) -> tuple[str, str | None]:
        """Return an operator's name, and how it takes each argument: ``r`` or ``w``.

        The last is None where the name has no schema.
        """
        text = self._name(number).decode(errors="replace")
        parts = text.split("\n")
        # A label of the program may have line breaks.
        is_schema = len(parts) == 3 and not parts[2].strip("rw")
        return (parts[0], parts[2]) if is_schema else (text, None)

    @cache  # noqa: B019
    def code(self, number: int) -> tuple[str, str, int, str]:
        """Return file, qualified name and first line of a function, or the class of a module."""
        text = self._code(number).decode(errors="replace")
        if text.startswith("\n\n"):
            return "", "", 0, text[2:]
        file, _, rest = text.partition("\n")
        function, _, first_line = rest.rpartition("\n")
        return file, function, int(first_line), ""


def _pieces(address: Callable[[int], int], count: int, dtype: np.dtype[np.void]) -> Pieces:
    """Return the first ``count`` rows of a table: each piece is as large as all before it."""
    pieces: Pieces = []
    begin, end = 0, _FIRST
    while begin < count:
        rows = min(count, end) - begin
        kind: Any = ctypes.c_char * (rows * dtype.itemsize)
        memory: Any = kind.from_address(address(len(pieces)))
        pieces.append(np.frombuffer(memory, dtype))
        begin, end = end, 2 * end
    return pieces
