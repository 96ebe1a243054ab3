"""``torchmem diff A B``: what changed from one file of measurements to another."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytest_torchmem.analysis.judge.causes import line_text
from pytest_torchmem.analysis.judge.differences import Comparison, compare
from pytest_torchmem.cli.inputs import Key, Measurements
from pytest_torchmem.report.page.comparison import ORDER, ComparedTest, comparison_page
from pytest_torchmem.values.baseline import TOTAL, Allowance, Change
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.findings import LineDifference, words
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.units import format_change, format_size, one_line

CAUSES: Final = 3
_STYLES: Final = {Change.GROWN: "31", Change.SHRUNK: "32", Change.NEW: "36", Change.GONE: "33"}


@dataclass(frozen=True, slots=True)
class Diff:
    """Two inputs, compared test by test.

    Attributes:
        rows: One for each test of either, what grew most first.
        then: The key that a test had before, where both have it.
    """

    before: Measurements
    after: Measurements
    rows: tuple[tuple[Key, Comparison], ...]
    then: Mapping[Key, Key] = field(default_factory=dict)

    @property
    def grown(self) -> bool:
        return any(row.change is Change.GROWN for _, row in self.rows)


def find_diff(before: Measurements, after: Measurements, allowance: Allowance) -> Diff:
    """Return the comparison of two inputs; a test that only one has is new or gone."""
    pairs = list(_pairs(before, after))
    rows = []
    for then, now in pairs:
        if key := now or then:
            one = before.entries[then] if then else None
            other = after.entries[now] if now else None
            rows.append((key, compare(one, other, allowance)))
    rows.sort(key=lambda r: (ORDER.index(r[1].change), -abs(r[1].size_bytes), str(r[0])))
    return Diff(before, after, tuple(rows), {now: then for then, now in pairs if now and then})


def _pairs(before: Measurements, after: Measurements) -> Iterator[tuple[Key | None, Key | None]]:
    """Yield which measurement belongs to which: by everything first, then by less.

    A results file names tests from the rootdir, a baseline file knows its own name only, and two
    environments are compared when nothing else can be; a pair must be the only one of its name.
    """
    before_keys, after_keys = set(before.entries), set(after.entries)
    views: tuple[Callable[[Key], tuple[str, ...]], ...] = (
        lambda key: (key.environment, key.module, key.entry),
        lambda key: (key.environment, key.module.rpartition("/")[2], key.entry),
        lambda key: (key.module, key.entry),
        lambda key: (key.module.rpartition("/")[2], key.entry),
        lambda key: (key.entry,),
    )
    for view in views:
        ours, theirs = _keys_by_name(before_keys, view), _keys_by_name(after_keys, view)
        for name in ours.keys() & theirs.keys():
            if len(ours[name]) == len(theirs[name]) == 1:
                before_keys -= set(ours[name])
                after_keys -= set(theirs[name])
                yield ours[name][0], theirs[name][0]
    yield from ((key, None) for key in before_keys)
    yield from ((None, key) for key in after_keys)


def _keys_by_name(
    keys: Iterable[Key], view: Callable[[Key], tuple[str, ...]]
) -> dict[tuple[str, ...], list[Key]]:
    by_name = defaultdict(list)
    for key in keys:
        by_name[view(key)].append(key)
    return by_name


def counts(diff: Diff) -> str:
    change_counts = Counter(row.change for _, row in diff.rows)
    return (
        ", ".join(f"{change_counts[c]} {c.value}" for c in ORDER if change_counts[c])
        or "nothing to compare"
    )


def diff_text(diff: Diff, every: bool, colour: bool) -> str:
    """Return the differences for a terminal; ``every`` shows what is the same too."""
    lines = list(_headings(diff))
    for key, row in diff.rows:
        if row.change in (Change.SAME, Change.WITHIN) and not every:
            continue
        word = f"{row.change.value:<7}"
        if colour and row.change in _STYLES:
            word = f"\x1b[{_STYLES[row.change]}m{word}\x1b[0m"
        estimated = key in diff.before.estimated | diff.after.estimated
        lines.append(f"{word} {key}  {amount(row)}{' (estimated)' if estimated else ''}")
        lines += [f"        {cause(d)}" for d in row.lines[:CAUSES]]
        lines += [f"        {text}" for text in _own_peaks(row)]
    return "\n".join([*lines, counts(diff)])


def as_page(diff: Diff) -> str:
    """Return the differences as an HTML page, with both timelines where both inputs have one."""
    tests = [
        ComparedTest(
            name=str(key),
            environment=key.environment,
            comparison=row,
            causes=(*map(cause, row.lines[:CAUSES]), *_own_peaks(row)),
            before=diff.before.windows.get(diff.then.get(key, key)),
            after=diff.after.windows.get(key),
        )
        for key, row in diff.rows
    ]
    names = diff.before.name, diff.after.name
    return comparison_page(*names, tests, "; ".join(_headings(diff)))


def _headings(diff: Diff) -> Iterator[str]:
    if diff.before.environments != diff.after.environments:
        for side in (diff.before, diff.after):
            yield one_line(f"{side.name}: measured on {'; '.join(side.environments) or 'nothing'}")
        yield "the environments differ, so numbers may differ for no reason in the code"


def amount(row: Comparison) -> str:
    """Return both peaks and the change: ``74.1 MiB -> 90.1 MiB, +16.0 MiB (+22 %)``.

    Where another number than the peak is what changed, that one stands beside the new peak.
    """
    if row.changed is None or row.after is None:
        return format_size(abs(row.size_bytes))
    if row.changed.before_bytes == row.changed.after_bytes:
        return format_size(row.after.total)
    if row.changed.key == TOTAL:
        return row.changed.sentence
    return f"{format_size(row.after.total)}: {row.changed.sentence}"


def cause(line: LineDifference) -> str:
    """Return the change that one line of code made, on a line."""
    return one_line(line_text(line))


def _own_peaks(row: Comparison) -> Iterator[str]:
    """Yield what changed in a category's own peak, or in what is retained, but not at the peak.

    The largest comes first.
    """
    if row.before is None or row.after is None or row.lines or row.change is Change.SAME:
        return
    before, after = row.before, row.after
    changes = {
        f"in the own peak of {words(c.value)}": after.peaks[c] - before.peaks[c] for c in Category
    }
    changes["retained"] = after.retained.total - before.retained.total
    for name, change_bytes in sorted(changes.items(), key=lambda pair: -abs(pair[1])):
        if change_bytes:
            yield f"{format_change(change_bytes)} {name}"


def diff_json(diff: Diff) -> str:
    """Return the differences as JSON; docs/results-schema.md describes it."""
    rows: list[dict[str, Json]] = [
        {
            "test": str(key),
            "environment": key.environment,
            "change": row.change.value,
            "before_bytes": row.before.total if row.before else None,
            "after_bytes": row.after.total if row.after else None,
            "causes": [{"bytes": d.size_bytes, "text": cause(d)} for d in row.lines],
        }
        for key, row in diff.rows
    ]
    return json.dumps({"kind": "torchmem-diff", "format": 1, "tests": rows}, indent=1)
