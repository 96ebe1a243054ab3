"""Building: our C++ is compiled once, where it is first needed, into a cache of the user's."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Final

UNFINISHED: Final = ".building"


def cache_root() -> Path:
    """Return the folder that belongs to us in the user's cache.

    Raises `RuntimeError` where the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-torchmem"


def digest(facts: str, files: Iterable[Path]) -> str:
    """Return a short name for what is built of these sources under these circumstances."""
    hashed = blake2b(facts.encode())  # OpenSSL's hashes take 10 ms to begin with
    for file in sorted(files):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:12]


def make_once(out: Path, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
    """Call ``make`` where something is missing: one process does, and those beside it wait."""
    if is_made():
        return
    from filelock import FileLock  # only a build needs it

    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(out.parent)
    with FileLock(f"{out}.lock"):
        if not is_made():
            make()


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Make a folder beside ``out`` for what is not ready; no other process makes ``out`` now."""
    folder = out.with_name(out.name + UNFINISHED)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove what builds have left that were killed: their locks are held no more."""
    from filelock import FileLock, Timeout

    for leftover in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(Timeout), FileLock(leftover.with_suffix(".lock"), timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)


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
