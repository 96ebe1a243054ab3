"""The most that an estimated peak can be, and what it depends on.

Kernels take memory for themselves that depends on the processor, and the values of tensors may
decide what a backward pass makes. Both matter only where they do not fit below the peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.estimated.static_facts import makers_of
from pytest_torchmem.values.static_graph import StaticNode, StaticRun
from pytest_torchmem.values.units import between, listed

# A thousandth of a peak is no news.
_NEGLIGIBLE: Final = 0.001
_NAMED: Final = 3


def largest_possible(run: StaticRun) -> int:
    """Return the most bytes that may be in use.

    A kernel that may hold up to 30 bytes for itself matters only if they do not fit below the
    peak, which another operator makes::

        operator    level while it runs   its kernel may hold   at most
        conv                        100                    30       130
        mm                          140                     0       140
    """
    return int(max(_levels(run).max(initial=0), _possible(run).max(initial=0)))


def bounds_in_words(run: StaticRun, peak_bytes: int) -> tuple[str, ...]:
    """Return a sentence with both ends where the peak is known as an interval only.

    It names what the peak may be larger by, what may add most first.
    """
    at_most, of_note = largest_possible(run), peak_bytes * (1 + _NEGLIGIBLE)
    if at_most <= of_note:
        return ()
    possible = _possible(run)
    operators = [k for k in np.argsort(-possible, kind="stable").tolist() if possible[k] > of_note]
    causes = dict.fromkeys(cause for k in operators for cause in _causes(run, k))
    named = list(dict.fromkeys(name for name, _ in causes))
    few = [*named[:_NAMED], *([f"{len(named) - _NAMED} more"] if len(named) > _NAMED else [])]
    takes = "takes for itself" if len(named) == 1 else "take for themselves"
    decides = " and on ".join(dict.fromkeys(decided_by for _, decided_by in causes))
    ends = between("estimated peak", peak_bytes, at_most)
    return (f"{ends}: how much memory {listed(few)} {takes} depends on {decides}",)


def _causes(run: StaticRun, number: int) -> Iterator[tuple[str, str]]:
    """Yield what may have more memory while an operator runs than is sure, and what decides."""
    node = run.graph.operators[number]
    if node.unknown_bytes:
        yield _unsure(run, node, by_values=node.unknown_by_values)
    row, lives = 2 * number + 1, run.lifetimes
    makers = makers_of(run.graph)
    for place in np.flatnonzero((lives.first <= row) & (lives.end > row)).tolist():
        if run.graph.storages[place].doubted_bytes:
            yield _unsure(run, makers[place], by_values=True)


def _unsure(run: StaticRun, node: StaticNode, *, by_values: bool) -> tuple[str, str]:
    function = node.scope.partition(":")[0] if by_values else ""
    place = f" at {node.source}" if node.source else ""
    hardware = "the processor" if run.device == "cpu" else "the GPU"
    return f"{function or node.operator}{place}", "values" if by_values else hardware


def _levels(run: StaticRun) -> NDArray[np.int64]:
    """Return the most bytes that storages may have, row by row."""
    sizes = np.array(
        [(s.size_bytes + s.doubted_bytes) * (s.device == run.device) for s in run.graph.storages],
        dtype=np.int64,
    )
    return run.lifetimes.levels(sizes, run.graph.row_count)


def _possible(run: StaticRun) -> NDArray[np.int64]:
    """Return the most bytes that may be in use while each operator runs."""
    unknown = [node.unknown_bytes for node in run.graph.operators]
    return _levels(run)[1::2] + np.array(unknown, dtype=np.int64)
