"""What records in a process, and why not where the library cannot be had."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_torchmem.building import BuildError, find_compiler
from pytest_torchmem.record.native import compiled_library
from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.compiled_library import (
    GPU_OBSERVER,
    OBSERVER,
    CompiledLibrary,
    Part,
)
from pytest_torchmem.record.native.row_reader import RowReader

pytestmark = pytest.mark.slow

CHOOSE = """
import json, torch
from pytest_torchmem.record.native import choice, compiled_library
{before}
said = []
made = choice.Choice.of_process(said.append)
path = made.library and str(made.library.path)
print(json.dumps([path, made.has_stacks, made.reasons, said]))
"""

# Hands out a library that was built before, and counts how often it is asked to link one.
COMPILER = """#!/bin/sh
for part; do
    case "$last" in -o) out=$part;; esac
    last=$part
done
case " $* " in *" -c "*) : > "$out"; exit;; esac
echo linked >> {log}
{link}
"""


@dataclass(frozen=True, slots=True)
class Chosen:
    path: str | None
    has_stacks: bool
    reasons: list[str]
    said: list[str]


@pytest.fixture(scope="session")
def library() -> Path:
    """The library that is used on this machine."""
    made = Choice.of_process().library
    assert made, Choice.of_process().reasons
    return made.path


class Machine:
    """Another user's machine, with an empty cache and a compiler of which we know what it does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.log.touch()
        self.environment = {
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TMPDIR": str(folder / "tmp"),
            "PATH": str(folder / "bin"),
        }
        for name in ("tmp", "bin"):
            (folder / name).mkdir()
        # The compiler is a script of these.
        for name in ("sh", "cat", "cp"):
            (folder / "bin" / name).symlink_to(shutil.which(name) or "")

    def compiler(self, link: str) -> None:
        """Install a compiler that does this, in a shell, to link ``$out``."""
        script = self.folder / "bin" / "g++"
        script.write_text(COMPILER.format(log=self.log, link=link))
        script.chmod(0o755)

    @property
    def linked(self) -> int:
        return len(self.log.read_text().splitlines())

    @property
    def cached(self) -> Path:
        (found,) = (self.folder / "cache").rglob(OBSERVER.file_name)
        return found

    def choose(self, before: str = "") -> Chosen:
        """What a new process chooses."""
        done = subprocess.run(
            [sys.executable, "-c", CHOOSE.format(before=before)],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Chosen(*json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", None)
    return made


def test_the_library_is_compiled_once_and_used_again(machine: Machine, library: Path) -> None:
    machine.compiler(f"cp {library} $out")
    first, second = machine.choose(), machine.choose()
    assert first == Chosen(str(machine.cached), True, [], first.said)
    assert [sentence.split(",")[0] for sentence in first.said] == [
        f"the recorder of memory is compiled for torch {minor()}"
    ]
    assert second == Chosen(first.path, True, [], [])
    assert machine.linked == 1


def minor() -> str:
    import torch

    return ".".join(torch.__version__.split(".")[:2])


@pytest.mark.nightly
def test_a_real_compiler_builds_one_that_works(machine: Machine) -> None:
    """All tests use one that was compiled at some time; this one is."""
    (real,) = find_compiler_of_session()
    machine.environment["PATH"] = os.pathsep.join([str(Path(real).parent), "/usr/bin", "/bin"])
    chosen = machine.choose()
    assert chosen.has_stacks
    assert not chosen.reasons
    assert machine.cached.stat().st_size < 200_000


def find_compiler_of_session() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", _PATH)
        return find_compiler()


_PATH = os.environ["PATH"]


@pytest.mark.parametrize(
    ("system", "name"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")]
)
def test_another_platform_is_a_reason(
    system: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: name)
    made = Choice(print)
    assert made.library is None
    assert made.reasons == [
        f"the recorder runs on Linux x86-64 and aarch64, and this is {system} {name}"
    ]


@pytest.mark.usefixtures("machine")
def test_no_compiler_is_a_reason() -> None:
    made = Choice(print)
    assert made.library is made.library_for("cpu") is None
    assert made.reasons == ["this machine has no C++ compiler; install g++"]


def test_the_first_error_of_a_compiler_is_a_reason(machine: Machine) -> None:
    machine.compiler(
        "echo 'In file a.h:'; echo 'a.h:1: fatal error: no' >&2; echo 'over.' >&2; exit 1"
    )
    assert Choice(print).reasons == [
        "the recorder could not be compiled: g++ says a.h:1: fatal error: no"
    ]
    assert not list(machine.folder.rglob(OBSERVER.file_name))


def test_the_last_line_of_a_compiler_stands_for_an_error(machine: Machine) -> None:
    machine.compiler("echo killed >&2; exit 137")
    assert Choice(print).reasons == ["the recorder could not be compiled: g++ says killed"]
    machine.compiler("exit 3")
    assert Choice(print).reasons == ["the recorder could not be compiled: g++ says it ended with 3"]


def test_what_cannot_be_loaded_is_built_again_once(machine: Machine) -> None:
    machine.compiler("echo this is no library > $out")
    made = Choice(print)
    assert made.library is None
    assert all("cannot be loaded" in reason for reason in made.reasons)
    assert machine.linked == len(made.reasons) == 2


def test_a_library_without_our_functions_cannot_be_loaded(machine: Machine, tmp_path: Path) -> None:
    machine.compiler(f"cp {_stub(tmp_path, '')} $out")
    assert "undefined symbol: torchmem_install" in Choice(print).reasons[-1]


def test_a_library_that_sees_nothing_fails_its_test(machine: Machine, tmp_path: Path) -> None:
    source = Path(compiled_library.__file__).with_name("library.py").read_text()
    names = set(re.findall(r'\("(\w+)", [\w.]+, \(', source))
    functions = "".join(f"long torchmem_{name}(void) {{ return 0; }}\n" for name in names)
    machine.compiler(f"cp {_stub(tmp_path, functions)} $out")
    made = Choice(print)
    assert made.library is None
    assert made.reasons == ["the recorder failed its test: x + 1 called no operator"]


@pytest.mark.usefixtures("library")
def test_rows_that_make_no_sense_fail_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(_: object) -> object:
        raise IndexError("row 7 of 5")

    monkeypatch.setattr(RowReader, "read", read)
    made = Choice(print)
    assert made.library is None
    assert made.reasons == ["the recorder failed its test: IndexError: row 7 of 5"]


def _stub(folder: Path, functions: str) -> Path:
    source, out = folder / "stub.c", folder / "stub.so"
    source.write_text(functions)
    command = [*find_compiler_of_session(), "-x", "c", "-shared", "-fPIC"]
    subprocess.run([*command, source, "-o", out], env={"PATH": _PATH}, check=True)
    return out


@pytest.mark.nightly("path.unlink()", "path.write_bytes(b'0' * 9000)")
@pytest.mark.parametrize(
    "damage", ["os.truncate(path, 5000)", "path.unlink()", "path.write_bytes(b'0' * 9000)"]
)
def test_a_damaged_file_is_built_again(machine: Machine, library: Path, damage: str) -> None:
    machine.compiler(f"cp {library} $out")
    machine.choose()
    exec(damage, {"os": os, "path": machine.cached})
    chosen = machine.choose()
    assert chosen.has_stacks
    assert not chosen.reasons
    assert machine.linked == 2
    assert machine.cached.read_bytes() == library.read_bytes()


def test_where_the_home_is_read_only_a_temporary_folder_has_it(
    machine: Machine, library: Path
) -> None:
    machine.compiler(f"cp {library} $out")
    (machine.folder / "cache").write_text("no folder")
    first, second = machine.choose(), machine.choose()
    assert first.has_stacks
    assert str(machine.folder / "tmp") in (first.path or "")
    assert (second.path, second.said) == (first.path, [])
    assert machine.linked == 1


def test_a_temporary_folder_that_others_can_write_is_not_used(machine: Machine) -> None:
    machine.compiler("exit 1")
    (machine.folder / "cache").write_text("no folder")
    own = machine.folder / "tmp" / f"pytest-torchmem-{os.getuid()}"
    own.mkdir()
    own.chmod(0o777)
    (reason,) = Choice(print).reasons
    assert "recorder cannot be written" in reason
    assert not machine.linked


def test_a_shipped_library_comes_first_and_needs_no_compiler(
    machine: Machine, library: Path
) -> None:
    chosen = machine.choose(before=_ship(machine, f"shutil.copy({str(library)!r}, path)"))
    assert chosen.has_stacks
    assert chosen.path == str(machine.folder / "shipped" / library.parent.name / OBSERVER.file_name)
    assert not list(machine.folder.glob("cache/*"))


def test_where_a_shipped_library_cannot_be_loaded_another_is_built(
    machine: Machine, library: Path
) -> None:
    machine.compiler(f"cp {library} $out")
    chosen = machine.choose(before=_ship(machine, "path.write_text('no library')"))
    assert chosen == Chosen(str(machine.cached), True, [], chosen.said)


def _ship(machine: Machine, write: str) -> str:
    return f"""
import shutil
from pathlib import Path
compiled_library.SHIPPED = Path({str(machine.folder / "shipped")!r})
package = Path(torch.__file__).parent
built = compiled_library.CompiledLibrary(choice.OBSERVER, package, torch.__version__)
path = compiled_library.SHIPPED / built.folder_name / built.part.file_name
path.parent.mkdir(parents=True)
{write}
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (
            "choice._layout = lambda: 99",
            "memory has no source lines: the frames of Python .* are not known",
        ),
        (
            "choice._calls = lambda frame, line: [('f', 'a.py', 1)]",
            r"no source lines: .* was seen where f \(a.py:1\) ran",
        ),
    ],
)
def test_without_stacks_all_else_is_recorded(
    machine: Machine, library: Path, before: str, reason: str
) -> None:
    machine.compiler(f"cp {library} $out")
    again = (
        "\nlibrary = choice.Choice.of_process().library\nassert not choice.tried(library).memory"
    )
    chosen = machine.choose(before=before + again)
    assert chosen.path == str(machine.cached)
    assert not chosen.has_stacks
    (sentence,) = chosen.reasons
    assert re.search(reason, sentence)


def test_minor_releases_of_torch_have_their_own_library() -> None:
    def name(version: str) -> str:
        return CompiledLibrary(OBSERVER, Path("/torch"), version).folder_name

    assert name("2.13.0+cpu") == name("2.13.1+cu130")
    assert len({name("2.12.1"), name("2.13.0"), name("2.13.0a0+git1"), name("2.13.0.dev1")}) == 4


def test_sources_and_machines_have_their_own_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = CompiledLibrary(OBSERVER, Path("/torch"), "2.13.0")
    first = built.folder_name
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert built.folder_name != first
    monkeypatch.undo()
    shutil.copytree(OBSERVER.sources, tmp_path / "observer")
    monkeypatch.setattr(Part, "sources", tmp_path / "observer")
    assert built.folder_name == first
    with (tmp_path / "observer" / "rows.h").open("a") as file:
        file.write("// more\n")
    assert built.folder_name != first


def test_the_library_knows_no_other_device(library: Path) -> None:
    made = Choice.of_process()
    assert made.library_for("cpu") is made.library
    assert made.library_for("mps") is None
    assert library.exists()


def test_the_headers_of_cuda_are_found_beside_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    package = tmp_path / "links" / "torch"
    built = CompiledLibrary(GPU_OBSERVER, package, "2.13.0")
    installed = tmp_path / "site" / "torch" / "version.py"
    for folder in (package, installed.parent, package.parent / "nvidia" / "cublas" / "include"):
        folder.mkdir(parents=True)
    installed.touch()
    (package / "version.py").symlink_to(installed)  # as a simulated GPU has it
    with pytest.raises(BuildError, match=r"headers of CUDA's runtime are not here; .* CUDA_HOME"):
        built.headers_of_cuda()
    for place in (
        tmp_path / "toolkit" / "include",
        tmp_path / "site" / "triton" / "backends" / "nvidia" / "include",
        tmp_path / "links" / "nvidia" / "cu13" / "include",
    ):
        (place / "crt").mkdir(parents=True)
        (place / "cuda_runtime_api.h").touch()
        assert built.headers_of_cuda() == place


@pytest.mark.usefixtures("library")
def test_a_gpu_that_cannot_be_watched_is_a_reason_and_the_cpu_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Choice.of_process()
    monkeypatch.setattr(made, "reasons", [])
    monkeypatch.setattr(made, "_watches_gpu", None)

    def refuse(*_: object, **__: object) -> Path:
        raise BuildError("there are no headers")

    monkeypatch.setattr(CompiledLibrary, "cached", refuse)
    assert made.library_for("cuda") is made.library_for("cuda") is None
    assert made.reasons == ["there are no headers"]
    assert made.library_for("cpu") is made.library
