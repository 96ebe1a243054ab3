"""A user's file that names our types passes mypy in its strictest mode."""

from __future__ import annotations

import subprocess
import sys

import pytest

USERS = """
from collections.abc import Iterator, Sequence

import pytest

from pytest_torchmem import Category, Explanation, MiB, Region, Result, StorageClaim, Torchmem


def pytest_torchmem_measured(
    config: pytest.Config, nodeid: str, results: Sequence[Result], failure: str
) -> None:
    print(sum(result.peak.total + result.retained.net for result in results))


def cache(storages: Sequence[Explanation]) -> Iterator[StorageClaim]:
    for found in storages:
        yield StorageClaim(found, Category.BUFFER, "the KV cache")


def test_step(torchmem: Torchmem) -> None:
    with torchmem.measure("forward") as forward:
        pass
    assert activation_of(forward) <= 3 * MiB
    torchmem.check(forward, tolerance="2%")


def activation_of(region: Region) -> int:
    return region.peak.activation
"""


def test_a_users_file_is_checked_with_our_types(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "test_user.py").write_text(USERS)
    (tmp_path / "test_wrong.py").write_text(USERS + "Region(1)\n")
    # No name above has a type of torch's, and to check all of torch takes half a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    files = ("test_user.py", "test_wrong.py")
    command = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, *files)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    *errors, closing = done.stdout.splitlines()
    assert {error.partition(":")[0] for error in errors} == {"test_wrong.py"}, done.stdout
    assert closing.endswith("in 1 file (checked 2 source files)")
