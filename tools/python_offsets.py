"""Prints the row of `LAYOUTS` for a Python: see `record/native/observer/calls.cpp`.

python tools/python_offsets.py                # for this Python
python tools/python_offsets.py python3.14     # for another one

A C compiler is needed, and the Python's headers.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
_INCLUDE = "import sysconfig; print(sysconfig.get_paths()['include'])"


def missing(python: str = sys.executable) -> str:
    """Return what is not here that `offsets` needs; "" where nothing is."""
    if not _compiler():
        return "there is no C compiler"
    found = subprocess.run([python, "-c", _INCLUDE], capture_output=True, text=True, check=False)
    headers = Path(found.stdout.strip()) / "internal" / "pycore_frame.h"
    return "" if not found.returncode and headers.exists() else f"{python} has no headers"


def offsets(python: str = sys.executable) -> tuple[str, str]:
    """Return a row for a Python, and what is the same in all releases, as that one has it."""
    found = subprocess.run([python, "-c", _INCLUDE], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "offsets"
        command = [_compiler(), "-w", f"-I{found.stdout.strip()}", str(SOURCE), "-o", str(program)]
        subprocess.run(command, check=True)
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    row, others = said.splitlines()
    return row, others


def _compiler() -> str:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")


if __name__ == "__main__":
    print(*offsets(*sys.argv[1:2]), sep="\n")
