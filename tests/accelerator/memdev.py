"""Builds and loads memdev.cpp: a device that is neither the CPU nor CUDA.

A process gets it by importing `memdev_device` from the folder of `build`'s library; there can be
one such device in a process, and it cannot be taken away again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE / "memdev.cpp"


def missing() -> str:
    """Why the device cannot be had here; empty if it can."""
    if sys.platform != "linux":
        return "the device is built for Linux only"
    return "" if shutil.which("g++") else "needs g++"


def build(folder: Path) -> Path:
    """Return the library, built in ``folder`` unless it is there. Takes about 10 seconds.

    Several processes may do this at a time. Raises `CalledProcessError`.
    """
    import torch

    home = Path(torch.__file__).parent
    told = SOURCE.read_bytes() + f"{torch.__version__}{home}".encode()
    library = folder / f"memdev-{hashlib.sha256(told).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    # torch 2.13 is written in C++20, releases before it in C++17.
    standard = max(map(int, re.findall(r"-std=c\+\+(\d+)", _how_torch_compiles())), default=17)
    command = ["g++", f"-std=c++{standard}", "-O0", "-w", "-fPIC", "-shared", str(SOURCE)]
    command += [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    abi = int(torch.compiled_with_cxx11_abi())
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-Wl,-rpath,{home / 'lib'}"]
    subprocess.run([*command, "-o", str(unfinished)], check=True, capture_output=True, text=True)
    unfinished.replace(library)
    return library


def _how_torch_compiles() -> str:
    from torch.utils import cpp_extension

    return Path(cpp_extension.__file__).read_text(encoding="utf-8")
