"""Builds the simulated CUDA runtime into the wheel for Linux, where it is asked to.

``TORCHMEM_PLATFORM_WHEEL`` names the platform of the wheel, such as ``manylinux_2_28_x86_64``.
Without it the wheel is pure Python, and the runtime is built where it is first needed. zig compiles
for an old glibc on any machine, and its own libc++ becomes part of the library.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "TORCHMEM_PLATFORM_WHEEL"
# The CUDA release of the headers for each one that torch is built for.
CUDA = {"12": "12.4", "13": "13.0"}


class CustomBuildHook(BuildHookInterface):
    def dependencies(self) -> list[str]:
        return ["ziglang==0.17.0"] if os.environ.get(VARIABLE) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        platform = os.environ.get(VARIABLE, "")
        if not platform or version == "editable":
            return
        root = Path(self.root)
        sys.path[:0] = [str(root), str(root / "tools")]
        import runtime_symbols

        from pytest_torchmem.simulate.build import SHIPPED, build
        from pytest_torchmem.simulate.torch_builds import runtime_headers

        compiler = [sys.executable, "-m", "ziglang", "c++", *options(platform)]
        built = Path(self.directory) / "shipped"
        built.mkdir(parents=True, exist_ok=True)
        for major, release in CUDA.items():
            asked = runtime_symbols.read(runtime_symbols.FOLDER / f"{major}.txt")
            library = built / f"libsimulated_cuda-{major}.so"
            build(compiler, runtime_headers(release), asked, library)
            build_data["force_include"][str(library)] = str(
                (SHIPPED / library.name).relative_to(root)
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"


def options(platform: str) -> list[str]:
    """Return what tells zig the processor and the glibc of a platform."""
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    if found is None:
        raise SystemExit(f"{VARIABLE}: {platform!r} is not like manylinux_2_28_x86_64")
    target = f"{found[3]}-linux-gnu.{found[1]}.{found[2]}"
    # zig checks for undefined behaviour unless it is told not to; links are the same on each build.
    return ["-target", target, "-fno-sanitize=all", "-g0", "-Wl,--build-id=none", "-Wl,-s"]
