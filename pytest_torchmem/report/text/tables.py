"""Tables for a terminal, as lists where there is no room; changes; a timeline on one line."""

from __future__ import annotations

import difflib
import enum
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final

from pytest_torchmem.analysis.judge.holders import KnownHolder
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change, ChangedNumber, environment_name
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    common_module,
)
from pytest_torchmem.values.findings import DifferenceKind, LineDifference, words
from pytest_torchmem.values.measured import RENAMED, BaselineChange, MeasuredTest
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.units import (
    counted,
    format_apart,
    format_change,
    format_parts,
    format_share,
    format_size,
    one_line,
)

ROWS: Final = 10
"""Rows of a table that is cut; what is left out is said below it."""

ANY_WIDTH: Final = 10_000
"""For a log, whose lines may be as long as they need to be."""

_PLACE: Final = ("operator", "module", "source")


def live_table(
    live: Sequence[Contributor], width: int = ANY_WIDTH, whole_bytes: int = 0
) -> list[str]:
    """Return the largest contributors as the lines of a table.

    Shares are those of ``whole_bytes``, which may hold more than is listed; without it, of the sum.
    """
    whole_bytes = whole_bytes or sum(c.size_bytes for c in live) or 1
    rows = []
    for c in live[:ROWS]:
        size, share = format_size(c.size_bytes), f"{c.size_bytes / whole_bytes:.0%}"
        rows.append([size, share, words(c.category.value), c.count, *_place(c)])
    sizes = [c.size_bytes for c in live]
    return _table(rows, ["size", "", "category", "count"], "rrlr", width, sizes)


def lines_table(
    lines: Sequence[LineDifference],
    changed: ChangedNumber,
    width: int = ANY_WIDTH,
) -> list[str]:
    """Return what changed line by line as a table whose rows add up to the change."""
    rows = []
    for line in lines[:ROWS]:
        rows.append([format_change(line.size_bytes), line_word(line), composition(line)])
        rows[-1] += line_place(line)
    sizes = [line.size_bytes for line in lines]
    table = _table(rows, ["change", "", "of"], "r", width, sizes, format_change)
    return [*table, *unlisted_lines(lines, changed)]


def line_word(line: LineDifference) -> str:
    """Return how the line differs, by its largest part: ``new``, ``grown``, ``lives longer``."""
    largest = line.parts[0]
    kind = DifferenceKind.GROWN if largest.is_larger_now else largest.kind
    return str(kind.value)


def composition(line: LineDifference) -> str:
    """Return the categories that a line's change is made of: ``temporary 8.0, activation 2.0``."""
    amounts: Counter[Category] = Counter()
    for part in line.parts:
        amounts[part.contributor.category] += part.size_bytes
    if len(amounts) == 1:
        return words(next(iter(amounts)).value)
    ranked = sorted(amounts.items(), key=lambda pair: -abs(pair[1]))
    return format_parts({words(c.value): n for c, n in ranked if n}, line.size_bytes)


def line_place(line: LineDifference) -> tuple[str, str, str]:
    """Return the operators, the module and the place of a line."""
    first = line.parts[0].contributor
    operator, *others = line.operators
    operator += f", {len(others)} more" if others else ""
    module = common_module(part.contributor.module for part in line.parts)
    if line.changed:
        return operator, module, f"{line.changed.text}, changed"
    return operator, module, _place(first)[2]


def unlisted_lines(lines: Sequence[LineDifference], changed_number: ChangedNumber) -> list[str]:
    """Return a line about parts that no side lists; nothing where the rows are all."""
    rest = changed_number.by_bytes - sum(line.size_bytes for line in lines)
    return [f"and {format_change(rest)} in parts that are not listed"] if rest else []


def largest(amounts: CategoryBytes, count: int = len(Category)) -> str:
    """Return the largest categories with their sizes, those of 0 bytes left out."""
    ranked = sorted(amounts.items(), key=lambda pair: -pair[1])[:count]
    return ", ".join(f"{words(c.value)} {format_size(size)}" for c, size in ranked if size)


def _place(contributor: Contributor) -> tuple[str, str, str]:
    source = contributor.source
    if source is None:
        return contributor.operator, contributor.module, contributor.phase.value
    line = f":{source.line}" if source.line else ""
    return contributor.operator, contributor.module, f"{source.file}{line} {source.function}"


def left_out(
    sizes: Sequence[int], render: Callable[[int], str] = format_size, rows: int = ROWS
) -> list[str]:
    """Return a line about what is not shown of some ``sizes``, of which ``rows`` are."""
    more = sizes[rows:]
    return [f"... and {len(more)} more, {render(sum(more))} together"] if more else []


def _table(
    rows: Sequence[Sequence[object]],
    headers: Sequence[str],
    align: str,
    width: int,
    sizes: Sequence[int],
    shown: Callable[[int], str] = format_size,
) -> list[str]:
    """Return a table whose last columns are a place; places have lines of their own if need be."""
    lines = aligned(rows, [*headers, *_PLACE], align)
    if max(map(len, lines), default=0) <= width:
        return lines + left_out(sizes, shown)
    count = len(headers)
    heads = aligned([row[:count] for row in rows], headers, align)
    lines = heads[:1]
    for head, row in zip(heads[1:], rows, strict=True):
        operator, module, source = (str(cell) for cell in row[count:])
        parts = [operator, f"in {module}" if module else "", f"({source})"]
        lines.append(head)
        lines += textwrap.wrap(
            " ".join(filter(None, parts)),
            max(20, width),
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
    return lines + left_out(sizes, shown)


def log_line(text: str) -> str:
    """Return text as a line of a log: a build server takes one that begins with colons for a
    command.
    """
    line = one_line(text)
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


_KEY_WIDTH: Final = 64


def short_key(key: str) -> str:
    """Return the key of an entry on one line; of a long one both ends."""
    line = one_line(key)
    half = (_KEY_WIDTH - 3) // 2
    return line if len(line) <= _KEY_WIDTH else f"{line[:half]}...{line[-half:]}"


def aligned(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> list[str]:
    """Return the lines of a table, one for the headers and one for each row.

    ``align`` has a letter for each of its first columns.
    """
    from tabulate import tabulate  # a run that measures nothing need not load it

    sides = {"r": "right", "l": "left"}
    columns = [sides[side] for side in align.ljust(len(headers), "l")]
    # A name may have a line break in it: ids of tests, regions.
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    text = tabulate(
        cells, headers, tablefmt="plain", disable_numparse=True, colalign=columns if rows else None
    )
    return [line.rstrip() for line in text.splitlines()]


BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = "_.:-=+*#"


def sparkline(levels: Sequence[int], width: int, plain: bool = False) -> str:
    """Return ``width`` characters for levels at equal distances, the highest of each stretch.

    Zero is the lowest character. The line is shorter where there are fewer levels. ``plain`` keeps
    to ASCII, for a terminal that cannot show blocks.
    """
    marks = ASCII if plain else BLOCKS
    top = max(levels, default=0) or 1
    count = min(width, len(levels))
    edges = [len(levels) * i // count for i in range(count + 1)] if count else [0]
    highest = [max(levels[a:b]) for a, b in pairwise(edges)]
    return "".join(marks[-(-level * (len(marks) - 1) // top)] for level in highest)


def timeline_lines(picture: Picture, width: int, plain: bool = False) -> list[str]:
    """Return a timeline as lines of text: the footprint over time, and where its peak is.

    It runs in equal numbers of changes, not in equal times: a body that waits or imports for most
    of its time would be a flat line, and the same body draws the same line again.
    """
    if not picture.times_ns:
        return []
    levels, peak = _over_time(picture, width)
    estimated = "an estimated " if picture.estimated else ""
    moment = f"at change {picture.rows[picture.peak]} of {picture.change_count - 1}"
    text = f"peak {estimated}{format_size(max(picture.totals))} {moment}"
    # The marker stands below the character that holds the peak, its text where there is room.
    marker = " " * peak + "^"
    if peak + 2 + len(text) <= width:
        marker_lines = [f"{marker} {text}"]
    elif len(text) < peak:
        marker_lines = [f"{text} ^".rjust(peak + 1)]
    else:
        marker_lines = [marker, text]
    return [sparkline(levels, width, plain), *marker_lines]


def _over_time(picture: Picture, width: int) -> tuple[list[int], int]:
    """Return the highest footprint within each of ``width`` stretches, and the peak's stretch."""
    width = min(width, picture.change_count)
    levels = [-1] * width
    places = [row * width // picture.change_count for row in picture.rows]
    previous_bytes = 0
    for place, total in zip(places, picture.totals, strict=True):
        for empty in range(place, -1, -1):
            if levels[empty] >= 0:
                break
            levels[empty] = previous_bytes  # nothing changed here: what was there before stays
        levels[place] = max(levels[place], total)
        previous_bytes = total
    levels = [previous_bytes if level < 0 else level for level in levels]
    return levels, places[picture.peak]


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
    ranked = sorted(changes, key=lambda c: (order.index(c.change), c.file, c.key))
    rows = [_change_row(change) for change in ranked]
    lines = aligned(rows, ["change", "entry", "", "before", "now", "", "file"], "lllrrr")
    if max(map(len, lines)) > room:
        lines = []
        for word, entry, name, before, now, share, file in rows:
            sizes = ", ".join(filter(None, [f"{name} {before} -> {now}", share]))
            lines += [f"{word}: {entry}", f"    {sizes}", f"    {file}"]
    counts = Counter(change.word for change in changes)
    words = (RENAMED, *(change.value for change in order))
    counts_text = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
    return [*lines, f"dry run: {counts_text}; nothing written"]


def _change_row(change: BaselineChange) -> tuple[str, ...]:
    number = change.told_by
    before, now = format_apart(number.before_bytes, number.after_bytes)
    share = format_share(number.after_bytes - number.before_bytes, number.before_bytes)
    if change.change is Change.NEW and change.before_bytes in (0, change.after_bytes):
        before, share = "-", ""
    if change.change is Change.UNUSED:
        now, share = "-", ""
    was = f"was {short_key(change.renamed_from)}" if change.renamed_from else ""
    remark = REPAIRED if change.repaired else was
    entry = short_key(change.key) + (f" ({remark})" if remark else "")
    return change.word, entry, number.name, before, now, share, change.file


def diff_lines(before: str, after: str, name: str) -> list[str]:
    """Return a unified diff of a file, cut after `DIFF_LINES`."""
    sides, names = (before.splitlines(), after.splitlines()), (f"a/{name}", f"b/{name}")
    lines = list(difflib.unified_diff(*sides, *names, n=1, lineterm=""))
    if more := len(lines[DIFF_LINES:]):
        lines[DIFF_LINES:] = [f"... and {more} more lines in {name}"]
    return lines


def rename_lines(
    renames: Mapping[str, str], changed: Mapping[str, ChangedNumber], file: str
) -> list[str]:
    """Return a line for each entry that could take a new name along, and how to have that.

    ``changed`` is what the test of a new name needs otherwise than the entry.
    """
    pairs = sorted(renames.items())
    lines = [
        f"{short_key(new)} seems to be the unused {short_key(old)} ({file})"
        + (f": {changed[new].sentence}" if new in changed else "")
        for old, new in pairs[:SHOWN]
    ]
    more = f"... and {len(pairs) - SHOWN} more" if pairs[SHOWN:] else ""
    if pairs:
        more += "; " if more else ""
        more += "if renamed, a run without --torchmem-ci takes the entry along"
        if changed:
            more += ", and --torchmem-update-baseline accepts its new numbers, too"
    return [*lines, more] if more else lines


def cut_short_lines(collected_count: int, ended_count: int) -> list[str]:
    """Return what an update did not see, where its run did not come to its end."""
    missed = collected_count - ended_count
    if missed <= 0:
        return []
    tests = f"{missed} of {collected_count} tests did not run to their end"
    return [f"the run was cut short: {tests}; their entries are as before, and none was removed"]


def explained_lines(count: int, file: str) -> list[str]:
    """Return a line about entries whose numbers stay, and whose composition is stored anew."""
    entries = counted(count, "entry")
    return [f"{entries} as before, now with their causes ({file})"] if count else []


def unguarded_line(summary: RunReport) -> str:
    """Return what must be known in CI: how many measurements were compared with nothing."""
    count = sum(1 for _, window in summary.windows if window.change is Change.NEW)
    if not count:
        return ""
    what = f"{counted(count, 'measurement')} {'has' if count == 1 else 'have'}"
    return (
        f"{what} no baseline, so CI passes whatever the body needs: commit one, and run with "
        "--torchmem-ci, which fails a test without one"
    )


def unused_lines(unused: Iterable[Collection[str]]) -> list[str]:
    """Return one line about the entries that no test of a whole run asked for."""
    keys = sorted(key for some in unused for key in some)
    if not keys:
        return []
    first_keys = ", ".join(short_key(key) for key in keys[:3]) + (", ..." if keys[3:] else "")
    return [
        f"unused: no test uses {counted(len(keys), 'entry')} of the baselines "
        f"({first_keys}): --torchmem-update-baseline --torchmem-accept=unused removes "
        + ("it" if len(keys) == 1 else "them")
    ]


class OrphanEnd(enum.Enum):
    """The end of a sentence on the baselines of a module that is gone; ``{}`` has most tests."""

    MOVED = "moved to {}, which the next run compares with them"
    MOVED_AND_COMPARED = "moved to {}, which this run has compared with them"
    WOULD_MOVE = "a run without --torchmem-dry-run moves them to {}"
    MAY_MOVE = "{} has its tests and no baseline; a run without --torchmem-ci takes them along"
    REMOVED = "removed"
    KEPT = "--torchmem-update-baseline --torchmem-accept=unused removes them"


def orphan_line(module: str, entry_count: int, end: OrphanEnd, tests_in: str = "") -> str:
    """Return what becomes of the baselines of a module, whose tests are in another one now."""
    text = f"{counted(entry_count, 'entry')}): {end.value.format(one_line(tests_in))}"
    return f"{one_line(module)} is gone and has baselines ({text}"


def notices(summary: RunReport, accepted: Collection[Change]) -> list[str]:
    """Return what a reader should know of baselines that failed nothing."""
    return [*_shrunk_lines(summary, accepted), *_nearest(summary, accepted), *_fallbacks(summary)]


def _shrunk_lines(summary: RunReport, accepted: Collection[Change]) -> Iterator[str]:
    windows = [(t, w) for t, w in summary.windows if w.notice and not w.sentence]
    if not windows or Change.SHRUNK in accepted:
        return
    for test, window in windows[:SHOWN]:
        name = f"::{window.result.name}" if window.result.name else ""
        yield f"shrunk: {test.test}{name}: {window.notice}: tighten"
    more = f"... and {len(windows) - SHOWN} more; " if windows[SHOWN:] else ""
    yield f"{more}--torchmem-update-baseline --torchmem-accept=shrunk stores what is lower now"


def _nearest(summary: RunReport, accepted: Collection[Change]) -> Iterator[str]:
    """Say for which environment there is no baseline, and which one there is."""
    if Change.NEW in accepted:
        return
    nearest_environments = ((t, w.nearest) for t, w in summary.windows if w.change is Change.NEW)
    for environment, near, entries in _by_environment(nearest_environments):
        yield (
            f"no baseline for {environment}; nearest is {near} ({entries}): "
            f"--torchmem-baseline-from={near} compares with it"
        )


def _fallbacks(summary: RunReport) -> Iterator[str]:
    references = ((test, window.reference) for test, window in summary.windows)
    for environment, reference, entries in _by_environment(references):
        yield f"{environment} was compared with the baseline of {reference} ({entries})"


def _by_environment(pairs: Iterable[tuple[MeasuredTest, str]]) -> Iterator[tuple[str, str, str]]:
    """Yield an environment, another one that belongs to it, and for how many entries that holds."""
    counts = Counter((environment_name(t.environment), other) for t, other in pairs if other)
    yield from ((*names, counted(count, "entry")) for names, count in sorted(counts.items()))


def known_lines(summary: RunReport, known_holders: Sequence[KnownHolder], whole: bool) -> list[str]:
    """Return a line for each known holder that excused something, and of a whole run for others."""
    lines = []
    for holder in known_holders:
        name = one_line(holder.pattern)
        windows = [(t.test, w) for t, w in summary.windows if holder.pattern in w.excused]
        if windows:
            tests = len({test for test, _ in windows})
            largest_bytes = max(window.excused[holder.pattern] for _, window in windows)
            at_most = f"{format_size(largest_bytes)} in {counted(tests, 'test')}"
            lines.append(f"known holder {name}: {at_most} ({one_line(holder.reason)})")
        elif whole:
            lines.append(f"known holder {name} excused nothing in this run: remove it")
    return lines
