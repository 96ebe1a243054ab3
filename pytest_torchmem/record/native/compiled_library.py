"""Where the library is: a wheel has it, or it is compiled once into the user's cache.

Nothing here imports torch: a build of the wheel uses it, too.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from packaging.version import Version

from pytest_torchmem.building.cache import cache_root, digest, make_once, unfinished
from pytest_torchmem.building.compiler import (
    BuildError,
    compile_sources,
    find_compiler,
    options_of_torch,
    run_compiler,
)

SOURCES: Final = Path(__file__).with_name("observer")
SHIPPED: Final = Path(__file__).with_name("shipped")
"""A wheel for one platform has libraries here, in a folder for each minor release of torch."""

LIBRARY_FILE: Final = "libtorchmem_observer.so"
_SUM: Final = f"{LIBRARY_FILE}.sha256"

# torch's release builds have NDEBUG: without it its headers look into fields that are not filled.
_OPTIONS: Final = ("-O2", "-DNDEBUG", "-std=c++20", "-fvisibility=hidden")
# What is missing is said when the library is loaded, and not when it is first called.
_LINKED: Final = ("-lc10", "-ltorch_cpu", "-ldl", "-Wl,-z,now", "-Wl,--no-undefined", "-Wl,-s")


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """The library for one torch: ``package`` is its folder, ``version`` its release."""

    package: Path
    version: str

    @property
    def release(self) -> str:
        """The releases that share a library: all of a minor one, or a single one before that."""
        parsed = Version(self.version)
        return self.version if parsed.is_prerelease else f"{parsed.major}.{parsed.minor}"

    @property
    def folder_name(self) -> str:
        """Tells apart what must not be mixed up: torch, the machine, our sources and options."""
        facts = " ".join([*_OPTIONS, *_LINKED, *options_of_torch(self.package)])
        release = f"{self.release}-{platform.machine()}"
        return f"torch-{release}-{digest(facts, SOURCES.iterdir())}"

    def shipped(self) -> Path | None:
        """Return the library of an installed wheel."""
        path = SHIPPED / self.folder_name / LIBRARY_FILE
        return path if path.exists() else None

    def cached(self, say: Callable[[str], None], *, anew: bool = False) -> Path:
        """Return the library in the cache; it is compiled where it is missing or damaged.

        ``anew`` compiles it in any case, ``say`` is called before. Where the cache cannot be
        written, a folder of the user's among those for temporary files takes its place. Raises
        `BuildError`.
        """
        problem = ""
        for place in _places():
            try:
                return self._cached_in(place / self.folder_name, say, anew)
            except OSError as error:
                problem = f"{place} cannot be written ({error.strerror})"
        raise BuildError(problem)

    def _cached_in(self, folder: Path, say: Callable[[str], None], anew: bool) -> Path:
        def make() -> None:
            say(
                f"the recorder of memory is compiled for torch {self.release}, once: "
                "this takes 10 to 30 s"
            )
            with unfinished(folder) as work:
                made = work / folder.name
                made.mkdir()
                self.compile(work, made / LIBRARY_FILE)
                (made / _SUM).write_text(_sum_of(made / LIBRARY_FILE))
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)

        make_once(folder, lambda: not anew and _is_whole(folder), make)
        return folder / LIBRARY_FILE

    def compile(self, work: Path, out: Path) -> None:
        """Write the library to ``out``. Raises `BuildError`."""
        headers = self.package / "include"
        if not (headers / "ATen").exists():
            raise BuildError(f"torch {self.version} was installed without its headers")
        command = [*find_compiler(), *_OPTIONS, *options_of_torch(self.package)]
        objects = compile_sources(command, SOURCES, [headers], work)
        libraries = f"-L{self.package / 'lib'}"
        run_compiler(*command, "-shared", *objects, libraries, *_LINKED, "-o", out)


def _places() -> Iterator[Path]:
    with suppress(RuntimeError):  # a user may have no home
        yield cache_root() / "recorder"
    # Whoever else could write there could have us load what they like.
    own = Path(tempfile.gettempdir()) / f"pytest-torchmem-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if is_own and not found.st_mode & 0o077:
            yield own / "recorder"


def _sum_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether a library is as it was built: a process that maps half of one dies at the rest."""
    try:
        return (folder / _SUM).read_text() == _sum_of(folder / LIBRARY_FILE)
    except (OSError, ValueError):
        return False
