"""Runs torch's own tests of its profiler and its estimator against `pytest_torchmem.torch_names`.

    python tools/torch_tests.py                  # fetches the tests of the installed release
    python tools/torch_tests.py --source FOLDER  # takes them from a checkout that is there

The tests are torch's, and none of them is in this repository: they are fetched into a temporary
folder, only their imports are rewritten, and they have to pass. ``torch.profiler.profile``, which
they call by that path, counts as an import.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = "https://github.com/pytorch/pytorch"
OURS = "pytest_torchmem.torch_names"
IMPORTS = (
    (r"^import torch$", f"import torch\nfrom {OURS} import profiler as torchmem_profiler"),
    (r"^from torch\.profiler import", f"from {OURS}.profiler import"),
    (r"\btorch\.profiler\.profile\b", "torchmem_profiler.profile"),
    (
        r"^from torch\.autograd\.profiler import KinetoStepTracker, profile as _profile",
        f"from {OURS}.profiler import KinetoStepTracker, autograd_profile as _profile",
    ),
    (
        r"^from torch\._inductor\.fx_passes\.memory_estimator import",
        f"from {OURS}.memory_estimator import",
    ),
)
UTILS = "dfs bfs utils_compute_self_time utils_intervals_overlap utils_compute_queue_depth "
UTILS += "utils_compute_queue_depth_when_no_cuda_events utils_compute_idle_time "
UTILS += "utils_get_optimizable_events"
AVERAGES = "memory_profiler export_stacks schedule_function_count user_annotation "
AVERAGES += "kineto_profiler_api"
FOLDERS = ("test/profiler", "test/inductor")
#: For each suite its file, its tests ("" for all), and how many there are.
SUITES = {
    "TestMemoryProfiler": ("profiler/test_memory_profiler.py", "", 33),
    "TestExperimentalUtils": ("profiler/test_profiler.py", UTILS, 8),
    "test_mem_estimation": ("inductor/test_mem_estimation.py", "", 4),
    "averages": ("profiler/test_profiler.py", AVERAGES, 5),
}


def main() -> int:
    """Run the suites, print what each reached, and return 0 if all tests of all passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, help="a checkout of torch; default: fetch it")
    parser.add_argument(
        "--record",
        action="store_true",
        help="have torch record the expected texts anew first, for tests of another release",
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}")
    options = parser.parse_args()
    wanted = options.suites or list(SUITES)
    failed = False
    with tempfile.TemporaryDirectory(prefix="torch-tests-") as made:
        tests = Path(made, "test")
        release = torch.__version__.partition("+")[0]
        source = options.source or fetched(Path(made, "torch"), release, *FOLDERS)
        shutil.copytree(source / "test", tests)
        if options.record:
            for file in {SUITES[suite][0] for suite in wanted}:
                passed(tests / file, "", accepts=True)
        for file in {SUITES[suite][0] for suite in wanted}:
            rewrite(tests / file)
        for suite in wanted:
            file, names, count = SUITES[suite]
            reached = passed(tests / file, names)
            failed |= reached != count
            print(f"{suite}: {reached} of {count}", flush=True)
    return int(failed)


def fetched(folder: Path, release: str, *folders: str) -> Path:
    """Clone folders of a release of torch, and nothing else of it."""
    clone = ["git", "clone", "--quiet", "--depth=1", "--filter=blob:none", "--sparse"]
    subprocess.run([*clone, f"--branch=v{release}", REPOSITORY, str(folder)], check=True)
    subprocess.run(["git", "sparse-checkout", "set", *folders], cwd=folder, check=True)
    return folder


def rewrite(file: Path) -> None:
    """Point the imports of a test file at our modules."""
    text = file.read_text(encoding="utf-8")
    for theirs, ours in IMPORTS:
        text = re.sub(theirs, ours, text, flags=re.MULTILINE)
    file.write_text(text, encoding="utf-8")


def passed(file: Path, names: str, accepts: bool = False) -> int:
    """Run tests of a file and return how many passed; what failed is printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:torchmem", "-p"]
    command += ["no:cacheprovider", "--tb=short", "-o", "addopts=", file.name]
    # Classes that have tests of the same names run other things.
    wanted = {f"test_{name}" for name in names.split()}
    environment = {**os.environ, **({"EXPECTTEST_ACCEPT": "1"} if accepts else {})}
    if wanted:
        command += ["-k", " or ".join(sorted(wanted))]
    done = subprocess.run(
        command, cwd=file.parent, env=environment, capture_output=True, text=True, check=False
    )
    if accepts:
        return 0
    if done.returncode not in (0, 5):
        print(done.stdout[-8000:], done.stderr[-2000:])
    reached = re.findall(r"^PASSED \S+::(\w+)$", done.stdout, re.MULTILINE)
    return sum(not wanted or name in wanted for name in reached)


if __name__ == "__main__":
    raise SystemExit(main())
