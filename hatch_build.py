"""Builds the runtimes of simulated GPUs into a wheel for Linux, where that is asked for.

``TORCHMEM_SHIP_FOR="2.11.0 2.13.0"`` names the releases of torch, whose CUDA builds are fetched.
The wheel is then one for linux_x86_64: `.ci/package` makes it. Without the variable it is pure
Python, and a runtime is built where it is first needed.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShippedRuntimes(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        return ["filelock", "pip"] if self._releases() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not self._releases() or version == "editable":
            return
        sys.path.insert(0, self.root)  # the package that is built, whatever else is installed
        from pytest_torchmem.simulate.build import LIBRARY, LIBRARY_OF_OPERATORS
        from pytest_torchmem.simulate.torch_builds import fetch, shipped_folder

        for release in self._releases():
            built = fetch(release)
            folder = shipped_folder(built).relative_to(self.root)
            for name in (LIBRARY, LIBRARY_OF_OPERATORS):
                build_data["force_include"][str(built.runtime / name)] = str(folder / name)
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    @staticmethod
    def _releases() -> list[str]:
        return os.environ.get("TORCHMEM_SHIP_FOR", "").split()
