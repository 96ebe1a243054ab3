"""What the README says is so: its example, its change, its pictures, its commands and its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import ROOT, blocks, require_the_pinned_torch_on_a_cpu
from tools.pictures import PICTURES, README, fail_as_the_readme_does, terminal_svg

pytestmark = pytest.mark.slow

TEXT = README.read_text(encoding="utf-8")


def test_the_first_picture_is_what_the_example_prints_after_the_change(tmp_path: Path) -> None:
    require_the_pinned_torch_on_a_cpu()
    output = fail_as_the_readme_does(tmp_path)
    assert (PICTURES / "failure.svg").read_text(encoding="utf-8") == terminal_svg(output)
    assert (tmp_path / "memory.html").exists()


def test_the_size_that_a_reviewer_is_said_to_read_is_the_one_of_the_picture() -> None:
    (read,) = re.findall(r'a reviewer reads "([\d.]+ MiB): activation ([\d.]+ MiB)', TEXT)
    picture = (PICTURES / "failure.svg").read_text(encoding="utf-8")
    assert all(f"over the baseline of {size}" in picture for size in read)


def test_links_and_pictures_are_there() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_ci_runs_the_commands_that_the_readme_gives() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = [
        line for block in blocks(README, "sh") for line in block.splitlines() if "venv" in line
    ]
    assert len(commands) == 2
    for command in commands:
        arguments = command.rpartition(".venv/bin/pytest")[2]
        assert f"pytest{arguments}" in script
