"""What a reader of our pages pastes passes on a GPU, too, where libraries take scratch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import DOCS, ROOT, blocks, run

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("gpu")]


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *(DOCS / "guides" / f"{name}.md" for name in ("training", "frameworks", "devices")),
        *(DOCS / "guides" / f"{name}.md" for name in ("inference", "kernels", "migrating")),
    ],
    ids=lambda page: page.stem,
)
def test_the_limits_of_an_example_leave_room_for_a_gpu(page: Path, tmp_path: Path) -> None:
    for framework in ("lightning", "transformers", "accelerate"):
        if page.stem == "frameworks":
            pytest.importorskip(framework)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for number, example in enumerate(b for b in blocks(page, "python") if "def test_" in b):
        (tmp_path / f"test_{number}.py").write_text(example, encoding="utf-8")
    # A trainer reads the loss to log it, and that of random data is another one than a GPU's.
    strict = () if page.stem == "frameworks" else ("--torchmem-strict",)
    done = run(tmp_path, "-m", "pytest", "-rs", "-otorchmem_device=cuda", *strict)
    assert done.returncode == 0, done.stdout
    assert re.search(r"[1-9]\d* passed", done.stdout)
