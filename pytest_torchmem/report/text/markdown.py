"""A run as Markdown: for a comment on a pull request, or for the summary page of a CI job."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

from pytest_torchmem.analysis.judge.differences import lines_of
from pytest_torchmem.report.text.tables import (
    composition,
    left_out,
    line_place,
    line_word,
    unlisted_lines,
)
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import device_shown
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.units import format_change, format_size, one_line

MARKER: Final = "<!-- pytest-torchmem -->"
"""The first line: a bot finds its own comment by it and replaces it."""

COMMENT_LIMIT: Final = 65_536
"""The most characters that GitHub takes in a comment."""

STEP_SUMMARY_LIMIT_BYTES: Final = 1024 * 1024
"""The most that a step may add to its job's summary; GitHub drops all of it if there is more."""

_FRAME: Final = 600
"""Room for what stands around rows: headers, and how many more there are."""

_SYMBOLS: Final = {
    "failed": "❌",
    "not measured": "⚠️",
    "grown": "🔺",
    "shrunk": "🔻",
    "new": "🆕",
    "xfailed": "☑️",
    "ok": "✅",
}
_CAUSES: Final = 5
_STORIES: Final = 10
_OPEN_ROWS: Final = 20
"""More tests than these that are well are folded away, below what is not."""

_TABLE: Final = ("| | test | peak | against | retained |", "|---|---|---:|---:|---:|")


def run_markdown(
    run: RunReport, limit: int = COMMENT_LIMIT, measure: Callable[[str], int] = len
) -> str:
    """Return a run as Markdown that ``measure`` finds no longer than ``limit``.

    What is left out is said. What failed has at least half of the room.
    """
    problems, shown_count = _fitting((f"> {_text(p)}\n" for p in run.problems), limit // 4, measure)
    problems += _more(len(run.problems) - shown_count, "problems")
    head = [MARKER, f"### Memory: {run.headline}", "", *([problems] if problems else [])]
    stories = [f"- **{_text(story.sentence)}**" for story in run.stories[:_STORIES]]
    head += [*stories, ""] if stories else []
    tail = ["", _facts(run)]
    ranked = run.ranked()
    well = [test for test in ranked if test.status == "ok"]
    well = well if len(well) > _OPEN_ROWS else []
    others = [test for test in ranked if not well or test.status != "ok"]
    failed = [test for test in others if test.status in ("failed", "grown")]
    room = limit - sum(measure(line) + 1 for line in (*head, *tail)) - _FRAME
    # One cause is told once; the other tests that failed for it name the first.
    first_of = {test.test: s.tests[0].test for s in run.stories for test in s.tests[1:]}
    sections = (
        _same_cause(test, first_of[test.test]) if test.test in first_of else _details(test)
        for test in failed
    )
    details, shown_count = _fitting(sections, room // 2, measure)
    details += _more(len(failed) - shown_count, "that failed")
    room -= measure(details)
    rows, shown_count = _fitting(_table_rows(others), room, measure)
    table = [*_TABLE, rows] if others else []
    table.append(_more(len(others) - shown_count, "tests"))
    folded = _folded(well, room - measure(rows), measure) if well else ()
    return "\n".join([*head, *table, details, *folded, *tail]) + "\n"


def step_summary(run: RunReport, taken_bytes: int = 0) -> str:
    """Return a run as Markdown for the summary of a job, beside ``taken_bytes`` that are there.

    Without room for it, it is empty: GitHub would drop what is there, too.
    """
    limit_bytes = STEP_SUMMARY_LIMIT_BYTES - taken_bytes
    text = run_markdown(run, limit_bytes, _bytes)
    return text if _bytes(text) <= limit_bytes else ""


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "backslashreplace"))


def _folded(
    tests: Sequence[MeasuredTest], room: int, measure: Callable[[str], int]
) -> Iterator[str]:
    rows, shown = _fitting(_table_rows(tests), room, measure)
    yield f"<details><summary>{len(tests)} ok</summary>\n"
    if rows:
        yield from (*_TABLE, rows)
    yield f"{_more(len(tests) - shown, 'tests')}\n</details>"


def _more(count: int, what: str) -> str:
    return f"\n... and {count} more {what}, which the report of this run has\n" if count else ""


def _fitting(texts: Iterator[str], room: int, measure: Callable[[str], int]) -> tuple[str, int]:
    """Return as many texts as there is room for, and how many these are."""
    parts: list[str] = []
    for text in texts:
        room -= measure(text) + 1
        if room < 0:
            break
        parts.append(text)
    return "\n".join(parts), len(parts)


def _table_rows(tests: Sequence[MeasuredTest]) -> Iterator[str]:
    for test in tests:
        symbol = f"{_SYMBOLS[test.status]} {test.status}"
        body, name = test.body, _code(test.test)
        if body is None:
            yield f"| {symbol} | {name} | | {_text(test.sentence)} | |"
            continue
        others = (w for w in test.windows if w is not body)
        standings = [_text(test.standing), *map(_by_name, others)]
        against = "; ".join(filter(None, standings))
        if test.outcome == "xfailed" and test.failed_windows:
            against += ", as expected"
        yield f"| {symbol} | {name} | {body.peak_text} | {against} | {_retained(body)} |"


def _by_name(window: Window) -> str:
    """Describe a region that failed; ``""`` of one that is well."""
    return f"{_code(window.result.name)} {_text(window.status)}" if window.sentence else ""


def _same_cause(test: MeasuredTest, first: str) -> str:
    numbers = test.failed_windows[0].sentence.partition(": ")[0]
    return f"- {_code(test.test)}: {_text(numbers)}, by the same lines as {_code(first)}"


def _details(test: MeasuredTest) -> str:
    lines: list[str] = []
    for window in (*test.windows, *test.unjudged):
        sentences = window.sentences
        if sentences and window.result.name:
            lines += ["", f"In {_code(window.result.name)}:", ""]
        lines += [f"- {_text(sentence)}" for sentence in sentences]
        lines += list(_causes(window))
    for text in filter(None, (test.problem, test.raised, test.not_measured)):
        lines.append(f"- {_text(text)}")
    name = escape(one_line(" ".join(test.test.split())), quote=False)
    head = f"<details><summary><code>{name}</code></summary>"
    lines = lines or ["- it failed for a reason other than memory"]
    return "\n".join([head, "", *lines, "", "</details>"])


def _causes(window: Window) -> Iterator[str]:
    lines = lines_of(window)
    if lines:
        yield "\n| change | kind | of | operator | module | source |\n|---:|---|---|---|---|---|"
    for line in lines[:_CAUSES]:
        cells = " | ".join(map(_code, line_place(line)))
        what = f"{format_change(line.size_bytes)} | {line_word(line)} | {composition(line)}"
        yield f"| {what} | {cells} |"
    if lines:
        sizes = [line.size_bytes for line in lines]
        more = left_out(sizes, format_change, _CAUSES) + unlisted_lines(lines, window.told_by)
        yield from (f"\n{text}" for text in more)


def _facts(run: RunReport) -> str:
    devices = {device_shown(t.environment) for t in run.tests} - {""}
    facts = [f"{name} {version}" for name, version in run.versions.items()]
    facts += [f"measured on {', '.join(sorted(devices))}"] if devices else []
    facts += [str(run.rank)] if run.rank.count > 1 else []
    dirty = " with changes" if run.dirty else ""
    facts += [f"commit {run.commit[:12]}{dirty}"] if run.commit else []
    return f"<sub>{_text(', '.join(facts))}</sub>" if facts else ""


def _retained(window: Window) -> str:
    mark = " (estimated)" if window.result.estimated else ""
    return format_size(window.result.retained.total) + mark


def _text(text: str) -> str:
    """Text in which nothing is markup: no tags, tables, links, mentions or references."""
    line = one_line(" ".join(text.split()))
    escaped = re.sub(r"([\\`*_{}\[\]|#~$])", r"\\\1", line)
    return escape(escaped, quote=False).replace("@", "@<!-- -->")


def _code(text: str) -> str:
    """Text as code, in a fence longer than any run of backticks in it."""
    line = one_line(" ".join(text.split())).replace("|", "\\|")
    if not line:
        return ""
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}"
