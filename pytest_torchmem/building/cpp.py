"""A C++ compiler of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

#: With these, a library can speak torch's own C++: theirs is the C++ library of GCC.
_COMPILERS: Final = ("g++", "clang++")


class BuildError(Exception):
    """C++ that could not be built: its text says why, and what to install."""


def find_compiler(*, any_kind: bool = False) -> list[str]:
    """Return the command of a compiler; of ``any_kind`` it need not speak torch's C++.

    Raises `BuildError` where there is none.
    """
    for name in _COMPILERS:
        if path := shutil.which(name):
            return [path]
    if not any_kind:
        raise BuildError("this machine has no C++ compiler; install g++")
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildError("this machine has no C++ compiler; install g++, or `pip install ziglang`")


def compile_sources(
    command: Sequence[str], sources: Path, headers: Sequence[Path], folder: Path
) -> list[Path]:
    """Compile all sources of a folder, some at a time, and return the object files.

    ``command`` is the compiler with its options. Raises `BuildError` with what it says.
    """
    included = [part for path in headers for part in ("-isystem", str(path))]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        run_compiler(*command, "-w", "-fPIC", "-c", source, "-o", out, *included)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        return list(workers.map(compile_one, sorted(sources.glob("*.cpp"))))


def run_compiler(*command: object) -> None:
    """Run a compiler. Raises `BuildError` with what it says."""
    name = Path(str(command[0])).name
    try:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{name} could not be started: {error.strerror}") from error
    if done.returncode:
        said = done.stderr.strip() or f"it ended with {done.returncode}"
        raise BuildError(f"{name} failed: {said}")


def options_of_torch(package: Path) -> list[str]:
    """Return the options with which a torch has its strings as this torch was built with."""
    settings = package / "share" / "cmake" / "Torch" / "TorchConfig.cmake"
    text = settings.read_text(encoding="utf-8") if settings.exists() else ""
    return re.findall(r"-D_GLIBCXX_USE_CXX11_ABI=\d", text)[:1]
