"""Reports on disk: the kind that a name asks for, each file replaced in one step."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pytest_torchmem.report.text.markdown import run_markdown
from pytest_torchmem.store.files import replace_file
from pytest_torchmem.store.run_reports import RunReport, render_run
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.measured import MeasuredTest

FOLDER: Final = ""
"""Stands for a folder among the kinds of report."""

_NAMED: Final = 5


def _page(run: RunReport, *title: str) -> str:
    # A run that asks for no page does without.
    from pytest_torchmem.report.page.html import run_page

    return run_page(run, *title)


def _svg(run: RunReport) -> str:
    from pytest_torchmem.report.page.svg import marks_of, timeline_svg

    drawable = [(t, t.body) for t in run.tests if t.body and t.body.picture]
    if not drawable:
        raise ReportError("a picture shows one timeline, and no test has one")
    if len(drawable) > 1:
        names = [test.test for test, _ in drawable]
        more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise ReportError(
            f"a picture shows one timeline, and {len(names)} tests have one; name one test: "
            f"{', '.join(names[:_NAMED])}{more}"
        )
    test, body = drawable[0]
    assert body.picture is not None
    return timeline_svg(body.picture, test.test, marks_of(body))


RENDERERS: Final[Mapping[str, Callable[[RunReport], str]]] = {
    ".json": render_run,
    ".md": run_markdown,
    ".html": _page,
    ".svg": _svg,
}


def kind_of(path: Path) -> str:
    """Return the ending that decides the kind of a report, or `FOLDER`.

    A name without an ending is a folder, and so is one that exists as such. Raises `ReportError`
    for an ending that stands for nothing.
    """
    try:
        is_folder = path.is_dir() or not path.suffix
    except OSError as error:  # a name that is too long
        raise ReportError(f"{path.name[:40]}... is no name: {error.strerror or error}") from None
    if is_folder:
        return FOLDER
    if path.suffix not in RENDERERS:
        endings = ", ".join(RENDERERS)
        if path.suffix == ".png":
            raise ReportError(
                f"{path.name}: a timeline is drawn as an SVG, which every machine draws alike; "
                f"write {path.with_suffix('.svg').name} instead"
            )
        raise ReportError(
            f"{path.name}: no report has this ending; end the name in one of {endings}, or in "
            "none for a folder"
        )
    return path.suffix


def folder_files(run: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file in a folder's report.

    There is a page for each test that has a timeline, by default those that failed.
    """
    yield "results.json", render_run(run)
    yield "summary.md", run_markdown(run)
    yield "index.html", _page(run)
    for test in run.tests:
        if any(w.picture for w in (*test.windows, *test.unjudged)):
            alone = replace(run, tests=(test,), changes=(), problems=())
            yield f"tests/{page_name(test)}", _page(alone, test.test)


def page_name(test: MeasuredTest, ending: str = ".html") -> str:
    """Return a file name for a test: readable, and its own even where names differ in a sign."""
    nodeid = test.test
    file, _, name = nodeid.partition("::")
    readable = re.sub(r"[^A-Za-z0-9]+", "-", f"{file.rpartition('/')[2]}-{name}").strip("-")[:80]
    digest = hashlib.sha256(nodeid.encode("utf-8", "replace")).hexdigest()
    return f"{readable}-{digest[:8]}{ending}"


_PAGE_OF_A_TEST: Final = re.compile(r"-[0-9a-f]{8}\.(html|trace)$")


def write_run(
    run: RunReport, path: Path, traces: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """Write the report that ``path`` asks for and return the file to open.

    ``traces`` are stored recordings by test; in a folder each lies beside its test's page. Pages
    that an earlier run left there are removed. Raises `ReportError`.
    """
    try:
        if (kind := kind_of(path)) != FOLDER:
            replace_file(path, RENDERERS[kind](run))
            return path
        if (path / "results.json").exists() and (path / "tests").is_dir():  # of an earlier run
            for page in (path / "tests").iterdir():
                if _PAGE_OF_A_TEST.search(page.name):
                    page.unlink(missing_ok=True)
        for name, text in folder_files(run):
            replace_file(path / name, text)
        for test in run.tests:
            if trace := traces.get(test.test):
                replace_file(path / "tests" / page_name(test, ".trace"), trace)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror or error}") from None
    return path / "index.html"
