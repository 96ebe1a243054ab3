"""Reports on disk: each file in one step, so that a reader never sees half of one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytest_torchmem.errors import ReportError
from pytest_torchmem.report.files import FOLDER, folder_files, kind_of, rendered
from pytest_torchmem.report.run import RunReport

_PAGE_OF_A_TEST: Final = re.compile(r"-[0-9a-f]{8}\.html$")


def write_run(run: RunReport, path: Path) -> Path:
    """Write the report that ``path`` asks for and return the file to open.

    Pages that an earlier run left in a folder are removed. Raises `ReportError`.
    """
    try:
        if kind_of(path) != FOLDER:
            replace_file(path, rendered(run, path))
            return path
        for stale in _pages_of_an_earlier_run(path):
            stale.unlink(missing_ok=True)
        for name, text in folder_files(run):
            replace_file(path / name, text)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror or error}") from None
    return path / "index.html"


def _pages_of_an_earlier_run(folder: Path) -> Iterator[Path]:
    if (folder / "results.json").exists():
        pages = sorted((folder / "tests").glob("*.html"))
        yield from (path for path in pages if _PAGE_OF_A_TEST.search(path.name))


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file, and the folders it is in. Raises `OSError`, and leaves no half file then."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
