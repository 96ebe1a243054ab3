"""Builds what is in C++ into a wheel for Linux, where that is asked for.

``TORCHMEM_SHIP_FOR="2.11.0 2.13.0"`` names releases of torch, whose CUDA builds are fetched: the
wheel has the recorder's libraries and the runtime of simulated GPUs for each. For those in
``TORCHMEM_RECORD_FOR`` it has the recorder's libraries alone. The wheel is then one for
linux_x86_64: `.ci/package` makes it. Without the variables it is pure Python, and all of this is
built where it is first needed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedLibraries(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return ["filelock", "pip"] if self._releases() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._releases() or version == "editable":
            return
        sys.path.insert(0, self.root)  # the package that is built, whatever else is installed
        from pytest_torchmem.record.native.compiled_library import (
            GPU_OBSERVER,
            OBSERVER,
            SHIPPED,
            CompiledLibrary,
        )
        from pytest_torchmem.simulate.build import LIBRARY, LIBRARY_OF_OPERATORS
        from pytest_torchmem.simulate.torch_builds import fetch, fetch_package, shipped_folder

        files = {}
        for release in self._releases():
            package = fetch_package(release)
            for part in (OBSERVER, GPU_OBSERVER):
                built = CompiledLibrary(part, package, release)
                files[built.cached(self.app.display_info)] = SHIPPED / built.folder_name
        for release in _named("TORCHMEM_SHIP_FOR"):
            build = fetch(release)
            for name in (LIBRARY, LIBRARY_OF_OPERATORS):
                files[build.runtime / name] = shipped_folder(build)
        for file, folder in files.items():
            target = folder.relative_to(self.root) / file.name
            build_data["force_include"][str(file)] = str(target)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    @staticmethod
    def _releases() -> list[str]:
        return [*_named("TORCHMEM_SHIP_FOR"), *_named("TORCHMEM_RECORD_FOR")]


def _named(variable: str) -> list[str]:
    return os.environ.get(variable, "").split()
