"""From lines of code that a compiler generated to the user's own.

Compiled code runs as generated Python: the forward of an FX graph module, or the file that inductor
wrote. The profiler sees its calls with lines of that code. What each such line stands for goes into
`Trace.compiled_lines`, so that the analysis needs neither torch nor the compiler's files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.record.compiled.graphs import CompiledGraphs, NodeOrigin, user_frame
from pytest_torchmem.record.compiled.inductor import Kernel, kernels_by_line
from pytest_torchmem.record.torch_api import compiler
from pytest_torchmem.record.tree.tables import StringTable
from pytest_torchmem.values.trace import COMPILED_LINE

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FX_CODE: Final = "<eval_with_key>"


class CompiledSources:
    """Resolves lines of generated code; `learn` after each compilation for the best answers."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._graphs = CompiledGraphs()
        self._resolved: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._given_up: set[int] = set()

    def learn(self) -> None:
        """Note what the graphs know that are alive now: they may be gone when it is asked for."""
        self._graphs.collect()

    def read(self, events: NDArray[np.void]) -> NDArray[np.void]:
        """Return `trace.COMPILED_LINE` rows for the lines of generated code among ``events``."""
        parents = events["parent"]
        files = np.where(parents >= 0, events["file"][parents], -1)
        called = (files >= 0) & (events["line"] > 0)
        names = self._strings.values()
        wanted = [n for n in np.unique(files[called]).tolist() if self._is_generated(names[n])]
        unknown = {
            n
            for n in wanted
            if names[n].startswith(_FX_CODE) and self._graphs.lines(names[n]) is None
        }
        if unknown - self._given_up:
            self._graphs.collect_again()
            self._given_up |= unknown
        mine = called & np.isin(files, wanted)
        pairs = np.unique(np.stack([files[mine], events["line"][mine]], axis=1), axis=0)
        rows = []
        for file, line in pairs.tolist():
            if (file, line) not in self._resolved:
                self._resolved[file, line] = self._resolve(file, line, names[file])
            rows += self._resolved[file, line]
        return np.array(rows, COMPILED_LINE)

    def _is_generated(self, name: str) -> bool:
        return (
            name.startswith(_FX_CODE)
            or self._graphs.lines(name) is not None
            or compiler.inductor_line_map(name) is not None
        )

    def _resolve(self, file: int, line: int, name: str) -> list[tuple[int, ...]]:
        """One row for each module that the line may belong to; one with module 0 if for none."""
        line_map = compiler.inductor_line_map(name)
        if line_map is None:
            origin = (self._graphs.lines(name) or {}).get(line)
            operator = origin.operator if origin else ""
        else:
            kernel = kernels_by_line(name).get(line, Kernel(""))
            operator = kernel.operator
            origin = self._stored_at(line_map, line, kernel)
        number = self._strings.number
        frame = user_frame(origin.stack) if origin else None
        source = (number(frame.file), frame.line, number(frame.function)) if frame else (-1, 0, -1)
        modules = origin.modules if origin else ()
        return [(file, line, number(operator), *source, module) for module in modules or (0,)]

    def _stored_at(
        self, line_map: tuple[Sequence[int], Sequence[str]], line: int, kernel: Kernel
    ) -> NodeOrigin | None:
        """Look a line up in inductor's map to stacks: an entry holds until the next one."""
        lines, stacks = line_map
        position = bisect_right(lines, line)
        stack = stacks[position - 1] if position else None
        return self._graphs.traced_at(stack, kernel.nodes) if stack else None
