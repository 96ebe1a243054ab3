"""Torch's CUDA build: the one that is installed, or one fetched beside a build for the CPU."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

from pytest_torchmem.building import BuildError, cache_root, digest, make_once
from pytest_torchmem.simulate.build import (
    LIBRARY,
    SOURCES,
    SOURCES_OF_OPERATORS,
    build,
    take_built,
)
from pytest_torchmem.values.errors import SimulationError

CHECKED: Final = ("2.10", "2.11", "2.13", "2.15")
"""The releases of torch that the simulated runtime was run with."""

MACHINES: Final = ("x86_64", "aarch64")
"""The runtime is built for these; it was run on the first alone."""

SHIPPED: Final = Path(__file__).with_name("shipped")
"""A wheel for one platform has runtimes here, in a folder for each build of torch."""

FETCH_COMMAND: Final = "torchmem simulate --fetch"
_SIZE: Final = "0.9 to 1.5 GB to fetch, twice that on disk, once for each release"
# The first release of cuDNN that plans for a GPU that is not there.
_FIRST_PLANNER: Final = (9, 8)
# The headers of the CUDA runtime, as torch's wheels of that CUDA release would install them.
_HEADERS: Final = {
    "13": ("nvidia-cuda-runtime=={}.*", "nvidia-cuda-crt=={}.*"),
    "12": ("nvidia-cuda-runtime-cu12=={}.*", "nvidia-cuda-nvcc-cu12=={}.*"),
}


def cache_folder() -> Path:
    """Return the folder for all that is fetched and built."""
    return cache_root() / "simulate"


@contextlib.contextmanager
def cache_written() -> Iterator[None]:
    """Raise `SimulationError` where the cache cannot be written, or what belongs there be built."""
    try:
        yield
    except BuildError as error:
        raise SimulationError(f"the simulated CUDA runtime cannot be built: {error}") from error
    except OSError as error:
        raise SimulationError(
            f"{cache_folder()} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a "
            "folder that can"
        ) from error


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A CUDA build of torch.

    Attributes:
        version: Its release, such as 2.13.0.
        cuda: The CUDA release that it was built for, such as 13.0.
        site: The folder that has to come first among those that Python imports from.
        runtime: The folder of the simulated runtime that it is to find.
        cudnn: The folder of NVIDIA's cuDNN, which plans convolutions; None without one that can.
        cudnn_release: Its release, such as 9.20; ``""`` without one.
    """

    version: str
    cuda: str
    site: Path
    runtime: Path
    cudnn: Path | None
    cudnn_release: str = ""

    @property
    def releases(self) -> str:
        """Whose numbers those of a simulated GPU are: ``torch 2.13, cuDNN 9.20``."""
        torch = ".".join(self.version.split(".")[:2])
        return f"torch {torch}" + (f", cuDNN {self.cudnn_release}" if self.cudnn_release else "")


def require_platform() -> None:
    """Raise `SimulationError` where no GPU can be simulated."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in MACHINES:
        raise SimulationError(
            f"a GPU is simulated on Linux x86-64 and aarch64 only, and this is {system} {machine}: "
            "only there torch has the CUDA build that the runtime was made for; use a container, "
            "or a Linux runner of continuous integration"
        )


@cache_written()
def torch_build(version: str = "") -> TorchBuild:
    """Return the CUDA build of the torch that is installed, or of another release, ready to run.

    An installed CUDA build is linked; any other must have been fetched before. Builds the runtime
    where it is missing. Raises `SimulationError`.
    """
    require_platform()
    package, installed, cuda = _installed_torch()
    version = version or _required(installed)
    if version == installed and cuda:
        site = _linked(package, installed)
        return _with_runtime(
            version, cuda, site, next(iter(metadata.distributions(name="torch")), None)
        )
    site = _fetched_site(version)
    if not (site / "fetched").exists() or not _has_planner(site):
        own = version == installed
        here = "installed for the CPU" if own else "not installed here"
        command = FETCH_COMMAND if own else f"{FETCH_COMMAND} --torch {version}"
        raise SimulationError(
            f"torch {version} is {here}, and a GPU is simulated with torch's CUDA "
            f"build of that release; `{command}` fetches it ({_SIZE}) into {site.parent}"
        )
    _, cuda = _version_of(site / "torch")
    return _with_runtime(version, cuda, site, _fetched_torch(site))


def fetch(version: str = "", patience_s: float = 900) -> TorchBuild:
    """Fetch torch's CUDA build, unless it is there, and return it ready to run.

    pip says on the way how large each file is. Raises `SimulationError`.
    """
    fetch_package(version, patience_s)
    return torch_build(version)


@cache_written()
def fetch_package(version: str = "", patience_s: float = 900) -> Path:
    """Fetch torch's CUDA build, unless it is there, and return its folder.

    Raises `SimulationError`.
    """
    require_platform()
    package, installed, cuda = _installed_torch()
    version = version or _required(installed)
    if version == installed and cuda:
        return package
    site = _fetched_site(version)
    if not (site / "fetched").exists():
        _fetch_torch(site, version, patience_s)
    if not _has_planner(site):
        name, release = _planner(_fetched_torch(site))
        _pip(_planner_folder(name, release), [f"{name}=={release}"], patience_s)
    return site / "torch"


def _fetch_torch(site: Path, version: str, patience_s: float) -> None:
    shutil.rmtree(site, ignore_errors=True)
    _pip(site, [f"torch=={version}"], patience_s)
    if not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
        shutil.rmtree(site)
        raise SimulationError(f"the package index has torch {version} without CUDA only")
    needed = [str(need) for need in _needs(_fetched_torch(site)) if need.name == "triton"]
    if needed:
        _pip(site, needed, patience_s)
    (site / "fetched").touch()


def _fetched_torch(site: Path) -> metadata.Distribution:
    return next(iter(metadata.distributions(name="torch", path=[str(site)])))


def _needs(distribution: metadata.Distribution) -> list[Requirement]:
    """Return the packages that a torch needs here, in which releases, without the condition."""
    needs = map(Requirement, distribution.requires or ())
    here = [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    for need in here:
        need.marker = None
    return here


def _only_release(need: Requirement) -> str:
    """Return the only release that will do; ``""`` where more will."""
    exact = [each.version for each in need.specifier if each.operator == "=="]
    return exact[0] if exact else ""


def _planner(distribution: metadata.Distribution) -> tuple[str, str]:
    """Return the package and release of the cuDNN that plans for a torch, or twice ``""``."""
    for need in _needs(distribution):
        release = _only_release(need)
        if need.name.startswith("nvidia-cudnn") and release:
            first = tuple(int(part) for part in release.split(".")[:2])
            return (need.name, release) if first >= _FIRST_PLANNER else ("", "")
    return "", ""


def _planner_folder(name: str, release: str) -> Path:
    return cache_folder() / f"{name}-{release}"


def _has_planner(site: Path) -> bool:
    distribution = _fetched_torch(site)
    return not all(_planner(distribution)) or _cudnn(distribution) is not None


def _cudnn(distribution: metadata.Distribution | None) -> Path | None:
    """Return the folder of the cuDNN that plans for a torch: it is beside that, or was fetched."""
    name, release = _planner(distribution) if distribution else ("", "")
    if not distribution or not name:
        return None
    for folder in (Path(str(distribution.locate_file(""))), _planner_folder(name, release)):
        libraries = folder / "nvidia" / "cudnn" / "lib"
        if (libraries / "libcudnn_graph.so.9").exists():
            return libraries
    return None


def _installed_torch() -> tuple[Path, str, str]:
    """Return the folder, release and CUDA release of the torch that would be imported.

    The releases are empty where there is none.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return Path(), "", ""
    folder = Path(spec.origin).parent
    return (folder, *_version_of(folder))


def _required(installed: str) -> str:
    if not installed:
        raise SimulationError("torch is not installed here")
    return installed


def _version_of(package: Path) -> tuple[str, str]:
    """Return a torch's release, and the release of CUDA that it was built for, if any."""
    text = (package / "version.py").read_text(encoding="utf-8")
    release = re.search(r"^__version__ = '([^+']+)", text, re.M)
    cuda = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.M)
    if release is None:
        raise SimulationError(f"{package}/version.py names no release of torch")
    return release[1], cuda[1] if cuda else ""


def _fetched_site(version: str) -> Path:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / f"torch-{version}-{python}" / "site"


def _linked(package: Path, version: str) -> Path:
    """Return a folder with links to an installed torch.

    Its libraries look for CUDA's beside themselves before they heed any variable. Seen through a
    link they are elsewhere, and nothing is beside them.
    """
    if package.parent.parent.parent == cache_folder():
        return package.parent
    stamp = (package / "version.py").stat().st_mtime_ns
    key = sha256(f"{package} {stamp}".encode()).hexdigest()[:12]
    site = cache_folder() / "links" / f"torch-{version}-{key}"
    if not site.exists():
        work_folder = site.with_name(f"{site.name}.{os.getpid()}")
        for folder in (package, package / "lib"):
            target = work_folder / "torch" / folder.relative_to(package)
            target.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if path != package / "lib":
                    (target / path.name).symlink_to(path)
        try:
            work_folder.rename(site)
        except OSError:  # another process was faster
            shutil.rmtree(work_folder)
    return site


def _with_runtime(
    version: str, cuda: str, site: Path, distribution: metadata.Distribution | None
) -> TorchBuild:
    libraries = site / "torch" / "lib"
    macros = _versions_of_libraries(distribution)
    sources = [*SOURCES.iterdir(), *SOURCES_OF_OPERATORS.iterdir()]
    name = f"{version}-{digest(f'{cuda} {macros}', sources)}"
    place = sha256(str(libraries.resolve()).encode()).hexdigest()[:6]
    runtime = cache_folder() / f"runtime-{name}-{place}"

    def make() -> None:
        if not take_built(SHIPPED / name, libraries, runtime):
            build(libraries, _headers(cuda), macros, runtime)

    make_once(runtime, (runtime / LIBRARY).exists, make)
    cudnn = _cudnn(distribution)
    release = _planner(distribution)[1] if distribution and cudnn else ""
    cudnn_release = ".".join(release.split(".")[:2])
    return TorchBuild(version, cuda, site, runtime, cudnn, cudnn_release)


def shipped_folder(built: TorchBuild) -> Path:
    """Return the folder in which a wheel has the runtime of a build of torch."""
    name, _, _place = built.runtime.name.removeprefix("runtime-").rpartition("-")
    return SHIPPED / name


def _versions_of_libraries(distribution: metadata.Distribution | None) -> list[str]:
    """Return cuDNN's and NCCL's release as torch was built for them: it chooses paths by them."""
    macros = []
    for need in _needs(distribution) if distribution else ():
        match = re.match(r"nvidia-(cudnn|nccl)-cu", need.name)
        if match and (release := _only_release(need)):
            major, minor, patch = (int(part) for part in release.split(".")[:3])
            number = 10000 * major + 100 * minor + patch
            macros.append(f"{match[1].upper()}_VERSION={number}")
    return macros


def _headers(cuda: str) -> list[Path]:
    """Return the folders of the CUDA runtime's headers, fetched (6 MB) where they are missing."""
    folder = cache_folder() / f"headers-{cuda}"
    if not any(folder.rglob("cuda_runtime_api.h")):  # a fetch that was killed leaves a folder
        names = _HEADERS.get(cuda.split(".")[0])
        if names is None:
            raise SimulationError(f"CUDA {cuda} is not known yet; known are 12 and 13")
        _pip(folder, [name.format(cuda) for name in names], 300)
    folders = {path.parent for path in folder.rglob("cuda_runtime_api.h")}
    return sorted(folders | {path.parent.parent for path in folder.rglob("crt/host_defines.h")})


def _pip(target: Path, requirements: Sequence[str], patience_s: float) -> None:
    """Install packages alone into a folder, from the package index and not from local files."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
    }
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--upgrade", "--target"]
    target.mkdir(parents=True, exist_ok=True)  # before anything is fetched
    try:
        done = subprocess.run(
            [*command, str(target), *requirements],
            env={**passed, "PIP_CONFIG_FILE": os.devnull},
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            text=True,
            timeout=patience_s,
            check=False,
        )
        if not done.returncode:
            return
        problem = done.stderr.strip()
    except subprocess.TimeoutExpired:
        problem = f"more than {patience_s:.0f} s"
    shutil.rmtree(target, ignore_errors=True)
    raise SimulationError(f"{' and '.join(requirements)} could not be fetched: {problem}")
