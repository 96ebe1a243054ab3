"""Finding torch's CUDA build, and what is said where there is none."""

import ast
import contextlib
import platform
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from pytest_torchmem import building
from pytest_torchmem.record.native import compiled_library
from pytest_torchmem.simulate import build, process, torch_builds
from pytest_torchmem.simulate.build import ElfFile
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.torch_builds import TorchBuild
from pytest_torchmem.values.errors import SimulationError

LIBRARY_USER = """
int written_elsewhere(void);
int mine(void) { return written_elsewhere(); }
"""


@pytest.fixture
def cpu_torch(tmp_path, monkeypatch):
    """A torch for the CPU, installed where nothing was fetched yet."""
    package = tmp_path / "installed" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: str | None = None\n")
    (package / "__init__.py").touch()
    monkeypatch.setattr(
        torch_builds, "_installed_torch", lambda: (package, *torch_builds._version_of(package))
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package


@pytest.mark.parametrize(
    ("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "ppc64le")]
)
def test_another_platform_is_refused_in_words(system, machine, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(
        SimulationError, match=f"Linux x86-64 and aarch64 only, and this is {system} {machine}"
    ):
        torch_builds.torch_build()


@pytest.mark.usefixtures("cpu_torch")
def test_a_torch_for_the_cpu_is_told_with_the_command_and_the_size():
    with pytest.raises(SimulationError) as raised:
        torch_builds.torch_build()
    assert "torch 2.13.0 is installed for the CPU" in str(raised.value)
    assert "`torchmem simulate --fetch` fetches it (0.9 to 1.5 GB" in str(raised.value)


@pytest.mark.usefixtures("cpu_torch")
def test_another_release_is_told_with_the_command_that_fetches_it():
    with pytest.raises(SimulationError) as raised:
        torch_builds.torch_build("2.12.1")
    assert "torch 2.12.1 is not installed here" in str(raised.value)
    assert "`torchmem simulate --fetch --torch 2.12.1` fetches it" in str(raised.value)


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_fetched(cpu_torch, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cpu_torch / "version.py"))
    for writes in (torch_builds.fetch, lambda: process.entry_point_folder("mirrored_ranks:join")):
        with pytest.raises(SimulationError, match=r"cannot be written .*; set XDG_CACHE_HOME"):
            writes()


def test_a_build_of_the_wheel_installs_what_the_builder_imports():
    imported = set()
    for module in (build, torch_builds, building, compiled_library):
        for node in ast.walk(ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    foreign = imported - sys.stdlib_module_names - {"pytest_torchmem"}
    hook = Path(__file__).parents[2] / "hatch_build.py"
    installed = re.findall(
        r'"(\w+)"', hook.read_text(encoding="utf-8").partition("if self._rel")[0]
    )
    assert foreign <= {"packaging", *installed}  # hatchling itself needs packaging


def test_what_pip_says_is_told_when_a_fetch_fails(cpu_torch, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stderr="no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SimulationError, match=r"torch==2\.13\.0 could not be fetched: no network"):
        torch_builds.fetch()


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux'", True),
        ("nvidia-cudnn-cu12 (==9.1.0.70) ; platform_system == 'Linux'", False),
        ("nvidia-cudnn-cu12==8.9.2.26", False),
        ("triton==3.6.0", False),
    ],
)
def test_cudnn_is_looked_for_beside_torch_where_it_can_plan(tmp_path, monkeypatch, written, found):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = tmp_path / "torch-2.13.0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text(f"Name: torch\nVersion: 2.13.0\nRequires-Dist: {written}\n")
    assert torch_builds._has_planner(tmp_path) != found  # what cannot plan is not missed
    libraries = tmp_path / "nvidia" / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    (libraries / "libcudnn_graph.so.9").touch()
    assert torch_builds._cudnn(torch_builds._fetched_torch(tmp_path)) == (
        libraries if found else None
    )
    assert torch_builds._has_planner(tmp_path)


@pytest.mark.parametrize(
    ("needs", "fetched"),
    [
        (["triton~=3.9.0; python_version < '99'", "nvidia-nccl-cu13==2.30.7"], ["triton~=3.9.0"]),
        (["triton (==3.2.0) ; platform_system == 'Linux'"], ["triton==3.2.0"]),
        (["triton==3.6.0; platform_system == 'Windows'", "triton; extra == 'all'"], []),
    ],
)
def test_the_triton_that_a_torch_needs_is_fetched_with_it(cpu_torch, monkeypatch, needs, fetched):
    site, requested = torch_builds._fetched_site("2.13.0"), []

    def pip(target, requirements, _patience_s):
        requested.append(requirements)
        library = target / "torch" / "lib" / "libtorch_cuda.so"
        known = target / "torch-2.13.0.dist-info" / "METADATA"
        for path in (library, known):
            path.parent.mkdir(parents=True, exist_ok=True)
        library.touch()
        written = "".join(f"Requires-Dist: {need}\n" for need in needs)
        known.write_text(f"Name: torch\nVersion: 2.13.0\n{written}")

    monkeypatch.setattr(torch_builds, "_pip", pip)
    torch_builds._fetch_torch(site, "2.13.0", 1)
    assert requested == [["torch==2.13.0"], *([fetched] if fetched else [])]
    assert (site / "fetched").exists()


def test_an_installed_cuda_build_is_seen_through_links(cpu_torch, monkeypatch):
    (cpu_torch / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n")
    (cpu_torch / "lib").mkdir()
    (cpu_torch / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(torch_builds, "_with_runtime", lambda _v, _c, site, _d: site)
    site = cast("Path", torch_builds.torch_build())
    library = site / "torch" / "lib" / "libtorch_cuda.so"
    assert library.is_symlink()
    assert not (site / "torch" / "lib").is_symlink()  # or $ORIGIN would be the installed folder
    assert library.resolve() == cpu_torch / "lib" / "libtorch_cuda.so"
    assert cast("Path", torch_builds.torch_build()) == site


def test_processes_that_start_together_build_the_runtime_once(cpu_torch, monkeypatch):
    both_build, built = threading.Barrier(2), []

    def build_slowly(_libraries, _headers, _macros, out):
        with contextlib.suppress(threading.BrokenBarrierError):
            both_build.wait(0.5)
        built.append(out)
        out.mkdir(parents=True, exist_ok=True)
        (out / build.LIBRARY).touch()

    monkeypatch.setattr(torch_builds, "build", build_slowly)
    monkeypatch.setattr(torch_builds, "_headers", lambda _cuda: [])
    with ThreadPoolExecutor(2) as threads:
        arguments = ("2.13.0", "13.0", cpu_torch.parent, None)
        started = [threads.submit(torch_builds._with_runtime, *arguments) for _ in range(2)]
    assert [future.result().runtime for future in started] == 2 * built


KILLED = """
import sys
from pathlib import Path
from pytest_torchmem.simulate import build, torch_builds

def compile_without_end(compiler, sources, headers, folder):
    (folder / "memory.o").touch()
    print("compiling", flush=True)
    sys.stdin.read()  # until it is killed, or the test has ended

build.compile_sources = compile_without_end
torch_builds._headers = lambda cuda: []
print("begins", flush=True)
torch_builds._with_runtime("2.13.0", sys.argv[1], Path(sys.argv[2]), None)
"""


def test_the_next_build_removes_what_killed_ones_left_and_no_others(
    torch_asks_for, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = torch_asks_for("cudaMalloc").parent
    (site / "torch").symlink_to(site)

    def build_of(cuda):
        command = [sys.executable, "-c", KILLED, cuda, str(site)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert said_by(process) == "begins\n"
        return process

    def said_by(process):
        assert process.stdout
        return process.stdout.readline()

    def unfinished():
        return {path.name for path in torch_builds.cache_folder().glob(f"*{building.UNFINISHED}")}

    killed = build_of("12.4")
    assert said_by(killed) == "compiling\n"
    (left,) = unfinished()
    going_on = build_of("13.0")
    assert said_by(going_on) == "compiling\n"
    (spared,) = unfinished() - {left}
    killed.kill()
    killed.wait()
    next_one = build_of("13.2")
    assert said_by(next_one) == "compiling\n"
    assert left not in unfinished()
    assert spared in unfinished()
    waits = build_of("13.2")
    time.sleep(0.2)  # until it waits for the one that builds the same
    for begun in (next_one, going_on):
        begun.kill()
        begun.wait()
    assert said_by(waits) == "compiling\n"
    waits.kill()
    waits.wait()


def test_headers_whose_fetch_was_killed_are_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    fetched = []
    monkeypatch.setattr(torch_builds, "_pip", lambda *given: fetched.append(given))
    folder = torch_builds.cache_folder() / "headers-13.0"
    folder.mkdir(parents=True)
    torch_builds._headers("13.0")
    assert len(fetched) == 1
    (folder / "include").mkdir()
    (folder / "include" / "cuda_runtime_api.h").touch()
    assert torch_builds._headers("13.0") == [folder / "include"]
    assert len(fetched) == 1


def test_what_a_compiler_lacks_is_told(cpu_torch, monkeypatch):
    def build_without_one(*_):
        raise building.BuildError("there is none")

    (cpu_torch / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: str = '13.0'\n")
    (cpu_torch / "lib").mkdir()
    monkeypatch.setattr(torch_builds, "build", build_without_one)
    monkeypatch.setattr(torch_builds, "_headers", lambda _cuda: [])
    with pytest.raises(SimulationError, match="runtime cannot be built: there is none"):
        torch_builds.torch_build()


@pytest.fixture
def torch_asks_for(tmp_path):
    """Return a function that makes the libraries of a torch that asks for one function."""

    def make(name):
        source, folder = tmp_path / "asks.c", tmp_path / f"torch-{name}" / "lib"
        folder.mkdir(parents=True)
        source.write_text(f"void {name}(void); void asks(void) {{ {name}(); }}")
        compiled(source, folder / "libc10_cuda.so")
        return folder

    return make


def compiled(source, library, *linked):
    command = [*building.find_compiler(any_kind=True), "-x", "c", "-shared", "-fPIC", source]
    assert not subprocess.run([*command, "-o", library, *linked], check=False).returncode


def test_a_runtime_of_the_wheel_is_taken_without_a_compiler(tmp_path, torch_asks_for, monkeypatch):
    shipped, source = tmp_path / "shipped", tmp_path / "runtime.c"
    shipped.mkdir()
    source.write_text("void cudaMalloc(void) {}")
    compiled(source, shipped / build.LIBRARY)
    asks, asks_for_more = torch_asks_for("cudaMalloc"), torch_asks_for("cuSomethingNew")
    monkeypatch.setattr(build, "find_compiler", lambda: pytest.fail("a compiler was looked for"))
    assert build.take_built(shipped, asks, tmp_path / "taken")
    assert (tmp_path / "taken" / "libcuda.so.1").resolve() == tmp_path / "taken" / build.LIBRARY
    assert not build.take_built(shipped, asks_for_more, tmp_path / "other")
    assert not build.take_built(tmp_path / "nothing", asks, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_a_library_leaves_open_is_read(tmp_path):
    source, library = tmp_path / "user.c", tmp_path / "libuser.so"
    source.write_text(LIBRARY_USER)
    compiled(source, library, "-lm")
    elf = ElfFile(library)
    assert ("written_elsewhere", "") in set(elf.left_open())
    assert "mine" not in dict(elf.left_open())


def test_the_environment_of_a_process_names_the_gpu_and_comes_first():
    built = TorchBuild("2.13.0", "13.0", Path("/site"), Path("/runtime"), Path("/cudnn"), "9.20")
    before = {"PYTHONPATH": "/mine", "LD_LIBRARY_PATH": ""}
    made = process.variables("A100-40GBx2", built, environment=before)
    assert made["SIMULATED_CUDA_NAME"] == parse_gpu("A100-40GB").shown == "simulated A100-40GB"
    assert made["SIMULATED_CUDA_CAPABILITY"] == "80"
    assert made["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert made["PYTHONPATH"] == "/site:/mine"
    assert made["LD_LIBRARY_PATH"] == "/runtime"
    assert made["LIBRARY_PATH"] == "/runtime/link:/runtime"
    assert made["SIMULATED_CUDA_CUDNN"] == "/cudnn"
    assert made["TORCHMEM_SIMULATED_RELEASES"] == "torch 2.13, cuDNN 9.20"
    without = replace(built, cudnn=None, cudnn_release="")
    assert without.releases == "torch 2.13"
    assert made["USE_PYTORCH_KERNEL_CACHE"] == "0"


def test_a_release_that_was_not_checked_is_told():
    built = TorchBuild("2.99.0", "13.0", Path("/site"), Path("/runtime"), None)
    assert "not checked with torch 2.99.0, but with 2.10, 2.11" in process.notice(built)
    assert not process.notice(TorchBuild("2.13.1", "13.0", Path(), Path(), None))


def test_the_command_refuses_what_it_cannot_start(pytester):
    run = pytester.run(sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100")
    assert run.ret == 2
    run.stderr.fnmatch_lines(["torchmem: a command is needed*"])


def test_a_machine_on_which_it_was_never_run_is_said(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    said = process.notice(TorchBuild("2.13.0", "13.0", Path(), Path(), None))
    assert said == "the simulated GPU is built for aarch64, and was run on x86_64 only"
