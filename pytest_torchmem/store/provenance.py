"""The provenance of numbers: the commit, the versions and the rank that they were measured on."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_torchmem import __version__
from pytest_torchmem.store.results import RunReport
from pytest_torchmem.values.measured import Rank

_GIT_SECONDS: Final = 10


def stamped(run: RunReport, folder: Path, rank: Rank) -> RunReport:
    """Return a run that ends now, of the code in ``folder``, on one rank."""
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return replace(
        run,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        dirty=bool(changed),
        versions=_versions(),
        rank=rank,
    )


def checked_out(folder: Path, files: Iterable[str]) -> frozenset[str]:
    """Return those of some files, relative to ``folder``, that git has in its index."""
    listed = _git(folder, "--literal-pathspecs", "ls-files", "-z", "--", *files)
    return frozenset(filter(None, listed.split("\0")))


def _versions() -> dict[str, str]:
    versions = {"torchmem": __version__}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torch"] = metadata.version("torch")
    versions["python"] = platform.python_version()
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
