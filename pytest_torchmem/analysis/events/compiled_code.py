"""Compiled code: what the lines of generated Python that events were called from stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pytest_torchmem.values.contributors import Source
from pytest_torchmem.values.trace import EventKind, Trace


@dataclass(frozen=True, slots=True)
class CompiledLine:
    """The operator, source and modules that a line of generated code stands for.

    Attributes:
        operator: The operator, or several joined by ``+``; empty if the events name it themselves.
        source: The user's line that was compiled into it; None if there is no such line.
        modules: ``id()`` of each module that it may have been traced in.
    """

    operator: str
    source: Source | None
    modules: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CompiledCall:
    """An event was called from generated code: by which line, and how far out in its chain."""

    line: CompiledLine
    depth: int


class CompiledCode:
    """Looks lines of generated code up."""

    def __init__(self, trace: Trace) -> None:
        self._events = trace.events
        self._lines: dict[tuple[int, int], CompiledLine] = {}
        for (
            file,
            line,
            operator,
            source_file,
            source_line,
            function,
            module,
        ) in trace.compiled_lines.tolist():
            before = self._lines.get((file, line))
            modules = (*(before.modules if before else ()), *((module,) if module else ()))
            source = None
            if source_file >= 0:
                strings = trace.strings
                source = Source(strings[source_file], source_line, strings[function])
            self._lines[file, line] = CompiledLine(trace.strings[operator], source, modules)
        self.files = frozenset(file for file, _ in self._lines)

    def line(self, file: int, line: int) -> CompiledLine | None:
        """Return the meaning of a line in a file, given by number; None if it is not generated."""
        return self._lines.get((file, line))

    def call(self, chain: Sequence[int]) -> CompiledCall | None:
        """The innermost generated line around an event; ``chain`` leads outwards from it."""
        if not self._lines:
            return None
        kinds, files, lines = (self._events[name] for name in ("kind", "file", "line"))
        for depth, (below, row) in enumerate(pairwise(chain), 1):
            if kinds[row] == EventKind.PY_CALL and int(files[row]) in self.files:
                found = self._lines.get((int(files[row]), int(lines[below])))
                if found is not None:
                    return CompiledCall(found, depth)
        return None
