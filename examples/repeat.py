"""Run the examples many times and compare what was measured, to the byte.

    python examples/repeat.py 20

Runs take turns: each test module in a process of its own, all modules in one, all tests of all
modules in a shuffled order. Every run stores its numbers as baselines in a folder of its own, and
the files must be identical. Otherwise the lines that differ are shown, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import difflib
import random
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
MODULES = sorted(FOLDER.glob("test_*.py"))


def run_pytest(*arguments: str | Path) -> str:
    """Run pytest on its own and return its output; exits when a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


def measure(tests: list[str], folder: Path) -> None:
    run_pytest("--torchmem-update-baseline", f"-otorchmem_baseline_dir={folder}", *tests)


def stored(folder: Path) -> dict[str, bytes]:
    """Return the baselines in a folder by their path in it."""
    files = folder.rglob("*.json")
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def arguments(node_ids: list[str], number: int) -> list[list[str]]:
    """Return what the processes of one run are to test."""
    modules = sorted({node_id.partition("::")[0] for node_id in node_ids})
    shuffled = random.Random(number).sample(node_ids, len(node_ids))
    return [[[module] for module in modules], [modules], [shuffled]][number % 3]


def differences(reference: dict[str, bytes], found: dict[str, bytes]) -> list[str]:
    """Return the lines that differ between files of the same name; new files become reference."""
    lines: list[str] = []
    for name, content in found.items():
        before = reference.setdefault(name, content)
        if before != content:
            old, new = before.decode().splitlines(), content.decode().splitlines()
            lines += difflib.unified_diff(old, new, f"{name} first", f"{name} now", "", "", 0, "")
    return lines


def collected(*modules: Path) -> list[str]:
    lines = run_pytest("--collect-only", *modules).splitlines()
    return [line for line in lines if "::" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=20)
    runs = parser.parse_args().runs
    node_ids = collected(*MODULES)
    reference: dict[str, bytes] = {}
    failed = 0
    for number in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            for tests in arguments(node_ids, number):
                measure(tests, Path(folder))
            lines = differences(reference, stored(Path(folder)))
        failed += bool(lines)
        print(*lines, sep="\n", end="\n" if lines else "")
        print(f"run {number + 1} of {runs}, {failed} differed", flush=True)
    print(f"{len(reference)} files, {'identical in all runs' if not failed else 'not identical'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
