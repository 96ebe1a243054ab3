"""Pages of documentation, and the examples in them, to be run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

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


def run_examples(folder: Path, examples: Iterable[str]) -> dict[str, str]:
    """Run examples and return what each script printed, by its text.

    One with a test in it is run twice: its baselines are stored, and then compared with.
    """
    ini = "[pytest]\naddopts = -p no:cacheprovider\ntorchmem_device = cpu\n"
    (folder / "pytest.ini").write_text(ini)
    printed = {}
    with_tests = []
    for number, example in enumerate(examples):
        kind = "test" if "def test_" in example else "script"
        path = folder / f"{kind}_{number}.py"
        path.write_text(example, encoding="utf-8")
        if kind == "test":
            with_tests.append(path.name)
            continue
        done = run(folder, path)
        assert done.returncode == 0, done.stderr
        printed[example] = done.stdout
    for option in ("--torchmem-update-baseline", "--torchmem-require-baseline"):
        if with_tests:
            done = run(folder, "-m", "pytest", option, *with_tests)
            if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
                pytest.skip("the examples need packages that are not installed")
            assert done.returncode == 0, done.stdout + done.stderr
    return printed
