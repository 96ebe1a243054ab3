"""A run, or one timeline, as one HTML file that needs no network.

Data are embedded as JSON, one block for each test that is read when the test is opened;
``assets/page.js`` builds what is seen. docs/decisions/0005-html-report.md says why so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Final

from pytest_torchmem.analysis.judge.differences import lines_of
from pytest_torchmem.analysis.judge.holders import holders_title
from pytest_torchmem.report.page.svg import COLOURS, escaped, marks_of
from pytest_torchmem.report.text.tables import composition, line_place, line_word, unlisted_lines
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import device_shown
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import NOT_COMPARED, MeasuredTest, Window
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import format_size

PICTURES_BUDGET_BYTES: Final = 24 * 1024 * 1024
"""How much of a page timelines may take; a browser still opens it on a phone."""

_PLAIN_ROWS: Final = 1000
_MEANINGS: Final = {
    Category.PARAMETER: "The model's parameters.",
    Category.GRADIENT: "Gradients of parameters.",
    Category.OPTIMIZER_STATE: "State that the optimizer keeps from step to step.",
    Category.INPUT: "Data that the forward pass reads.",
    Category.AUTOGRAD_DETAIL: "Gradients of activations, during the backward pass.",
    Category.ACTIVATION: "Made in the forward pass and kept for the backward pass.",
    Category.TEMPORARY: "Everything else that the body makes: scratch, outputs, caches.",
    Category.BUFFER: "Buffers that modules registered.",
    Category.WORKSPACE: "Scratch of libraries such as cuBLAS, with no tensor behind it.",
    Category.UNKNOWN: "Memory that could not be classified.",
}
"""Each category in a sentence, for who reads its name for the first time."""
_NOT_KEPT: Final = (
    "The report has no timeline of this. A folder has those of failed tests alone, a file has all; "
    "only the first regions of a test get one."
)
_LEFT_OUT: Final = (
    "The timeline of this test was left out to keep this file small; "
    "a report into a folder has a page for each test."
)
# JSON inside a script element ends at the first "</script", and older parsers see "<!--" too.
_IN_SCRIPT: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def run_page(run: RunReport, title: str = "Memory of PyTorch tests") -> str:
    """Return the page of a run: its tests, to search and filter, each with its timelines.

    Timelines beyond `PICTURES_BUDGET_BYTES` are left out, those of passed and small tests first,
    and the page says so where they are missing.
    """
    ranked = run.ranked()
    rows = [_row(test, order) for order, test in enumerate(ranked)]
    head = {
        "title": title,
        "facts": _facts(run),
        "counts": run.counts(),
        "tests": rows,
        "problems": list(run.problems),
        "stories": [story.sentence for story in run.stories],
    }
    return tests_page(head, [partial(_content, test) for test in ranked], _plain_table(ranked))


def tests_page(
    head: Mapping[str, Json], contents: Iterable[Callable[[bool], dict[str, Json]]], plain: str
) -> str:
    """Return the page of some tests; ``contents`` return what is inside each, with its timelines.

    Timelines are left out once those before have used up the budget.
    """
    blocks = [("torchmem-run", embedded({**head, "categories": categories_json()}))]
    used_bytes = 0
    for row, content in zip(head["tests"], contents, strict=True):
        blocks.append((row["id"], embedded(content(used_bytes < PICTURES_BUDGET_BYTES))))
        used_bytes += len(blocks[-1][1])
    return page_text(head["title"], blocks, plain)


def picture_page(picture: Picture, title: str) -> str:
    """Return the page of one timeline that belongs to no test."""
    if not picture.times_ns:
        return f"<!doctype html><title>{escaped(title)}</title><p>Nothing was recorded.</p>\n"
    name = f"Memory timeline: {title}"
    head = {
        "title": name,
        "facts": [],
        "problems": [],
        "stories": [],
        "categories": categories_json(),
        "single": "torchmem-timeline",
    }
    estimated = "estimated " if picture.estimated else ""
    plain = f"<p>Peak: {estimated}{format_size(picture.totals[picture.peak])}.</p>"
    blocks = [("torchmem-run", embedded(head))]
    window = window_json(_window_of(picture, title), with_pictures=True)
    blocks.append(("torchmem-timeline", embedded({"windows": [window]})))
    return page_text(name, blocks, plain)


def _window_of(picture: Picture, device: str) -> Window:
    """Return a measured window of which nothing but the timeline is known."""
    at_peak, at_end = picture.at(picture.peak), picture.at(len(picture.times_ns) - 1)
    own = CategoryBytes.of({category: max(levels) for category, levels in picture.levels.items()})
    at_the_peak = (
        replace(t.contributor, size_bytes=t.levels[picture.peak]) for t in picture.tracks
    )
    live = tuple(sorted((c for c in at_the_peak if c.size_bytes), key=lambda c: -c.size_bytes))
    peak = Peak(at_peak.total, picture.times_ns[picture.peak], at_peak, own, live)
    retained = Retained(at_end.total, at_end)
    return Window(Result("", device, picture.estimated, peak, retained), picture=picture)


def page_text(title: str, blocks: Sequence[tuple[str, str]], plain: str) -> str:
    """Return a page with blocks of JSON by their id; ``plain`` is for readers without scripts."""
    data = "\n".join(
        f'<script type="application/json" id="{name}">{text}</script>' for name, text in blocks
    )
    folder = resources.files("pytest_torchmem.report") / "assets"
    files = {file.name.replace(".", "_"): file.read_text("utf-8") for file in folder.iterdir()}
    page = files.pop("page_html")
    return page.format(title=escaped(title), table=plain, data=data, **files)


def embedded(value: object) -> str:
    """Return a value as JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":")).translate(_IN_SCRIPT)


def categories_json() -> list[dict[str, str]]:
    """Return what a page must know of each category."""
    return [
        {"key": c.value, "name": words(c.value), "colour": COLOURS[c], "meaning": _MEANINGS[c]}
        for c in Category
    ]


def _facts(run: RunReport) -> list[tuple[str, str]]:
    devices = sorted({device_shown(t.environment) for t in run.tests} - {""})
    dirty = " with changes" if run.dirty else ""
    facts = [
        ("measured on", ", ".join(devices)),
        ("rank", run.rank.environment.get("rank", "")),
        ("commit", f"{run.commit[:12]}{dirty}" if run.commit else ""),
        ("at", run.created),
        *run.versions.items(),
    ]
    return [(name, value) for name, value in facts if value]


def _row(test: MeasuredTest, order: int) -> dict[str, Json]:
    body = test.body
    return {
        "id": f"torchmem-test-{order}",
        "order": order,
        "name": test.test,
        "status": test.status,
        "sentence": test.sentence,
        "device": body.result.device if body else "",
        "measured": body is not None,
        "estimated": bool(body and body.result.estimated),
        "peak": body.result.peak.total if body else 0,
        "at_peak": body.result.peak.at_peak.to_json() if body else {},
        "baseline_bytes": body.baseline_bytes if body else 0,
        "compared": bool(body and body.is_compared),
        "change": body.change.value if body else "",
        "word": (NOT_COMPARED if test.raised else body.change_word) if body else "",
        "moved": body.change_text if body else "",
        "reference": body.reference if body else "",
        "limit": body.limit_status if body else "",
    }


def _content(test: MeasuredTest, with_pictures: bool) -> dict[str, Json]:
    return {
        "problem": test.problem,
        "not_measured": test.not_measured,
        "raised": test.raised,
        "expected": test.outcome == "xfailed",
        "windows": [window_json(w, with_pictures) for w in (*test.windows, *test.unjudged)],
    }


def window_json(window: Window, with_pictures: bool) -> dict[str, Json]:
    """Return a window for the page, with its differences from the baseline that it has."""
    result = window.result
    data: dict[str, Json] = {
        **result.to_json(),
        "total": result.peak.total,
        "at_peak": result.peak.at_peak.to_json(),
        "own": result.peak.by_category.to_json(),
        "live": [c.to_json() for c in result.peak.live],
        "limits": dict(window.limits),
        "marks": [mark.to_json() for mark in marks_of(window)],
        "growth": result.growth,
        "change": window.change.value,
        "sentences": list(window.sentences),
        "remarks": _remarks(window),
        "holders": [(h.size_bytes, h.count, str(h)) for h in result.retained.holders],
        "holders_title": holders_title(result.retained.holders),
        "picture": None,
    }
    if window.picture and with_pictures:
        data["picture"] = window.picture.to_json()
    elif window.picture:
        data["no_picture"] = _LEFT_OUT
    else:
        data["no_picture"] = _NOT_KEPT
    if entry := window.baseline:
        lines, changed_number = lines_of(window), window.told_by
        data["baseline"] = {"total": entry.total, "own": entry.peaks.to_json()}
        data["differences"] = [
            [line.size_bytes, line_word(line), composition(line), *line_place(line)]
            for line in lines
        ]
        data["of"] = f"{changed_number.name}, {changed_number.by}"
        data["unlisted"] = unlisted_lines(lines, changed_number)
    return data


def _remarks(window: Window) -> list[str]:
    """Return remarks that a reader of the comparison needs beside its numbers."""
    remarks = [window.notice] if window.notice else []
    if window.reference:
        remarks.append(
            f"compared with the baseline of {window.reference}, as --torchmem-baseline-from says"
        )
    if window.nearest:
        remarks.append(f"there is no baseline for this environment; {window.nearest} has one")
    return remarks + [f"not all seen: {spot}" for spot in window.result.blind_spots]


def _plain_table(tests: Sequence[MeasuredTest]) -> str:
    rows = [
        f"<td>{escaped(test.status)}</td>"
        f'<td class="number">{test.body.peak_text if test.body else ""}</td>'
        f"<td>{escaped(test.standing)}</td>"
        f"<td>{escaped(test.test)}<br>{escaped(test.sentence)}</td>"
        for test in tests[:_PLAIN_ROWS]
    ]
    more = len(tests) - _PLAIN_ROWS
    cut = f"<p>... and {more} more</p>" if more > 0 else ""
    return plain_table(("status", "peak", "against", "test"), rows) + cut


def plain_table(headers: Iterable[str], rows: Iterable[str]) -> str:
    """The numbers for a reader without JavaScript, such as one whose CI server switches it off."""
    heads = "".join(f'<th scope="col">{name}</th>' for name in headers)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<table class="plain"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
