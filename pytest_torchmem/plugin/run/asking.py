"""A question for each change of the baselines, on a terminal, before it is stored."""

from __future__ import annotations

import contextlib
import enum
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import pytest

from pytest_torchmem.plugin.options.option_table import relative_path
from pytest_torchmem.plugin.run.updates import FilePlan
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.measured import BaselineChange
from pytest_torchmem.values.units import counted, format_size, one_line

_QUESTION: Final = (
    "    store it? yes, no, all that follow, quit and store none that follow [y/n/a/q] "
)


class Answer(enum.Enum):
    """The answer to a question about one change; its first letter is enough."""

    YES = "yes"
    NO = "no"
    ALL = "all"
    QUIT = "quit"


def require_terminal() -> None:
    """Raise `pytest.UsageError` where nobody can answer.

    While pytest captures, it has put something else in the place of the input.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise pytest.UsageError(
            "--torchmem-ask needs an interactive terminal; use --torchmem-accept or "
            "--torchmem-dry-run instead [bad-argument]"
        )


def asked_about(plans: Sequence[FilePlan], config: pytest.Config) -> list[FilePlan]:
    """Ask about each change that the plans would store; return them without what was declined.

    The end of the input is taken as `Answer.QUIT`, and so is Ctrl-C, whenever it comes. Raises
    `pytest.UsageError` where this is no terminal.
    """
    questions = [_questions(plan, config) for plan in plans]
    agreed: set[BaselineChange] = set()
    with _terminal(config):
        require_terminal()
        try:
            _ask_all(itertools.chain.from_iterable(questions), agreed)
        except KeyboardInterrupt:
            print()
        if declined := sum(map(len, questions)) - len(agreed):
            print(f"not stored: {counted(declined, 'entry')}")
    return [
        _leave_out(plan, {change.key for change, _ in question if change not in agreed})
        for plan, question in zip(plans, questions, strict=True)
    ]


def _questions(plan: FilePlan, config: pytest.Config) -> list[tuple[BaselineChange, str]]:
    """Return the changes of one file that would be stored, each with its cause."""
    shown_path = relative_path(plan.path, config.invocation_params.dir)
    causes = {window.key: window.accepted for window in plan.written_windows}
    return [(c, causes.get(c.key, "")) for c in plan.changes(shown_path, is_done=True) if c.written]


def _ask_all(questions: Iterable[tuple[BaselineChange, str]], agreed: set[BaselineChange]) -> None:
    """Add each change to ``agreed`` that shall be stored."""
    last, file = Answer.YES, ""
    for change, cause in questions:
        if last is not Answer.ALL:
            if change.file != file:
                print(f"\n{change.file}:")
            file = change.file
            last = _ask(change, cause)
        if last is Answer.QUIT:
            return
        if last is not Answer.NO:
            agreed.add(change)


@contextlib.contextmanager
def _terminal(config: pytest.Config) -> Iterator[None]:
    """Give the terminal back for the block: pytest has taken the input, too."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    try:
        yield
    finally:
        if capture is not None:
            capture.resume_global_capture()


def _ask(change: BaselineChange, cause: str) -> Answer:
    print(f"  {change.change.value}: {one_line(change.key)}: {_sizes(change)}")
    if cause:
        print(f"    {one_line(cause)}")
    while True:
        # input() may put the terminal into another mode, and lose what was typed before it did.
        print(_QUESTION, end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return Answer.QUIT
        typed = line.strip().lower()
        for answer in Answer:
            if typed and answer.value.startswith(typed):
                return answer


def _sizes(change: BaselineChange) -> str:
    if change.change is Change.NEW:
        return format_size(change.after_bytes)
    if change.change is Change.UNUSED:
        return f"{format_size(change.before_bytes)}, and no test uses it: remove"
    return change.told_by.sentence


def _leave_out(plan: FilePlan, declined: set[str]) -> FilePlan:
    """Return a plan that leaves the entries of some keys as they are, also by an older name."""
    older = {old for old, new in plan.renames.items() if new in declined} if plan.follows else set()
    return replace(
        plan,
        written_windows=tuple(
            window for window in plan.written_windows if window.key not in declined
        ),
        unused={key: entry for key, entry in plan.unused.items() if key not in declined | older},
        renames={old: new for old, new in plan.renames.items() if new not in declined},
    )
