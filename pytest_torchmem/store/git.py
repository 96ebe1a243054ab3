"""The one way to ask git."""

from __future__ import annotations

import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Final

from pytest_torchmem.values.errors import ReportError

_SECONDS: Final = 10  # a test waits no longer for what is good to know


def git_output(
    folder: Path,
    *arguments: str,
    repository: Path | None = None,
    index: Path | None = None,
    given: str = "",
    required: bool = False,
) -> str:
    """Return what git prints; nothing where there is no git or no repository, and where it fails.

    It is asked about the repository that the folder is in, or about one of ours, where nothing that
    the environment says of the other one counts, with an ``index``. ``given`` is what it reads.
    Raises `ReportError` for a failure where the output is ``required``, however long that takes.
    """
    plain = ["--no-optional-locks", "-c", "core.quotePath=false"]
    environment = dict(os.environ)
    if repository:
        plain += [f"--git-dir={repository}", f"--work-tree={folder}"]
        environment = {n: v for n, v in environment.items() if not n.startswith("GIT_")}
    if index:
        environment["GIT_INDEX_FILE"] = str(index)
    try:
        process = subprocess.run(
            ["git", "-C", str(folder), *plain, *arguments],
            input=given.encode("utf-8", "surrogateescape"),
            env=environment,
            capture_output=True,
            timeout=None if required else _SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"git cannot be run: {getattr(error, 'strerror', '') or error}"
    else:
        if process.returncode == 0:
            return process.stdout.decode("utf-8", "replace")
        reason = process.stderr.decode("utf-8", "replace").strip()
        reason = reason or f"git {arguments[0]} ended with {process.returncode}"
        problem = f"git cannot read the history of {folder}: {reason}"
    if required:
        raise ReportError(problem)
    return ""


run_git: Final = partial(git_output, required=True)
