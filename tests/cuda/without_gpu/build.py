"""Build the simulated CUDA runtime for a torch wheel: one library under the names of all of CUDA's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_HERE = Path(__file__).parent
# What torch asks for by name alone is told apart by its prefix; the rest names a version.
_UNVERSIONED = re.compile(r"(cu[A-Z]|cuFile|nccl|cusparseLt|nvshmem)\w+$")
# Nothing is linked with these; torch opens them by name.
_OPENED_BY_NAME = ("libnvidia-ml.so.1",)
_OTHERS_PREFIXES = ("GLIBC", "CXXABI", "GOMP", "OMP", "GCC")
_LIBRARY = re.compile(r"\[(libcu\w+|libnccl|libnvrtc|libnvshmem_host)\.so")


def build(torch_libraries: Path, include: Path, out: Path) -> None:
    """Write the library and its names into the folder ``out``.

    ``torch_libraries`` is the ``lib`` folder of torch's CUDA build, ``include`` has the headers of
    the CUDA runtime.
    """
    out.mkdir(parents=True, exist_ok=True)
    own = out / "runtime.o"
    _run("g++", "-O1", "-fPIC", "-c", f"-I{include}", _HERE / "runtime.cpp", "-o", own)
    written = set(re.findall(r" T (\w+)$", _run("nm", own), re.MULTILINE))
    by_version = _asked_for(torch_libraries)
    rest = sorted({name for names in by_version.values() for name in names} - written)
    stubs = out / "stubs.c"
    stubs.write_text("\n".join(f"long {name}(void) {{ return 0; }}" for name in rest))
    unasked = written - {name for names in by_version.values() for name in names}
    by_version.setdefault("SIMULATED", set()).update(unasked)
    versions = out / "versions.map"
    versions.write_text(
        "\n".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};"
            for version, names in sorted(by_version.items())
        )
    )
    library = out / "libsimulated_cuda.so"
    _run("gcc", "-w", "-O1", "-fPIC", "-c", stubs, "-o", out / "stubs.o")
    _run(
        *("g++", "-shared", own, out / "stubs.o", "-o", library),
        f"-Wl,--version-script={versions}",
    )
    for name in {*_library_names(torch_libraries), *_OPENED_BY_NAME}:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(library.name)


def _asked_for(torch_libraries: Path) -> dict[str, set[str]]:
    by_version: dict[str, set[str]] = {}
    for path in torch_libraries.glob("lib*.so"):
        for line in _run("readelf", "--dyn-syms", "-W", path).splitlines():
            fields = line.split()
            if len(fields) < 8 or fields[6] != "UND":
                continue
            name, _, version = fields[7].partition("@")
            if version and not version.startswith(_OTHERS_PREFIXES):
                by_version.setdefault(version, set()).add(name)
            elif not version and _UNVERSIONED.match(name):
                by_version.setdefault("SIMULATED", set()).add(name)
    return by_version


def _library_names(torch_libraries: Path) -> set[str]:
    names = set()
    for path in torch_libraries.glob("lib*.so"):
        for line in _run("readelf", "-d", path).splitlines():
            if "NEEDED" in line and _LIBRARY.search(line):
                names.add(line.split("[")[1].rstrip("]"))
    return names


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr}")
    return done.stdout
