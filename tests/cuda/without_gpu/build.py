"""Build the simulated CUDA runtime: one library under the names of all that torch links with."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("runtime.cpp")
_NAMES_OF_CUDA = re.compile(r"lib(cu\w+|nccl|nvrtc|nvToolsExt|nvshmem_host)\.so")
# Nothing is linked with these; torch opens them by name.
_OPENED_BY_NAME = {"libnvidia-ml.so.1"}
# Most symbols name the version of a library; the others are known by how they begin.
_UNVERSIONED = re.compile(r"(cu[A-Z]|cuFile|cudnn|curand|nccl|cusparseLt|nvshmem|nvtx)\w+$")
_VERSIONS_OF_OTHERS = ("GLIBC", "CXXABI", "GOMP", "OMP", "GCC")
_NO_VERSION = "SIMULATED"


def build(torch_libraries: Path, headers: list[Path], out: Path) -> None:
    """Write the library, and links that give it its names, into the folder ``out``.

    ``torch_libraries`` is the ``lib`` folder of a CUDA build of torch, ``headers`` has the CUDA
    runtime's own. What `runtime.cpp` does not define returns 0 and does nothing. Needs g++, nm and
    readelf; raises RuntimeError with what they print.
    """
    out.mkdir(parents=True, exist_ok=True)
    runtime, rest = out / "runtime.o", out / "rest.c"
    _run(
        *("g++", "-std=c++17", "-O1", "-fPIC", "-c", _SOURCE, "-o", runtime),
        *(f"-I{folder}" for folder in headers),
    )
    defined = set(re.findall(r" T (\w+)$", _run("nm", runtime), re.MULTILINE))
    by_version = _asked_for(torch_libraries)
    asked = {name for names in by_version.values() for name in names}
    looked_up = _looked_up(torch_libraries / "libc10_cuda.so") - asked
    by_version.setdefault(_NO_VERSION, set()).update(looked_up, defined - asked)
    asked |= looked_up
    rest.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in asked - defined))
    _run("gcc", "-w", "-O1", "-fPIC", "-c", rest, "-o", rest.with_suffix(".o"))
    versions = out / "versions.map"
    versions.write_text(
        "\n".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};"
            for version, names in sorted(by_version.items())
        )
    )
    library = out / "libsimulated_cuda.so"
    _run(
        *("g++", "-shared", runtime, rest.with_suffix(".o"), "-o", library),
        f"-Wl,--version-script={versions}",
    )
    for name in _linked_with(torch_libraries) | _OPENED_BY_NAME:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(library.name)


def _asked_for(torch_libraries: Path) -> dict[str, set[str]]:
    """The symbols of CUDA that torch's libraries leave open, by the version they ask for."""
    by_version: dict[str, set[str]] = {}
    for path in torch_libraries.glob("lib*.so"):
        for line in _run("readelf", "--dyn-syms", "--wide", path).splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            name, _, version = fields[7].partition("@")
            if version and not version.startswith(_VERSIONS_OF_OTHERS):
                by_version.setdefault(version, set()).add(name)
            elif not version and _UNVERSIONED.match(name):
                by_version.setdefault(_NO_VERSION, set()).add(name)
    return by_version


def _looked_up(library: Path) -> set[str]:
    """Functions of the driver that a library finds by name when it runs."""
    names = re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])\w+)(?=\0)", library.read_bytes())
    return {name.decode() for name in names}


def _linked_with(torch_libraries: Path) -> set[str]:
    names = set()
    for path in torch_libraries.glob("lib*.so"):
        for name in re.findall(r"NEEDED.*\[(.+)\]", _run("readelf", "--dynamic", path)):
            if _NAMES_OF_CUDA.match(name):
                names.add(name)
    return names


def _run(*command: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")
    return done.stdout
