"""Pages of documentation, and the examples in them, to be run as a reader would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from pytest_torchmem.simulate import torch_builds
from pytest_torchmem.values.errors import SimulationError

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page that are in one language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def require_the_pinned_torch_on_a_cpu() -> None:
    """Skip the test elsewhere: there, real failures have other numbers than the pages show."""
    torch = pytest.importorskip("torch")
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    if torch.__version__.partition("+")[0] != pin[1] or torch.cuda.is_available():
        pytest.skip("failures are shown as the pinned torch has them on the CPU")


def needs_simulated_gpu(example: str) -> bool:
    """Return whether an example runs something in a process with a simulated GPU."""
    return bool(re.search(r"\bestimate\(", example))


def has_simulated_gpu() -> bool:
    """Return whether torch's CUDA build is there, installed or fetched before."""
    try:
        torch_builds.torch_build()
    except SimulationError:
        return False
    return True


def apply_change(page: Path, source: Path) -> None:
    """Make the one change that a page shows as a diff to a source file."""
    (diff,) = blocks(page, "diff")
    lines = diff.splitlines(True)
    removed, added = ("".join(x[1:] for x in lines if x.startswith(sign)) for sign in "-+")
    code = source.read_text(encoding="utf-8")
    assert removed in code
    source.write_text(code.replace(removed, added), encoding="utf-8")


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, with results that do not depend on who runs the tests."""
    ours = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    ranks = ("RANK", "WORLD_SIZE")
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**{k: v for k, v in os.environ.items() if k not in ranks}, **ours},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


RUN_SCRIPTS = """
import contextlib, io, json, runpy, sys

printed = []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(path, run_name="__main__")
    printed.append(out.getvalue())
print(json.dumps(printed))
"""

RUN_TESTS = """
import json, sys
import pytest

from pytest_torchmem.simulate import torch_builds
from pytest_torchmem.values.errors import SimulationError

tests, with_baseline = json.loads(sys.argv[1])
sys.exit(
    pytest.main(["--torchmem-update-baseline", *tests])
    or pytest.main(["-otorchmem_require_baseline=true", *with_baseline])
)
"""


def run_examples(folder: Path, examples: Iterable[str]) -> dict[str, str]:
    """Run examples and return what each script printed, by its text.

    All scripts run in one process, and all tests in another. Those with a baseline, which their run
    stores, are compared with it in a second run.
    """
    ini = "[pytest]\naddopts = -p no:cacheprovider\ntorchmem_device = cpu\n"
    (folder / "pytest.ini").write_text(ini)
    scripts: dict[str, str] = {}
    tests, with_baseline = list[str](), list[str]()
    for number, example in enumerate(examples):
        kind = "test" if "def test_" in example else "script"
        name = f"{kind}_{number}.py"
        (folder / name).write_text(example, encoding="utf-8")
        if kind == "test":
            tests.append(name)
            if re.search(r"memory_baseline|torchmem\.check\(", example):
                with_baseline.append(name)
        else:
            scripts[example] = name
    done = run(folder, "-c", RUN_SCRIPTS, *scripts.values())
    assert done.returncode == 0, done.stderr
    tested = run(folder, "-c", RUN_TESTS, json.dumps([tests, with_baseline]))
    assert tested.returncode == 0, tested.stdout + tested.stderr
    stored = {path.stem for path in folder.glob("__torchmem__/*/*.json")}
    assert stored <= {Path(name).stem for name in with_baseline}
    return dict(zip(scripts, json.loads(done.stdout), strict=True))
