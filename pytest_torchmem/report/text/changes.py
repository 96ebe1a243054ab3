"""Text about the baselines of a run: what an update would change, and what it might."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytest_torchmem.analysis.judge.environments import environment_name
from pytest_torchmem.report.text.tables import ANY_WIDTH, aligned, one_line
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.measured import BaselineChange, RunSummary
from pytest_torchmem.values.units import format_share, format_size

DIFF_LINES: Final = 400
"""Lines of a diff that are shown; a terminal is no place for more."""

SHOWN: Final = 10

REPAIRED: Final = "replaces an entry that was damaged or that a merge left twice"

NOTHING_USED: Final = (
    "no memory was used; is the work done on another device, or in another process or thread?"
)


def change_table(changes: Sequence[BaselineChange], room: int = ANY_WIDTH) -> list[str]:
    """Return what an update would change as the lines of a table, and how much of it there is.

    Without room for the table, it is a list.
    """
    if not changes:
        return ["dry run: nothing would change"]
    order = list(Change)
    rows = [
        [
            change.change.value,
            change.key + _remark(change),
            "-" if change.change is Change.NEW else format_size(change.before_bytes),
            "-" if change.change is Change.UNUSED else format_size(change.after_bytes),
            _share(change),
            change.file,
        ]
        for change in sorted(changes, key=lambda c: (order.index(c.change), c.file, c.key))
    ]
    lines = aligned(rows, ["change", "entry", "before", "now", "", "file"], "llrrr")
    if max(map(len, lines)) > room:
        lines = [text for row in rows for text in _slim(*row)]
    counts = Counter(change.change for change in changes)
    told = ", ".join(f"{counts[change]} {change.value}" for change in order if counts[change])
    return [*lines, f"dry run: {told}; nothing written"]


def _share(change: BaselineChange) -> str:
    if change.change is Change.UNUSED:
        return ""
    return format_share(change.after_bytes - change.before_bytes, change.before_bytes)


def _remark(change: BaselineChange) -> str:
    was = f"was {change.renamed_from}" if change.renamed_from else ""
    remark = REPAIRED if change.repaired else was
    return f" ({remark})" if remark else ""


def _slim(change: str, entry: str, before: str, now: str, share: str, file: str) -> Iterator[str]:
    yield f"{change}: {entry}"
    yield "    " + ", ".join(filter(None, [f"{before} -> {now}", share]))
    yield f"    {file}"


def diff_lines(before: str, after: str, name: str) -> list[str]:
    """Return a unified diff of a file, cut after `DIFF_LINES`."""
    lines = list(
        difflib.unified_diff(
            before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", "", "", 1, ""
        )
    )
    if len(lines) > DIFF_LINES:
        left_out = len(lines) - DIFF_LINES
        lines[DIFF_LINES:] = [f"... and {left_out} more lines in {name}"]
    return lines


def rename_lines(renames: Mapping[str, str], file: str, followed: bool) -> list[str]:
    """Return a line for each entry that took a new name along, or could."""
    told = sorted(renames.items())
    if followed:
        return [f"renamed: {old} -> {new} ({file})" for old, new in told]
    lines = [f"{new} has the numbers of the unused {old} ({file})" for old, new in told[:SHOWN]]
    if told:
        more = f"... and {len(told) - SHOWN} more; " if told[SHOWN:] else ""
        lines.append(f"{more}if renamed, --torchmem-follow-renames takes the entry along")
    return lines


def explained_lines(count: int, file: str) -> list[str]:
    """Return a line about entries whose numbers stay, and whose composition is stored anew."""
    return [f"{_entries(count)} as before, now with their causes ({file})"] if count else []


def unguarded_line(summary: RunSummary) -> str:
    """Return what must be known in CI: how many measurements were compared with nothing."""
    count = sum(1 for _, window in summary.windows if window.change is Change.NEW)
    if not count:
        return ""
    what = "1 measurement has" if count == 1 else f"{count} measurements have"
    return (
        f"{what} no baseline, so CI passes whatever the body needs: commit one, and run with "
        "--torchmem-require-baseline, which fails a test without one"
    )


def unused_lines(unused: Iterable[Collection[str]]) -> list[str]:
    """Return one line about the entries that no test of a whole run asked for."""
    keys = sorted(key for some in unused for key in some)
    if not keys:
        return []
    named = ", ".join(one_line(key) for key in keys[:3]) + (", ..." if keys[3:] else "")
    return [
        f"unused: no test asked for {_entries(len(keys))} of the baselines ({named}): "
        "--torchmem-update-baseline --torchmem-accept=unused removes "
        + ("it" if len(keys) == 1 else "them")
    ]


def orphan_line(module: str, entry_count: int, moved_to: str, done: bool) -> str:
    """Return what becomes of the baselines of a module that is gone.

    ``moved_to`` is the module that has most of its tests; ``done`` is true where the baselines were
    moved there, or removed.
    """
    what = f"{one_line(module)} is gone and has baselines ({_entries(entry_count)}): "
    if moved_to and done:
        return f"{what}moved to {one_line(moved_to)}, which the next run compares with them"
    if moved_to:
        return (
            f"{what}{one_line(moved_to)} has its tests and no baseline, and "
            "--torchmem-follow-renames takes them along"
        )
    return what + (
        "removed" if done else "--torchmem-update-baseline --torchmem-accept=unused removes them"
    )


def notices(summary: RunSummary, accepted: Collection[Change]) -> list[str]:
    """Return what a reader should know of baselines that failed nothing."""
    return [
        *_shrunk(summary, accepted),
        *_nearest(summary, accepted),
        *_fallbacks(summary),
    ]


def _shrunk(summary: RunSummary, accepted: Collection[Change]) -> Iterator[str]:
    windows = [(t, w) for t, w in summary.windows if w.notice and not w.sentence]
    if not windows or Change.SHRUNK in accepted:
        return
    for test, window in windows[:SHOWN]:
        name = f"::{window.result.name}" if window.result.name else ""
        yield f"shrunk: {test.test}{name}: {window.notice}: tighten"
    more = f"... and {len(windows) - SHOWN} more; " if windows[SHOWN:] else ""
    yield f"{more}--torchmem-update-baseline --torchmem-accept=shrunk stores what is lower now"


def _nearest(summary: RunSummary, accepted: Collection[Change]) -> Iterator[str]:
    """Say for which environment there is no baseline, and which one there is."""
    if Change.NEW in accepted:
        return
    found = Counter(
        (environment_name(test.environment), window.nearest)
        for test, window in summary.windows
        if window.change is Change.NEW and window.nearest
    )
    for (environment, near), count in sorted(found.items()):
        yield (
            f"no baseline for {environment}; nearest is {near} ({_entries(count)}): "
            f"--torchmem-baseline-from={near} compares with it"
        )


def _fallbacks(summary: RunSummary) -> Iterator[str]:
    used = Counter(
        (environment_name(test.environment), window.reference)
        for test, window in summary.windows
        if window.reference
    )
    for (environment, reference), count in sorted(used.items()):
        yield f"{environment} was compared with the baseline of {reference} ({_entries(count)})"


def _entries(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
