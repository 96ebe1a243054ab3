"""Build the simulated CUDA runtime: one library under the names of all that torch links with."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pytest_torchmem.building import (
    BuildError,
    compile_sources,
    find_compiler,
    options_of_torch,
    run_compiler,
    unfinished,
)

SOURCES: Final = Path(__file__).with_name("runtime")
SOURCES_OF_OPERATORS: Final = Path(__file__).with_name("operators")
LIBRARY: Final = "libsimulated_cuda.so"
# The runtime looks for it beside itself.
LIBRARY_OF_OPERATORS: Final = "libsimulated_operators.so"
# By what is here a linker finds CUDA's libraries without their versions.
FOR_LINKERS: Final = "link"

_NAMES_OF_CUDA: Final = re.compile(r"lib(cu\w+|nccl|nvrtc|nvToolsExt|nvshmem_host)\.so")
# Nothing is linked with these; torch and Triton open them by name.
_OPENED_BY_NAME: Final = {"libnvidia-ml.so.1", "libcuda.so.1", "libcuda.so"}
# Most symbols name the version of a library; the others are known by how they begin.
_UNVERSIONED: Final = re.compile(r"(cu[A-Z]|cuFile|cudnn|curand|nccl|cusparseLt|nvshmem|nvtx)\w+$")
# A library's function that computes puts work on a stream; the others prepare or describe.
_COMPUTES: Final = re.compile(
    r"(cublas|cudnn|cufft|cusolver|cusparse)"
    r"(?!.*([Cc]reate|[Dd]estroy|Set|Get|[Ss]ize|Init|Version|Logger|Descriptor))\w+"
)
_VERSIONS_OF_OTHERS: Final = ("GLIBC", "CXXABI", "GOMP", "OMP", "GCC")
_OF_TORCH: Final = ("_ZN3c10", "_ZN4c10d", "_ZN2at17CUDAGeneratorImpl")
_NO_VERSION: Final = "SIMULATED"


def build(torch_libraries: Path, headers: Sequence[Path], macros: Iterable[str], out: Path) -> None:
    """Write the library, and links that give it its names, into the folder ``out``.

    ``torch_libraries`` is the ``lib`` folder of a CUDA build of torch, ``headers`` has the CUDA
    runtime's own. What the sources do not define returns 0 and does nothing. The folder appears
    whole or not at all. Raises `BuildError` without a compiler, or with what it says.
    """
    compiler = find_compiler(any_kind=True)
    with unfinished(out) as folder:
        library = folder / out.name
        library.mkdir()
        libraries = _read(torch_libraries)
        # The functions of the driver that a library finds by name when it runs.
        text = (torch_libraries / "libc10_cuda.so").read_bytes()
        looked_up = re.findall(rb"\0((?:cu[A-Z]|nvml[A-Z])\w+)(?=\0)", text)
        defined = [f"-D{macro}" for macro in macros]
        command = [*compiler, "-O1", "-std=c++17", *defined]
        objects = compile_sources(command, SOURCES, headers, folder)
        _link(compiler, objects, _asked_for(libraries), {n.decode() for n in looked_up}, library)
        _add_operators(torch_libraries, folder / "operators", library)
        _publish(library, libraries, out)


def take_built(built: Path, torch_libraries: Path, out: Path) -> bool:
    """Make the folder ``out`` of libraries that were built elsewhere, without a compiler.

    Returns False, and makes nothing, where they lack something that this build of torch asks for.
    """
    if not (built / LIBRARY).exists():
        return False
    libraries = _read(torch_libraries)
    versions = {name for names in _asked_for(libraries).values() for name in names}
    if not versions <= set(ElfFile(built / LIBRARY).functions()):
        return False
    with unfinished(out) as folder:
        library = folder / out.name
        shutil.copytree(built, library)
        _publish(library, libraries, out)
    return True


def _read(torch_libraries: Path) -> list[ElfFile]:
    return [ElfFile(path) for path in sorted(torch_libraries.glob("lib*.so"))]


def _publish(made: Path, libraries: Iterable[ElfFile], out: Path) -> None:
    """Add the names by which the library is found, and put the folder in its place."""
    linked = {name for library in libraries for name in library.linked_with()}
    of_cuda = {name for name in linked if _NAMES_OF_CUDA.match(name)}
    for name in of_cuda | _OPENED_BY_NAME:
        (made / name).symlink_to(LIBRARY)
    (made / FOR_LINKERS).mkdir()
    for name in of_cuda:  # what is linked needs the name with its version, as on a GPU
        unversioned = name[: name.index(".so")] + ".so"
        (made / FOR_LINKERS / unversioned).write_text(f"INPUT(-l:{name})\n")
    if not out.exists():
        made.rename(out)


def _add_operators(torch_libraries: Path, folder: Path, out: Path) -> None:
    """Add the library that computes small values, where it can be built.

    It speaks torch's own C++: it needs torch's headers, and the C++ library of GCC, which `ziglang`
    does not have. Without it every kernel computes nothing.
    """
    package = torch_libraries.parent
    headers = package / "include"
    try:
        compiler = find_compiler()
    except BuildError:
        return
    if not (headers / "ATen").exists():
        return
    folder.mkdir()
    # torch's release builds have NDEBUG: its headers look into other fields without it.
    command = [*compiler, "-O1", "-DNDEBUG", "-std=c++20", *options_of_torch(package)]
    objects = compile_sources(command, SOURCES_OF_OPERATORS, [headers], folder)
    linked = (f"-L{torch_libraries}", "-lc10", "-ltorch_cpu")
    run_compiler(*compiler, "-shared", *objects, *linked, "-o", out / LIBRARY_OF_OPERATORS)


def _link(
    compiler: Sequence[str],
    objects: Sequence[Path],
    by_version: dict[str, set[str]],
    looked_up: set[str],
    out: Path,
) -> None:
    """Link the library: it has each function that torch asks for, under the version asked for."""
    asked = {name for names in by_version.values() for name in names}
    defined = {name for path in objects for name in ElfFile(path).functions()}
    # Mangled names are of functions within the library, but for those that replace some of torch.
    defined = {n for n in defined if not n.startswith("_Z") or n.startswith(_OF_TORCH)}
    by_version.setdefault(_NO_VERSION, set()).update(looked_up - asked, defined - asked)
    rest = out.parent / "rest.cpp"
    missing = sorted((asked | looked_up) - defined)
    body = {True: "{ torchmem_library_work(); return 0; }", False: "{ return 0; }"}
    lines = ['extern "C" void torchmem_library_work();']
    lines += [f'extern "C" long {n}(void) {body[bool(_COMPUTES.match(n))]}' for n in missing]
    rest.write_text("\n".join(lines))
    versions = out.parent / "versions.map"
    versions.write_text(
        "\n".join(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};"
            for version, names in sorted(by_version.items())
        )
    )
    run_compiler(
        *(*compiler, "-w", "-O1", "-fPIC", "-shared", *objects, rest, "-o", out / LIBRARY),
        *("-ldl", f"-Wl,--version-script={versions}"),
    )


def _asked_for(libraries: Iterable[ElfFile]) -> dict[str, set[str]]:
    """Return the symbols of CUDA that torch's libraries leave open, by the version they ask for."""
    by_version: dict[str, set[str]] = {}
    for library in libraries:
        for name, version in library.left_open():
            if version and not version.startswith(_VERSIONS_OF_OTHERS):
                by_version.setdefault(version, set()).add(name)
            elif not version and _UNVERSIONED.match(name):
                by_version.setdefault(_NO_VERSION, set()).add(name)
    return by_version


# What a dynamic linker reads of an ELF file: no tool of a compiler has to be installed for it.

_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_READ: Final = (2, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF)
_SYMTAB, _DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = _READ
_NEEDED: Final = 1
_GLOBAL_FUNCTION: Final = 0x12


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    data: bytes
    strings: bytes
    count: int


class ElfFile:
    """A library or an object file of 64 bits, little-endian."""

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes()
        (start,) = struct.unpack_from("<Q", whole, 40)
        size, count = struct.unpack_from("<HH", whole, 58)
        headers = [_SECTION.unpack_from(whole, start + place * size) for place in range(count)]

        @cache
        def data(place: int) -> bytes:
            _, _, _, _, offset, length, _, _, _, _ = headers[place]
            return whole[offset : offset + length]

        self._sections = [
            _Section(kind, data(place), data(link), info)
            for place, (_, kind, _, _, _, _, link, info, _, _) in enumerate(headers)
            if kind in _READ
        ]

    def linked_with(self) -> Iterator[str]:
        """Yield the names of the libraries that this one needs."""
        for section in self._of(_DYNAMIC):
            for tag, value in struct.iter_unpack("<QQ", section.data):
                if tag == _NEEDED:
                    yield self._text(section, value)

    def left_open(self) -> Iterator[tuple[str, str]]:
        """Yield each symbol that another library must define, and the version asked for."""
        versions = self._versions()
        for section in self._of(_DYNSYM):
            asked = next(iter(self._of(_VERSYM)), None)
            numbers = struct.unpack(f"<{len(asked.data) // 2}H", asked.data) if asked else ()
            for place, symbol in enumerate(_SYMBOL.iter_unpack(section.data)):
                name, _, _, defined_in, _, _ = symbol
                if name and not defined_in:
                    number = numbers[place] & 0x7FFF if numbers else 0
                    yield self._text(section, name), versions.get(number, "")

    def functions(self) -> Iterator[str]:
        """Yield the global functions that an object file defines."""
        for section in self._of(_SYMTAB):
            for name, info, _, defined_in, _, _ in _SYMBOL.iter_unpack(section.data):
                if info == _GLOBAL_FUNCTION and defined_in:
                    yield self._text(section, name)

    def _versions(self) -> dict[int, str]:
        """Return the versions that this library asks of others: their names, by their numbers."""
        texts = {}
        for section in self._of(_VERNEED):
            place = 0
            for _ in range(section.count):
                _, count, _, start, following = struct.unpack_from("<HHIII", section.data, place)
                at = place + start
                for _ in range(count):
                    _, _, number, name, step = struct.unpack_from("<IHHII", section.data, at)
                    texts[number & 0x7FFF] = self._text(section, name)
                    at += step
                place += following
        return texts

    def _of(self, kind: int) -> list[_Section]:
        return [section for section in self._sections if section.kind == kind]

    def _text(self, section: _Section, start: int) -> str:
        return section.strings[start : section.strings.index(b"\0", start)].decode()
