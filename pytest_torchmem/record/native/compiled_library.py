"""The place of the library: in a wheel, or compiled once into the user's cache.

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
from hashlib import blake2b
from pathlib import Path
from typing import Final

from packaging.version import Version

from pytest_torchmem.building import (
    BuildError,
    cache_root,
    compile_sources,
    digest,
    find_compiler,
    make_once,
    options_of_torch,
    run_compiler,
    unfinished,
)

SHIPPED: Final = Path(__file__).with_name("shipped")
"""A wheel for one platform has libraries here, in a folder for each minor release of torch."""

# torch's release builds have NDEBUG: without it its headers look into fields that are not filled.
_OPTIONS: Final = ("-O2", "-DNDEBUG", "-std=c++20", "-fvisibility=hidden")
# What is missing is said when the library is loaded, and not when it is first called.
_LINKED: Final = ("-lc10", "-ldl", "-Wl,-z,now", "-Wl,--no-undefined", "-Wl,-s")


@dataclass(frozen=True, slots=True)
class Part:
    """A library of ours: its sources are in the folder ``name``, ``of_torch`` is linked with it."""

    name: str
    of_torch: str

    @property
    def sources(self) -> Path:
        return Path(__file__).with_name(self.name)

    @property
    def file_name(self) -> str:
        return f"libtorchmem_{self.name}.so"


OBSERVER: Final = Part("observer", "torch_cpu")
"""It notes all but the memory of a GPU, with a CPU build of torch and with a CUDA build."""

GPU_OBSERVER: Final = Part("observer_cuda", "c10_cuda")
"""It notes the memory of a GPU, with a CUDA build of torch alone."""


@dataclass(frozen=True, slots=True)
class CompiledLibrary:
    """The library for one torch: ``package`` is its folder, ``version`` its release."""

    part: Part
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
        sources = digest(facts, self.part.sources.iterdir())
        return f"{self.part.name}-{self.release}-{platform.machine()}-{sources}"

    def shipped(self) -> Path | None:
        """Return the library of an installed wheel."""
        path = SHIPPED / self.folder_name / self.part.file_name
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
        path = folder / self.part.file_name

        def make() -> None:
            say(
                f"the recorder of memory is compiled for torch {self.release}, once: "
                "this takes 10 to 30 s"
            )
            with unfinished(folder) as work:
                new_folder = work / folder.name
                new_folder.mkdir()
                library = new_folder / path.name
                self.compile(work, library)
                _sum_file(library).write_text(_sum_of(library))
                shutil.rmtree(folder, ignore_errors=True)
                new_folder.rename(folder)

        make_once(folder, lambda: not anew and _is_whole(path), make)
        return path

    def compile(self, work: Path, out: Path) -> None:
        """Write the library to ``out``. Raises `BuildError`."""
        headers = [self.package / "include"]
        if not (headers[0] / "ATen").exists():
            raise BuildError(f"torch {self.version} was installed without its headers")
        if self.part is GPU_OBSERVER:
            headers.append(self.headers_of_cuda())
        command = [*find_compiler(), *_OPTIONS, *options_of_torch(self.package)]
        objects = compile_sources(command, self.part.sources, headers, work)
        linked = (f"-L{self.package / 'lib'}", f"-l{self.part.of_torch}", *_LINKED)
        run_compiler(*command, "-shared", *objects, *linked, "-o", out)

    def headers_of_cuda(self) -> Path:
        """Return the folder of the headers of CUDA's runtime: torch's packages bring them.

        Raises `BuildError`.
        """
        # A simulated GPU has links to a torch that is installed elsewhere.
        own = (self.package / "version.py").resolve()
        sites = {self.package.parent, own.parent.parent}
        of_packages = (folder for site in sites for folder in site.glob("nvidia/*/include"))
        of_triton = (site / "triton" / "backends" / "nvidia" / "include" for site in sites)
        of_toolkit = (Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include",)
        for folder in (*of_packages, *of_triton, *of_toolkit):
            if (folder / "cuda_runtime_api.h").exists() and (folder / "crt").exists():
                return folder
        raise BuildError(
            "the headers of CUDA's runtime are not here; install the CUDA toolkit or set CUDA_HOME"
        )


def _places() -> Iterator[Path]:
    with suppress(RuntimeError):  # a user may have no home
        yield cache_root() / "recorder"
    # Whoever else could write there could have us load what they like.
    own = Path(tempfile.gettempdir()) / f"pytest-torchmem-{os.getuid()}"
    with suppress(OSError):
        own.mkdir(mode=0o700, exist_ok=True)
        status = own.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if is_own and not status.st_mode & 0o077:
            yield own / "recorder"


def _sum_file(library: Path) -> Path:
    return library.with_name(f"{library.name}.blake2b")


def _sum_of(library: Path) -> str:
    return blake2b(library.read_bytes()).hexdigest()


def _is_whole(library: Path) -> bool:
    """Return whether a library is as it was built: a process that maps half of one dies."""
    try:
        return _sum_file(library).read_text() == _sum_of(library)
    except (OSError, ValueError):
        return False
