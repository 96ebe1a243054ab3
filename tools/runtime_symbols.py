"""Writes the symbols of CUDA that builds of torch ask for: the wheel's libraries define them all.

    python tools/runtime_symbols.py        # of the builds that `torchmem simulate --fetch` fetched

Each release of CUDA has a file in ``tools/runtime_symbols``, a symbol a line after its version. A
new release of torch adds to them; none is ever taken out.
"""

from __future__ import annotations

from pathlib import Path

from pytest_torchmem.simulate.build import NO_VERSION, Asked, asked_for
from pytest_torchmem.simulate.symbols import ElfFile
from pytest_torchmem.simulate.torch_builds import cache_folder, version_of

FOLDER = Path(__file__).with_name("runtime_symbols")


def read(path: Path) -> dict[str, set[str]]:
    """Return the symbols of a file, by the version that they are asked for under."""
    found: dict[str, set[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        version, name = line.split()
        found.setdefault(version, set()).add(name)
    return found


def write(path: Path, asked: Asked) -> None:
    """Write symbols, each once: what anybody asks for under a version has that one."""
    versioned = {n for version, names in asked.items() if version != NO_VERSION for n in names}
    lines = {
        f"{version} {name}\n"
        for version, names in asked.items()
        for name in (names - versioned if version == NO_VERSION else names)
    }
    path.write_text("".join(sorted(lines)), encoding="utf-8")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for package in sorted(cache_folder().glob("torch-*/site/torch")):
        release, cuda = version_of(package)
        path = FOLDER / f"{cuda.split('.')[0]}.txt"
        libraries = [ElfFile(library) for library in sorted((package / "lib").glob("lib*.so"))]
        known = read(path)
        for version, names in asked_for(libraries, package / "lib" / "libc10_cuda.so").items():
            known.setdefault(version, set()).update(names)
        write(path, known)
        print(f"torch {release}, CUDA {cuda}: {sum(map(len, known.values()))} symbols")


if __name__ == "__main__":
    main()
