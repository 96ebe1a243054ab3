"""What the pages under docs show runs as it is written there."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_torchmem.plugin.options.option_table import OPTIONS
from tests.documents import (
    DOCS,
    ROOT,
    blocks,
    has_simulated_gpu,
    needs_simulated_gpu,
    require_the_pinned_torch_on_a_cpu,
    run,
    run_examples,
)
from tools.pictures import fail_as_the_guide_does

pytestmark = pytest.mark.slow

PACKAGE = ROOT / "pytest_torchmem"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("guides/*.md")])
OF_ITS_OWN_TEST = "outside-pytest.md"
"""Its examples are files with names; tests/measuring/test_outside_pytest.py runs them."""

TEXTS = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("benchmarks/**/*.md")])

FRAGMENTS = {"how-it-works.md": 5}
"""How many blocks of Python say something about code and are none to be run: without an import."""


def runnable(page: Path) -> list[str]:
    found = blocks(page, "python")
    return [b for b in found if re.search(r"^(import|from) ", b, re.MULTILINE)]


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yield each command of a page and what the page says that it prints."""
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


def shown_output(example: str) -> str:
    """Return what an example says that it prints: the comments at its end."""
    lines = example.splitlines()
    end = next(n for n, line in enumerate(reversed(lines)) if not line.startswith("# "))
    return "".join(f"{line[2:]}\n" for line in lines[len(lines) - end :])


def dead_links(page: Path) -> list[str]:
    """The files that a page links to and that are not there."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [link for link in links if ":" not in link and not (page.parent / link).exists()]


def dead_anchors(page: Path) -> list[str]:
    """The links of a page to headings that are not there."""
    links = re.findall(r"\]\(([^)#\s]*\.md|)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    return [
        f"{file}#{name}"
        for file, name in links
        if name not in anchors(page.parent / (file or page.name))
    ]


def anchors(page: Path) -> set[str]:
    """The names that GitHub and the site give to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_files(page: Path) -> list[str]:
    """The files of the repository or the package that a page names and that are not there."""
    named = re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text(encoding="utf-8"))
    return [n for n in named if not any((top / n).exists() for top in (ROOT, PACKAGE))]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_file_that_is_named_is_there(page):
    assert missing_files(page) == []


def test_a_file_that_has_moved_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("`record/recorder.py`, `tests/builders.py` and `record/gone.py`\n")
    assert missing_files(page) == ["record/gone.py"]


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page):
    assert dead_links(page) == []
    assert dead_anchors(page) == []


def test_the_index_names_every_page_and_the_decisions_are_numbered_once():
    index = (DOCS / "index.md").read_text(encoding="utf-8").splitlines()
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert sorted(names - set(index)) == []
    numbers = [page.name.partition("-")[0] for page in DOCS.glob("decisions/*.md")]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_option_that_is_named_is_one(page):
    text = page.read_text(encoding="utf-8")
    flags = set(re.findall(r"--torchmem-[a-z-]+", text))
    assert flags <= {option.flag for option in OPTIONS}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_every_workflow_that_is_shown_can_be_read(page):
    yaml = pytest.importorskip("yaml")
    for block in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(textwrap.dedent(block)), dict | list)


def test_a_dead_link_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [there](gone.md#part), [far](https://pytest.org)\n")
    assert dead_links(page) == ["gone.md"]
    page.write_text(
        "# `Its` part\n[a](#its-part) [b](page.md#its-part) [c](#gone) [d](page.md#too)\n"
    )
    assert dead_anchors(page) == ["#gone", "page.md#too"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_is_run_or_known_to_be_a_fragment(page):
    assert len(blocks(page, "python")) - len(runnable(page)) == FRAGMENTS.get(page.name, 0)
    assert all(block.startswith("$ ") for block in blocks(page, "console"))


WITH_EXAMPLES = [
    page
    for page in PAGES
    if (runnable(page) or any(commands(page))) and page.name != OF_ITS_OWN_TEST
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder where the examples of all pages ran, and what each script printed."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("pages")
    examples = [example for page in WITH_EXAMPLES for example in runnable(page)]
    if not has_simulated_gpu():
        examples = [example for example in examples if not needs_simulated_gpu(example)]
    return folder, run_examples(folder, examples)


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, ran):
    folder, printed = ran
    left_out = [e for e in runnable(page) if needs_simulated_gpu(e) and not has_simulated_gpu()]
    for example in runnable(page):
        if example not in left_out:
            assert shown_output(example) in ("", printed.get(example, ""))
    for command, output in commands(page):
        program, *arguments = shlex.split(command, comments=True)
        assert program == "torchmem"
        done = run(folder, "-m", "pytest_torchmem", *arguments)
        assert done.returncode == 0, done.stderr
        assert output in ("", done.stdout)
    if left_out:
        pytest.skip("the others need torch's CUDA build: torchmem simulate --fetch")


def test_the_failure_that_is_explained_is_a_real_one(tmp_path):
    require_the_pinned_torch_on_a_cpu()
    real = iter(fail_as_the_guide_does(tmp_path).splitlines())
    (shown,) = blocks(DOCS / "failures.md", "text")
    missing = [line for line in shown.splitlines() if line not in ("", "...") and line not in real]
    assert missing == []


@pytest.mark.nightly
def test_the_site_is_built_without_a_warning(tmp_path):
    for package in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(package)
    done = run(ROOT, "-m", "sphinx", "-W", "--keep-going", "-q", DOCS, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = [p.name for p in tmp_path.glob("*.html") if 'src="http' in p.read_text("utf-8")]
    assert loaded == [], "the site is read offline, too"


def test_a_block_that_is_not_run_would_be_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = Net()\n```\n")
    assert blocks(page, "python") == ["x = Net()\n"]
    assert runnable(page) == []
