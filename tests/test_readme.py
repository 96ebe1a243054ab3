"""What the README says is so: its tables, its examples, its commands and the failure it shows.

Run as a script, this prints the failure as it is today.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_torchmem.plugin.item.fixture import Torchmem
from pytest_torchmem.plugin.options.option_table import MARKERS, OPTIONS

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.documents import ROOT, blocks, run, run_examples

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")
FAILING = "test_training_fits_its_budget_and_does_not_grow"


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Return what stands in code font in the first column of the tables in ``text``."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize("registered", MARKERS)
def test_every_key_of_a_marker_is_in_its_table_and_no_other(registered: str) -> None:
    name, _, signature = registered.partition(":")[0].partition("(")
    keys = [key.strip() for key in signature.rstrip(")").split(",") if key.strip() != "*"]
    text = section("Markers")
    start = text.index(f"`@pytest.mark.{name}(")
    table = text[start:].partition("\n\n`@pytest.mark.")[0]
    assert sorted(first_cells(table)) == sorted(keys)


def test_every_registered_option_and_ini_name_is_in_the_table(pytester: pytest.Pytester) -> None:
    told = pytester.runpytest_inprocess("--help", "-p", "no:cacheprovider").stdout.str()
    flags = set(re.findall(r"^  (--torchmem-[a-z-]+)", told, re.MULTILINE))
    names = set(re.findall(r"^  (torchmem_[a-z_]+) \(", told, re.MULTILINE))
    rows = re.findall(r"^\| `(--torchmem-[a-z-]+)[^`]*` \| `(\w+)` \|", README, re.MULTILINE)
    assert len(flags) == len(OPTIONS)
    assert [flag for flag, _ in rows] == [option.flag for option in OPTIONS]
    assert {flag for flag, _ in rows} == flags
    assert {name for _, name in rows} == names
    assert all(name == flag[2:].replace("-", "_") for flag, name in rows)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_the_default_of_each_option_is_told(option) -> None:
    (default,) = re.findall(
        rf"^\| `{option.flag}[\[=`][^|]*\|[^|]*\| ([^|]*) \|", README, re.MULTILINE
    )
    if isinstance(option.default, bool):
        assert default == "off"
    elif option.default:
        assert default == f"`{option.default}`"
    else:
        assert " " in default  # described in words: it depends on the machine


def test_every_name_of_the_fixture_is_in_the_table_and_no_other() -> None:
    public = {name for name in vars(Torchmem) if not name.startswith("_")}
    told = re.findall(r"torchmem\.(\w+)", " ".join(first_cells(section("The fixture"))))
    assert sorted(told) == sorted(public)


def test_the_python_examples_run(tmp_path: Path) -> None:
    run_examples(tmp_path, blocks(PAGE, "python"))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_list_of_pages_is_complete() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    listed = re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert pages == {page for page in listed if "/" not in page}


def test_ci_runs_the_commands_that_the_readme_gives() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = [
        line for block in blocks(PAGE, "sh") for line in block.splitlines() if "venv" in line
    ]
    assert len(commands) == 2
    for command in commands:
        arguments = command.rpartition(".venv/bin/pytest")[2]
        assert f"pytest{arguments}" in script


def fail_as_the_readme_does(folder: Path) -> str:
    """Make the README's change to a copy of the example; return pytest's output."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    (diff,) = blocks(PAGE, "diff")
    removed = "".join(line[1:] for line in diff.splitlines(True) if line.startswith("-"))
    added = "".join(line[1:] for line in diff.splitlines(True) if line.startswith("+"))
    source = folder / "examples" / "gpt.py"
    code = source.read_text()
    assert removed in code
    source.write_text(code.replace(removed, added))
    return run(folder, "-m", "pytest", "examples/test_gpt.py", "-k", FAILING).stdout


def test_the_failure_shown_is_a_real_one(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pin = re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pin is not None
    if torch.__version__.partition("+")[0] != pin[1] or torch.cuda.is_available():
        pytest.skip("the README shows a failure of the pinned torch on the CPU")
    real = iter(fail_as_the_readme_does(tmp_path).splitlines())
    (shown,) = blocks(PAGE, "text")
    missing = [line for line in shown.splitlines() if line not in ("", "...") and line not in real]
    assert missing == []


def excerpt(output: str) -> Iterator[str]:
    """Yield the lines of a failure, its tables cut after a few rows."""
    lines = output.splitlines()
    start = next(n for n, line in enumerate(lines) if FAILING in line and line.startswith("__"))
    rows = 0
    for line in lines[start + 1 :]:
        if line.startswith(("---", "===", "___")):
            return
        rows = rows + 1 if re.match(r" *(at least )?[+\d.]+ [KMGT]?i?B ", line) else 0
        if rows <= 4:
            yield line
        elif rows == 5:
            yield "..."


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(excerpt(fail_as_the_readme_does(Path(folder)))))
