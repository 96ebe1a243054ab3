"""Build the simulated CUDA runtime: one library under the names of all that torch links with.

A wheel for Linux brings one library for each CUDA release (`shipped`), which serves every torch
that asks for nothing else. For another torch, and from the sdist, a C++ compiler builds it once.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from pytest_torchmem.simulate.symbols import ElfFile
from pytest_torchmem.values.errors import SimulationError

SOURCES: Final = Path(__file__).with_name("runtime")
SHIPPED: Final = Path(__file__).with_name("shipped")
LIBRARY: Final = "libsimulated_cuda.so"

_NAMES_OF_CUDA: Final = re.compile(r"lib(cu\w+|nccl|nvrtc|nvToolsExt|nvshmem_host)\.so")
# Nothing is linked with these; torch and Triton open them by name.
_OPENED_BY_NAME: Final = {"libnvidia-ml.so.1", "libcuda.so.1", "libcuda.so"}
# Most symbols name the version of a library; the others are known by how they begin.
_UNVERSIONED: Final = re.compile(r"(cu[A-Z]|cuFile|cudnn|curand|nccl|cusparseLt|nvshmem|nvtx)\w+$")
_VERSIONS_OF_OTHERS: Final = ("GLIBC", "CXXABI", "GOMP", "OMP", "GCC")
#: The version of the symbols that are asked for without one.
NO_VERSION: Final = "SIMULATED"

#: The symbols that somebody asks for, by the version that they are asked for under.
Asked = Mapping[str, set[str]]


def make_runtime(
    torch_libraries: Path, cuda: str, headers: Callable[[], Sequence[Path]], out: Path
) -> None:
    """Write the library, and links that give it its names, into the folder ``out``.

    ``torch_libraries`` is the ``lib`` folder of a build of torch for the release ``cuda``;
    ``headers`` fetches the CUDA runtime's own, if they are needed. The folder appears whole or not
    at all. Raises `SimulationError` without a compiler, or with what it says.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()
        libraries = [ElfFile(path) for path in sorted(torch_libraries.glob("lib*.so"))]
        asked = asked_for(libraries, torch_libraries / "libc10_cuda.so")
        ready = shipped(cuda)
        if ready.exists() and serves(ElfFile(ready), asked):
            shutil.copyfile(ready, made / LIBRARY)
        else:
            build(find_compiler(), headers(), asked, made / LIBRARY)
        for name in _linked_with(libraries) | _OPENED_BY_NAME:
            (made / name).symlink_to(LIBRARY)
        if not out.exists():
            made.rename(out)


def shipped(cuda: str) -> Path:
    """Return where a wheel brings the library for a CUDA release; most have none there."""
    return SHIPPED / f"libsimulated_cuda-{cuda.split('.')[0]}.so"


def serves(library: ElfFile, asked: Asked) -> bool:
    """Return whether a library defines every symbol under the version it is asked for."""
    defined = set(library.defined())
    names = {name for name, _ in defined}
    return all(
        name in names if version == NO_VERSION else (name, version) in defined
        for version, wanted in asked.items()
        for name in wanted
    )


def build(compiler: Sequence[str], headers: Sequence[Path], asked: Asked, out: Path) -> None:
    """Compile and link the library ``out``. What the sources do not define returns 0."""
    with tempfile.TemporaryDirectory() as folder:
        objects = _compiled(compiler, headers, Path(folder))
        _link(compiler, objects, {version: set(names) for version, names in asked.items()}, out)


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler. Raises `SimulationError` where there is none."""
    for name in ("g++", "clang++"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise SimulationError(
        "this machine has no C++ compiler, which builds the simulated CUDA runtime once; "
        "install g++, or `pip install ziglang`"
    )


def _compiled(compiler: Sequence[str], headers: Sequence[Path], folder: Path) -> list[Path]:
    objects = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(folder / f"{source.stem}.o")
        _run(
            *(*compiler, "-std=c++17", "-O1", "-fPIC", "-c", source.name, "-o", objects[-1]),
            *(f"-I{headers_folder}" for headers_folder in headers),
        )
    return objects


def _link(
    compiler: Sequence[str], objects: Sequence[Path], by_version: dict[str, set[str]], out: Path
) -> None:
    """Link the library; every function that is asked for is in it, under its version."""
    asked = {name for names in by_version.values() for name in names}
    defined = {name for path in objects for name in ElfFile(path).functions()}
    # What is mangled belongs to C++, but for the one function of torch that stands in for its own.
    defined = {n for n in defined if not n.startswith("_Z") or n.startswith("_ZN3c10")}
    by_version.setdefault(NO_VERSION, set()).update(defined - asked)
    rest = objects[0].parent / "rest.cpp"
    missing = sorted(asked - defined)
    rest.write_text("\n".join(f'extern "C" long {name}(void) {{ return 0; }}' for name in missing))
    versions = rest.with_name("versions.map")
    versions.write_text(
        "\n".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};"
            for version, names in sorted(by_version.items())
        )
    )
    _run(
        *(*compiler, "-w", "-O1", "-fPIC", "-shared", *objects, rest, "-o", out),
        *("-ldl", f"-Wl,--version-script={versions}"),
    )


def asked_for(libraries: Iterable[ElfFile], finds_by_name: Path) -> dict[str, set[str]]:
    """Return the symbols of CUDA that torch's libraries leave open, by the version they ask for.

    ``finds_by_name`` is the one that finds functions of the driver by their names when it runs.
    """
    by_version: dict[str, set[str]] = {}
    for library in libraries:
        for name, version in library.left_open():
            if version and not version.startswith(_VERSIONS_OF_OTHERS):
                by_version.setdefault(version, set()).add(name)
            elif not version and _UNVERSIONED.match(name):
                by_version.setdefault(NO_VERSION, set()).add(name)
    names = re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])\w+)(?=\0)", finds_by_name.read_bytes())
    known = {name for found in by_version.values() for name in found}
    by_version.setdefault(NO_VERSION, set()).update({n.decode() for n in names} - known)
    return by_version


def _linked_with(libraries: Iterable[ElfFile]) -> set[str]:
    names = {name for library in libraries for name in library.linked_with()}
    return {name for name in names if _NAMES_OF_CUDA.match(name)}


def _run(*command: object) -> None:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=SOURCES
    )
    if done.returncode:
        raise SimulationError(f"{Path(str(command[0])).name} failed: {done.stderr.strip()}")
