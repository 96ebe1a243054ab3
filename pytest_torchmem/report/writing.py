"""Reports on disk: each file in one step, so that a reader never sees half of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pytest_torchmem.report.files import FOLDER, folder_files, kind_of, page_name, rendered
from pytest_torchmem.store.files import replace_file
from pytest_torchmem.store.results import RunReport
from pytest_torchmem.values.errors import ReportError

_PAGE_OF_A_TEST: Final = re.compile(r"-[0-9a-f]{8}\.(html|trace)$")


def write_run(
    run: RunReport, path: Path, traces: Mapping[str, bytes] = MappingProxyType({})
) -> Path:
    """Write the report that ``path`` asks for and return the file to open.

    ``traces`` are stored recordings by test; in a folder each lies beside its test's page. Pages
    that an earlier run left there are removed. Raises `ReportError`.
    """
    try:
        if kind_of(path) != FOLDER:
            replace_file(path, rendered(run, path))
            return path
        for stale in _pages_of_an_earlier_run(path):
            stale.unlink(missing_ok=True)
        for name, text in folder_files(run):
            replace_file(path / name, text)
        for test in run.tests:
            if trace := traces.get(test.measured.test):
                replace_file(path / "tests" / page_name(test, ".trace"), trace)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror or error}") from None
    return path / "index.html"


def _pages_of_an_earlier_run(folder: Path) -> Iterator[Path]:
    if (folder / "results.json").exists():
        pages = sorted((folder / "tests").iterdir()) if (folder / "tests").is_dir() else []
        yield from (path for path in pages if _PAGE_OF_A_TEST.search(path.name))
