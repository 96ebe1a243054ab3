"""How far a long piece of work at the end of a run has come, on a terminal and nowhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import pytest

PATIENCE_S: Final = 1.0
"""Work that is over by then needs no progress."""

_REFRESH_S: Final = 0.1
_Item = TypeVar("_Item")


def progress(
    items: Sequence[_Item],
    what: str,
    config: pytest.Config,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[_Item]:
    """Yield each item, and say ``baselines: 1200 of 5000`` on one line while it takes long.

    Nothing is written where the output is no terminal, such as the log of a CI job; when the work
    is over the line is empty again.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty or reporter.verbosity < 0:
        yield from items
        return
    start = shown = clock()
    drawn = False
    try:
        for number, item in enumerate(items):
            now = clock()
            if now - start >= PATIENCE_S and now - shown >= _REFRESH_S:
                reporter.rewrite(f"{what}: {number} of {len(items)}", erase=True)
                shown, drawn = now, True
            yield item
    finally:
        if drawn:
            reporter.rewrite("", erase=True)
            reporter.rewrite("")  # what comes next starts at the beginning of the line
