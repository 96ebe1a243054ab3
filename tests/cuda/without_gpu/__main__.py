"""Run a command with torch's own CUDA build on a machine without a GPU.

    python -m tests.cuda.without_gpu python -m pytest tests/cuda
    python -m tests.cuda.without_gpu --torch 2.11.0 --devices 2 python train.py

The caching allocator, autograd, the profiler and everything else above the CUDA runtime are torch's
own; the runtime is simulated (see runtime.cpp). Memory is true to the byte. Kernels are not run, so
values are zeros and times mean nothing, and neither cuDNN nor NCCL is there.

torch's wheel (500 to 800 MB) is fetched once for each version, into a cache folder, and laid over
the environment that runs this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cuda.without_gpu.build import build

# The headers of the CUDA runtime, as torch's wheels of that CUDA release would install them.
_HEADERS = {
    "13": ("nvidia-cuda-runtime=={}.*", "nvidia-cuda-crt=={}.*"),
    "12": ("nvidia-cuda-runtime-cu12=={}.*", "nvidia-cuda-nvcc-cu12=={}.*"),
}
# Not done: what is asked for could not be fetched (EX_TEMPFAIL of sysexits.h).
_NOT_FETCHED = 75


class FetchError(Exception):
    """A package could not be had."""


def prepare(torch_version: str, cache: Path, patience_s: float) -> dict[str, str]:
    """Fetch and build what is not there yet, and return the environment's variables.

    Raises `FetchError`, or RuntimeError when the runtime cannot be built.
    """
    folder = cache / f"torch-{torch_version}"
    site, runtime = folder / "site", folder / "runtime"
    if not (site / "fetched").exists():
        shutil.rmtree(site, ignore_errors=True)
        _fetch(site, [f"torch=={torch_version}"], patience_s)
        if not (site / "torch" / "lib" / "libtorch_cuda.so").exists():
            raise FetchError(f"pip found a build of torch {torch_version} without CUDA")
        cuda = _cuda_of(site)
        names = [name.format(cuda) for name in _HEADERS[cuda.split(".")[0]]]
        _fetch(folder / "headers", names, patience_s)
        (site / "fetched").touch()
    headers = {path.parent for path in (folder / "headers").rglob("cuda_runtime_api.h")}
    headers |= {path.parent.parent for path in (folder / "headers").rglob("crt/host_defines.h")}
    build(site / "torch" / "lib", sorted(headers), runtime)
    return {
        "LD_LIBRARY_PATH": os.pathsep.join([str(runtime), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
    }


def _fetch(target: Path, requirements: list[str], patience_s: float) -> None:
    """Install packages alone into a folder, from the package index and not from local files."""
    passed = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")
    }
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    try:
        done = subprocess.run(
            [*command, str(target), *requirements],
            env={**passed, "PIP_CONFIG_FILE": os.devnull},
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        shutil.rmtree(target, ignore_errors=True)
        raise FetchError(f"{requirements[0]} took more than {patience_s:.0f} s") from None
    if done.returncode:
        raise FetchError(f"{requirements[0]}: {done.stderr.strip()}")


def _cuda_of(site: Path) -> str:
    """The CUDA release that a wheel was built for, such as 13.0."""
    found = re.search(r"^cuda.*= '([\d.]+)'", (site / "torch" / "version.py").read_text(), re.M)
    if found is None:
        raise FetchError("torch's version.py names no CUDA release")
    return found[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.cuda.without_gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--torch", default="2.13.0", help="version of torch (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=2, help="how many (default: %(default)s)")
    parser.add_argument("--gib", type=int, default=80, help="memory of each (default: %(default)s)")
    parser.add_argument(
        "--patience", type=float, default=900, help="seconds a download may take (%(default)s)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("a command is needed")
    if missing := [tool for tool in ("g++", "gcc", "nm", "readelf") if not shutil.which(tool)]:
        print(f"{', '.join(missing)} must be installed first", file=sys.stderr)
        return _NOT_FETCHED
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-torchmem"
    try:
        environment = prepare(options.torch, cache, options.patience)
    except FetchError as error:
        print(f"torch's CUDA build could not be had: {error}", file=sys.stderr)
        return _NOT_FETCHED
    environment["SIMULATED_CUDA_DEVICES"] = str(options.devices)
    environment["SIMULATED_CUDA_GIB"] = str(options.gib)
    done = subprocess.run(options.command, env={**os.environ, **environment}, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
