"""Where Python keeps its frames is what its headers say."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

from pytest_torchmem.record.native.compiled_library import OBSERVER
from tools.python_offsets import missing, offsets

pytestmark = pytest.mark.slow

ROWS = {
    int(row.split(",")[0][1:]): row
    for row in re.findall(r"\{1\d(?:, -?\d+){14}\}", (OBSERVER.sources / "calls.cpp").read_text())
}


def pythons() -> list[str]:
    """This Python, and others that are on the path under their own names."""
    others = (shutil.which(f"python3.{minor}") for minor in sorted({*ROWS, 14}))
    return [sys.executable, *filter(None, others)]


@pytest.mark.parametrize("python", pythons())
def test_a_row_is_what_the_headers_say(python: str) -> None:
    if problem := missing(python):
        pytest.skip(problem)
    row, others = offsets(python)
    minor = int(row.split(",")[0][1:])
    if minor not in ROWS:
        pytest.skip(f"Python 3.{minor} has no row: {row} {others}")
    assert row == ROWS[minor]
    assert others == (
        "length 16 state 32 kind 0x1c ascii 0x40 "
        f"compact {72 if minor < 12 else 56} type 8 name 24 size 16 bytes 32"
    )


def test_rows_are_found() -> None:
    assert {11, 12, 13} <= ROWS.keys()
