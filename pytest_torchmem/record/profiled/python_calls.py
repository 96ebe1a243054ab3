"""Python calls in the event tree: functions, files, lines, and the operators between two calls."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.record.environment import library_paths
from pytest_torchmem.record.profiled.event_tree import EventTree, WorthKeeping, are_calls, line_of
from pytest_torchmem.record.profiled.source_lines import FunctionLines, functions_of, operator_lines
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.values.trace import EventKind


@dataclass(frozen=True, slots=True)
class Gap:
    """Operators that ran directly in a Python function, between two calls it made.

    ``parent`` and ``operators`` are rows of events; ``after`` and ``before`` are the lines of the
    calls around, 0 where there is none.
    """

    parent: int
    operators: tuple[int, ...]
    after: int
    before: int


def find_gaps(tree: EventTree, kept: WorthKeeping, is_users: Callable[[int], bool]) -> list[Gap]:
    """Return the runs of operators directly below the user's functions.

    Rows are those of ``kept``; ``is_users`` is asked about one. The calls around need not be among
    what is kept.
    """
    kinds, parents = tree.kinds, tree.parents
    is_call = are_calls(kinds)
    in_function = (kinds == EventKind.TORCH_OP) & (parents >= 0)
    in_function &= kinds[parents] == EventKind.PY_CALL
    functions = set(parents[in_function].tolist())
    users = {function for function in functions if is_users(int(kept.row[function]))}
    below = _Below.of(tree, users, is_call)
    gaps = []
    for (function, number), places in below.runs(np.flatnonzero(in_function[below.rows])).items():
        after, before = below.line(function, number - 1), below.line(function, number)
        operators = tuple(kept.row[below.rows[places]].tolist())
        gaps.append(Gap(int(kept.row[function]), operators, after or 0, before or 0))
    return gaps


@dataclass(frozen=True, slots=True, eq=False)
class _Below:
    """The events directly below the user's functions, function by function.

    A function that calls twice, with operators before, between and after::

        events      add  call  mul  sub  call  div
        calls             1              4
        runs        (f, 0): [0]   (f, 1): [2, 3]   (f, 2): [5]

    Attributes:
        tree: The tree that has them.
        rows: int64, shape (N,), their rows of the tree.
        functions: int64, shape (N,), the row of the function that each is in, ascending.
        call: int64, shape (T,), for each Python call of the tree its place in ``tree.python``.
        calls: Which of the N events are calls of the function's own.
    """

    tree: EventTree
    rows: NDArray[np.int64]
    functions: NDArray[np.int64]
    call: NDArray[np.int64]
    calls: list[int]

    @classmethod
    def of(cls, tree: EventTree, users: set[int], is_call: NDArray[np.bool_]) -> _Below:
        """Return what is below the functions in these rows; ``is_call`` has calls of their own."""
        parents = tree.parents
        in_users = np.zeros(len(parents) + 1, np.bool_)
        in_users[list(users)] = True
        rows = np.flatnonzero(in_users[parents])
        rows = rows[np.argsort(parents[rows], kind="stable")]
        call = np.cumsum(are_calls(tree.kinds)) - 1
        return cls(tree, rows, parents[rows], call, np.flatnonzero(is_call[rows]).tolist())

    def runs(self, operators: NDArray[np.int64]) -> dict[tuple[int, int], list[int]]:
        """Return the operators between two calls, by function and number of the call after them."""
        numbers = np.searchsorted(np.array(self.calls, np.int64), operators)
        functions = self.functions[operators]
        changes = np.diff(functions, prepend=-1).astype(np.bool_)
        changes |= np.diff(numbers, prepend=-1).astype(np.bool_)
        begins = np.flatnonzero(changes).tolist()
        places = operators.tolist()
        return {
            (int(functions[begin]), int(numbers[begin])): places[begin:end]
            for begin, end in pairwise([*begins, len(places)])
        }

    def line(self, function: int, number: int) -> int | None:
        """Return the line of a call; None where the function has none of that number."""
        begin, end = self._bounds(function)
        if not (0 <= number < len(self.calls) and begin <= self.calls[number] < end):
            return None
        place = self.calls[number]
        event = self.tree.python[self.call[self.rows[place]]]
        if event is None:
            # Calls that led to nothing are not held.
            event = self.tree.children(self.call[function])[place - begin]
        return line_of(event)

    def _bounds(self, function: int) -> tuple[int, int]:
        begin, end = np.searchsorted(self.functions, (function, function + 1)).tolist()
        return begin, end


# "path/to/file.py(12): function", where the line is that of the function's definition.
_NAME: Final = re.compile(r"(?P<file>.*)\((?P<line>-?\d+)\): (?P<function>.*)", re.DOTALL)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _FrameText:
    text: int
    name: int
    file: int
    path: str
    first_line: int


class PythonCalls:
    """Reads the names of Python calls; each distinct one is taken apart once."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._functions: dict[str, _FrameText] = {}
        self._paths: dict[str, str] = {}
        self._libraries = tuple(f"{folder}/" for folder in library_paths())

    def read(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        texts: Sequence[str],
        lines: Sequence[int] | NDArray[np.int32],
        events: NDArray[np.void],
    ) -> list[int]:
        """Fill name, file and line of the Python calls at ``rows``, whose event names are texts.

        Return the numbers of the texts, without addresses.
        """
        functions = [self._function(text) for text in texts]
        events["name"][rows] = [function.name for function in functions]
        events["file"][rows] = [function.file for function in functions]
        events["line"][rows] = lines
        return [function.text for function in functions]

    def place_operators(
        self,
        gaps: Iterable[Gap],
        texts: Sequence[str],
        names: Sequence[str],
        events: NDArray[np.void],
    ) -> None:
        """Fill the line of operators that ran directly in functions of the user's.

        ``texts`` are the event names of the gaps' functions, ``names`` those of all operators in
        the gaps' order.
        """
        names_left, sources = iter(names), cache(functions_of)
        rows, lines = list[int](), list[int]()

        # A loop has the same gap each time it turns.
        @cache
        def lines_of(path: str, first: int, run: tuple[str, ...], *around: int) -> list[int]:
            return operator_lines(sources(path).get(first, FunctionLines()), run, *around)

        for gap, text in zip(gaps, texts, strict=True):
            function, run = self._function(text), tuple(islice(names_left, len(gap.operators)))
            rows += gap.operators
            lines += lines_of(function.path, function.first_line, run, gap.after, gap.before)
        events["line"][rows] = lines

    def is_users(self, text: str) -> bool:
        """Return whether the function with that event name has a source, and no library's."""
        function = self._function(text)
        return function.file >= 0 and not function.path.startswith(self._libraries)

    def _function(self, text: str) -> _FrameText:
        frame = self._functions.get(text)
        if frame is None:
            number = self._strings.number
            plain, file, line, function = _taken_apart(text)
            plain_number = number(plain)
            if function is None:
                frame = _FrameText(plain_number, plain_number, -1, "", 0)
            else:
                if (path := self._paths.get(file)) is None:
                    path = self._paths[file] = full_path(file)
                frame = _FrameText(plain_number, number(function), number(path), path, line)
            self._functions[text] = frame
        return frame


@lru_cache(maxsize=4096)
def _taken_apart(text: str) -> tuple[str, str, int, str | None]:
    """Return an event's name without addresses, its file and line, and its function if it has one.

    Another body calls mostly the same functions.
    """
    plain = _ADDRESS.sub("", text)
    match = _NAME.fullmatch(text)
    return (
        (plain, match["file"], int(match["line"]), match["function"])
        if match
        else (plain, "", 0, None)
    )


def full_path(name: str) -> str:
    """Undo the profiler's habit of cutting the entries of ``sys.path`` off file names."""
    if not name.endswith(".py") or Path(name).is_absolute():
        return name
    try:
        here = os.getcwd()  # noqa: PTH109 - a Path costs ten times as much
    except FileNotFoundError:
        return name  # the body went to a folder that is gone
    return _found_in(tuple(sys.path), here, name)


@lru_cache(maxsize=4096)
def _found_in(searched: tuple[str, ...], here: str, name: str) -> str:
    """Return where a file is in the folders that are searched; its name where it is in none.

    A folder may be relative to where the process is, ``here``.
    """
    for folder in searched:
        candidate = Path(here, folder, name)
        if candidate.exists():
            return str(candidate.resolve())
    return name
