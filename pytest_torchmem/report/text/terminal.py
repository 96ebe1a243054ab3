"""Text for a terminal: the long form of a failure, and the table that closes a run."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from pytest_torchmem.analysis.judge.holders import holders_title
from pytest_torchmem.analysis.judge.verdict import contributors, rank
from pytest_torchmem.report.text import tables
from pytest_torchmem.report.text.tables import ANY_WIDTH, NOTHING_USED, REPAIRED, ROWS
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.findings import RETAINED, FindingKind, words
from pytest_torchmem.values.measured import (
    RENAMED,
    BaselineChange,
    MeasuredTest,
    Window,
    sentences,
)
from pytest_torchmem.values.results import Fate, Holder
from pytest_torchmem.values.units import counted, format_change, format_size, one_line

_NARROW: Final = 100
_SLIM: Final = 60
_EACH_SHOWN: Final = 3
"""How many equal numbers in a row are each written out."""

_FILLED_ONCE: Final = (
    "the first test that fills a cache retains it; fill it before the body: with "
    "memory_budget(warmup=1), or in a fixture"
)
_CHANGED: Final = (Change.GROWN, Change.SHRUNK)
_TEST_WIDTH: Final = 60

_OVER: Final = "over a limit or baseline"
_NOT_JUDGED: Final = "not judged"
_RAISED: Final = "ended by an exception"
_FAILURES: Final = {
    FindingKind.UNSTABLE: "not stable",
    FindingKind.UNSEEN: "not all seen",
    FindingKind.SHRUNK: "shrunk",
    FindingKind.NO_BASELINE: "without a baseline",
}
"""How the closing line calls what failed."""


class Detail(enum.IntEnum):
    """The length of the closing summary: of ``-qq``, ``-q``, nothing, ``-v`` and ``-vv``."""

    PROBLEMS = -2
    COUNTS = -1
    SHORT = 0
    ALL = 1
    COMPOSITION = 2


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a summary and how it is shown, in the names of pytest's terminal writer."""

    text: str
    styles: tuple[str, ...] = ()


def failure_text(
    windows: Sequence[Window],
    problem: str,
    command: str,
    timelines: Mapping[str, Sequence[str]] = MappingProxyType({}),
    width: int = ANY_WIDTH,
) -> str:
    """Return the text of a failed test: one sentence, then what a reader needs to act on it.

    ``windows`` are those that failed, the body and regions; ``problem`` is a failure that is
    no number; ``command`` accepts the change; ``timelines`` are drawings by name of the region.
    Tables that do not fit into ``width`` columns become lists.
    """
    # The most telling first.
    order = list(rank(window.findings[0] for window in windows))
    ranked = sorted(windows, key=lambda window: order.index(window.findings[0]))
    kinds = {kind for window in ranked for kind in window.kinds}
    first, *others = [*filter(None, [problem]), *sentences(ranked)]
    if kinds == {FindingKind.NO_BASELINE} and not problem:
        return tables.log_line(first)  # the end of the run says how to store all of them
    lines = [first]
    lines += [f"also: {sentence}" for sentence in others]
    for window in ranked:
        lines += _sections(window, timelines.get(window.result.name, ()), width)
    if any(window.change is Change.GROWN for window in ranked):
        # A test that breaks a limit of its own stores nothing.
        too = "raise the limit and " if FindingKind.OVER_LIMIT in kinds else ""
        lines += ["", f"if this change is wanted, {too}accept it: {command}"]
    return "\n".join(map(tables.log_line, lines))


def _sections(window: Window, timeline: Sequence[str], width: int) -> list[str]:
    result, keys = window.result, {finding.key for finding in window.findings}
    of_region = f" of {result.name!r}" if result.name else ""
    estimated = "an estimated " if result.estimated else ""
    lines: list[str] = (
        ["", f"footprint{of_region}, change by change:", *timeline] if timeline else []
    )
    over = {finding.key for finding in window.findings if finding.kind is FindingKind.OVER_LIMIT}
    limited = [category for category in Category if category.value in over]
    # What a category held when it was largest: another moment than that of the total.
    for category in limited:
        if live := contributors(result, category.value):
            size_bytes = result.peak.by_category[category]
            total = f"{estimated}{format_size(size_bytes)} on {result.device}"
            lines += ["", f"{words(category.value)} at its own peak{of_region}, {total}:"]
            lines += tables.live_table(live, width, size_bytes)
    # What grew is told below, line by line, and so is what is left behind.
    told_keys = {f.key for f in window.findings if f.lines} if window.lines else set()
    if result.peak.live and keys.difference(told_keys, RETAINED, (c.value for c in limited)):
        total = f"{estimated}{format_size(result.peak.total)} on {result.device}"
        lines += ["", f"live at the peak{of_region}, {total}:"]
        lines += tables.live_table(result.peak.live, width, result.peak.total)
    if "growth" in keys and result.growth is not None:
        lines += ["", f"growth from step to step{of_region}: {_growth_of_steps(result.steps)}"]
        lines += _made_once(result.steps)
    if result.grown and "growth" in keys:
        lines += ["", f"made by the steps and still there after the last{of_region}:"]
        lines += tables.live_table(result.grown, width)
    if result.retained.live and keys.intersection(RETAINED):
        total = f"{estimated}{format_size(result.retained.total)}"
        lines += ["", f"retained at the end{of_region}, {total}:"]
        lines += tables.live_table(result.retained.live, width, result.retained.total)
        lines += holder_lines(result.retained.holders)
        is_held = any(holder.fate is Fate.HELD for holder in result.retained.holders)
        # What each step adds is filled more than once.
        if is_held and not result.growth:
            lines.append(_FILLED_ONCE)
    if window.lines and window.changed:
        allowance = next(f.allowed for f in window.findings if f.lines)
        title = f"grown against the baseline{of_region} ({allowance}), in all {window.changed.by}"
        # One line that made all of it stands in the sentence; what was there before has none.
        if [line.size_bytes for line in window.lines] == [window.changed.by_bytes]:
            lines += ["", f"{title}, all at that line" if window.lines[0].place else title]
        else:
            table = tables.lines_table(window.lines, window.changed, width)
            lines += ["", f"{title}:", *table]
    lines += [f"note: {note}" for note in result.notes]
    return lines


def _growth_of_steps(steps: Sequence[int]) -> str:
    """Return ``+4.0 MiB, 20 times +0 B, ... and 3 more`` for what is alive after each step."""
    growths = [after - before for before, after in itertools.pairwise(steps)]
    runs = [(growth, len(list(equal))) for growth, equal in itertools.groupby(growths)]
    shown = [
        f"{count} times {format_change(growth)}"
        if count > _EACH_SHOWN
        else ", ".join([format_change(growth)] * count)
        for growth, count in runs[:ROWS]
    ]
    more = sum(count for _, count in runs[ROWS:])
    return ", ".join([*shown, *([f"... and {more} more"] if more else [])])


def _made_once(steps: Sequence[int]) -> list[str]:
    """Return a line for steps of which only the first ones grew; nothing where it may go on."""
    growths = [after - before for before, after in itertools.pairwise(steps)]
    still = len(list(itertools.takewhile(lambda growth: growth == 0, reversed(growths))))
    if still < 2 or 2 * still < len(growths):
        return []
    more = counted(len(growths) - still, "more step")
    return [
        f"the last {still} steps added nothing: make what is made once (a cache, an optimizer's "
        f"state) in the warm-up, with {more}"
    ]


def holder_lines(holders: Sequence[Holder]) -> list[str]:
    """Return what keeps retained bytes alive, a line each."""
    lines = [
        f"    {format_size(holder.size_bytes)} in {counted(holder.count, 'storage')}: {holder}"
        for holder in holders[:ROWS]
    ]
    lines = ["", f"{holders_title(holders)}:", *lines] if lines else []
    return lines + tables.left_out([holder.size_bytes for holder in holders])


def summary_lines(
    run: RunReport,
    detail: Detail,
    width: int,
    room: int = ANY_WIDTH,
    stored_by: str = "--torchmem-update-baseline",
    renamed: Collection[tuple[str, str]] = (),
) -> list[Line]:
    """Return the closing summary of a run, laid out for ``width`` columns.

    A table that takes more than ``room`` becomes a list; a log has more room than columns.
    ``stored_by`` is what stores a measurement without a baseline, ``""`` where the run itself does.
    ``renamed`` are tests and keys whose baseline is there under another name.
    What went wrong, what was not measured and what an update changed is in it at every detail.
    """
    lines: list[Line] = []
    if detail >= Detail.SHORT:
        lines += _tests_table(run, detail, width, room)
    lines += [Line(story.sentence, ("red",)) for story in run.stories]
    lines += _changes_lines(run)
    not_measured = ((t.not_measured, t.test) for t in run.tests if t.not_measured)
    results = [(t.test, window.result) for t, window in run.windows]
    lines += _grouped_lines("not measured", not_measured)
    lines += _grouped_lines("not all seen", ((s, t) for t, r in results for s in r.blind_spots))
    failed = ((sentence, t) for t, r in results for sentence in r.failed_passes)
    lines += _grouped_lines("not labelled as asked", failed)
    if detail is not Detail.PROBLEMS and run.tests:
        lines.append(Line(_counts(run)))
        lines += _missing_lines(run, stored_by, renamed)
    lines += [Line(problem, ("red",)) for problem in run.problems]
    return [replace(line, text=tables.log_line(line.text)) for line in lines]


def _tests_table(run: RunReport, detail: Detail, width: int, room: int) -> list[Line]:
    rows = ((test, window) for test in run.tests for window in test.rows)
    windows = sorted(rows, key=_importance)
    if not windows:
        return []
    shown_windows = windows[: 2 * ROWS] if detail is Detail.SHORT else windows
    lines = _wide_table(shown_windows, width)
    if width < _SLIM or max(len(line.text) for line in lines) > room:
        lines = _slim_list(shown_windows, width)
    if detail is Detail.COMPOSITION:
        lines += _compositions(shown_windows)
    if hidden := len(windows) - len(shown_windows):
        lines.append(Line(f"... and {hidden} smaller ones (--torchmem-summary=all shows them)"))
    return lines


def _slim_list(windows: Sequence[tuple[MeasuredTest, Window]], width: int) -> list[Line]:
    """Return two short lines for each window, for a terminal too slim for a table."""
    lines: list[Line] = []
    for measured, window in windows:
        summary = ", ".join(filter(None, [window.peak_text, measured.status_of(window)]))
        texts = _shortened(_window_name(measured, window), width - 1), f"  {summary}"
        lines += [Line(text, _styles(measured, window)) for text in texts]
    return lines


def _compositions(windows: Sequence[tuple[MeasuredTest, Window]]) -> list[Line]:
    """Return each category's own peak, for each window."""
    lines = [Line(""), Line("each category's own peak:")]
    for measured, window in windows:
        mark = " (estimated)" if window.result.estimated else ""
        sizes = tables.largest(window.result.peak.by_category)
        lines.append(Line(f"{_window_name(measured, window)}: {sizes}{mark}"))
    return lines


def _wide_table(windows: Sequence[tuple[MeasuredTest, Window]], width: int) -> list[Line]:
    wide = width >= _NARROW
    headers = ["test", "peak", *(["largest at the peak"] if wide else []), "retained", "against"]
    rows = []
    for measured, window in windows:
        result = window.result
        name = _shortened(_window_name(measured, window), _TEST_WIDTH if wide else width // 2)
        biggest = [tables.largest(result.peak.at_peak, 2)] if wide else []
        retained = format_size(result.retained.total)
        rows.append([name, window.peak_text, *biggest, retained, measured.status_of(window)])
    head, *lines = tables.aligned(rows, headers, "lrlr" if wide else "lrr")
    styles = (_styles(measured, window) for measured, window in windows)
    return [Line(head), *map(Line, lines, styles)]


def _styles(measured: MeasuredTest, window: Window) -> tuple[str, ...]:
    return ("red",) if window.sentence or measured.raised else ()


def _importance(pair: tuple[MeasuredTest, Window]) -> tuple[bool, int, int, str]:
    """Sort failed tests first, then changed ones, then by size."""
    measured, window = pair
    change_rank = _CHANGED.index(window.change) if window.change in _CHANGED else len(_CHANGED)
    name = f"{measured.test}::{window.key}"
    return (not (window.sentence or measured.raised), change_rank, -window.result.peak.total, name)


def _window_name(measured: MeasuredTest, window: Window) -> str:
    name = f"{measured.test}::{window.result.name}" if window.result.name else measured.test
    return one_line(name)


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else "..." + name[3 - width :]


_CHANGES_SHOWN: Final = 10
_REMOVES: Final = "--torchmem-update-baseline --torchmem-accept=unused removes what is unused"


def _changes_lines(run: RunReport) -> list[Line]:
    """Return what an update wrote: below each file its entries, the kinds in a fixed order."""
    order = (RENAMED, *(c.value for c in (Change.NEW, Change.GROWN, Change.SHRUNK, Change.UNUSED)))
    # A dry run has a table of its own.
    told_changes = [c for c in run.changes if c.written or c.change is Change.UNUSED]
    lines: list[Line] = []
    for file in dict.fromkeys(change.file for change in told_changes):
        lines.append(Line(f"{file}:"))
        for word in order:
            style = ("yellow",) if word == Change.GROWN.value else ()
            items = [c for c in told_changes if (c.file, c.word) == (file, word)]
            shown_changes = items[:_CHANGES_SHOWN]
            lines += [Line(f"  {word}: {_entry(c)}: {_amount(c)}", style) for c in shown_changes]
            if more := len(items) - len(shown_changes):
                ending = ", removed" if items[0].written else ", kept"
                ending = ending if word == Change.UNUSED.value else ""
                lines.append(Line(f"  ... and {more} more {word} entries{ending}"))
    if any(c.change is Change.UNUSED and not c.written for c in told_changes):
        lines.append(Line(_REMOVES))
    if written_files := [change.file for change in run.changes if change.written]:
        entries = counted(len(written_files), "entry")
        lines.append(
            Line(f"baseline updated: {entries} in {counted(len({*written_files}), 'file')}")
        )
    return lines


def _entry(item: BaselineChange) -> str:
    was = f"{tables.short_key(item.renamed_from)} -> " if item.renamed_from else ""
    return was + tables.short_key(item.key)


def _amount(item: BaselineChange) -> str:
    after = format_size(item.after_bytes)
    if item.change is Change.UNUSED:
        return f"no test uses it; {'removed' if item.written else 'kept'}"
    if item.change is not Change.NEW:
        return item.told_by.sizes
    if item.renamed_from and item.before_bytes != item.after_bytes:
        return f"{format_size(item.before_bytes)}, which the next run compares with {after}"
    remarks = [REPAIRED] if item.repaired else []
    remarks += [] if item.after_bytes else [NOTHING_USED]
    return "; ".join([after, *remarks])


def _grouped_lines(heading: str, pairs: Iterable[tuple[str, str]]) -> list[Line]:
    """Return a line for each text among (text, test), with the first few of its tests."""
    tests_of: dict[str, list[str]] = {}
    for text, test in dict.fromkeys(pairs):  # a test and its regions say a thing once
        tests_of.setdefault(text, []).append(one_line(test))
    lines = []
    for text, tests in tests_of.items():
        names = ", ".join(tests[:3]) + (f" and {len(tests) - 3} more" if tests[3:] else "")
        lines.append(Line(f"{heading}: {names}: {text}", ("yellow",)))
    return lines


def _missing_lines(
    run: RunReport, stored_by: str, renamed: Collection[tuple[str, str]]
) -> list[Line]:
    written_keys = {change.key for change in run.changes}
    new = [
        window
        for test in run.tests
        for window in test.windows
        if window.change is Change.NEW and window.key not in written_keys and _can_be_stored(test)
        if (test.test, window.key) not in renamed
    ]
    if not new or run.problems or not stored_by:
        return []
    one = len(new) == 1
    text = f"{counted(len(new), 'measurement')} {'has' if one else 'have'} no baseline; "
    text += f"{stored_by} stores {'it' if one else 'them'}"
    return [Line(text, ("yellow",))]


def _can_be_stored(test: MeasuredTest) -> bool:
    """Return whether an update would take the numbers of a test; a failed one keeps its entry."""
    kinds = {kind for window in test.windows for kind in window.kinds}
    failed = test.problem or test.outcome == "xfailed"
    return not failed and kinds <= {FindingKind.NO_BASELINE}


def _counts(run: RunReport) -> str:
    """Return how many tests have each status, and in brackets why those failed that did."""
    failed = [test for test in run.tests if test.status == "failed"]
    by_reason = Counter(filter(None, map(_failure, failed)))
    order = (_OVER, _NOT_JUDGED, *_FAILURES.values(), _RAISED)
    why = ", ".join(f"{by_reason[reason]} {reason}" for reason in order if by_reason[reason])
    counts = run.counts()
    reasons = {"failed": f" ({why})"} if why else {}
    parts = (f"{count} {status}{reasons.get(status, '')}" for status, count in counts.items())
    return f"memory: {', '.join(parts)}"


def _failure(test: MeasuredTest) -> str:
    """Return why a test failed, in the words of the closing line; ``""`` for its own reasons."""
    if test.raised:
        return _RAISED
    kinds = {kind for window in test.failed_windows for kind in window.kinds}
    if any(kind.is_too_large for kind in kinds):
        return _OVER
    if test.problem or any(kind.is_unread for kind in kinds):
        return _NOT_JUDGED
    return next((text for kind, text in _FAILURES.items() if kind in kinds), "")
