"""The provenance of numbers: commit, versions and rank."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Final

from pytest_torchmem.store.changed_lines import git_output
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.measured import Rank

_PACKAGES: Final = {"torchmem": "pytest-torchmem", "torch": "torch"}


def stamped(run: RunReport, folder: Path, rank: Rank) -> RunReport:
    """Return a run that ends now, of the code in ``folder``, on one rank."""
    commit = git_output(folder, "rev-parse", "HEAD").strip()
    changed = git_output(folder, "status", "--porcelain", "--untracked-files=no") if commit else ""
    return replace(
        run,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        commit=commit,
        dirty=bool(changed),
        versions=_versions(),
        rank=rank,
    )


PLACE: Final = "{rank}"
"""What stands for the rank's number in the name of a file."""


def path_of_rank(path: str | os.PathLike[str], rank: Rank) -> Path:
    """Return the path for one rank: with its number for ``{rank}``, or at the name's end.

    Where there is one rank only, a path without ``{rank}`` stays as it is.
    """
    text = os.fspath(path)
    if PLACE in text:
        return Path(text.replace(PLACE, str(rank.number)))
    plain = Path(text)
    return plain if rank.count == 1 else plain.with_stem(f"{plain.stem}-rank{rank.number}")


def checked_out(folder: Path, files: Iterable[str]) -> frozenset[str]:
    """Return those of some files, relative to ``folder``, that git has in its index."""
    listed = git_output(folder, "--literal-pathspecs", "ls-files", "-z", "--", *files)
    return frozenset(filter(None, listed.split("\0")))


def _versions() -> dict[str, str]:
    versions = {}
    for name, package in _PACKAGES.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(package)
    versions["python"] = platform.python_version()
    versions["platform"] = f"{platform.system()} {platform.machine()}"
    return versions
