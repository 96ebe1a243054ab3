"""Every slug that a message can end with is explained in docs/messages.md."""

import re
from pathlib import Path

from pytest_torchmem.store.baseline_file import FORMAT
from pytest_torchmem.values import errors
from pytest_torchmem.values.findings import FindingKind

PACKAGE = Path(errors.__file__).parent.parent
MESSAGES = Path(__file__).parent.parent / "docs" / "messages.md"


def slugs():
    waiting, found = [errors.TorchmemError], {kind.value for kind in FindingKind}
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        found.add(error.slug)
    return found - {errors.TorchmemError.slug}


def test_every_slug_of_an_error_stands_in_one_file():
    others = [file for file in PACKAGE.rglob("*.py") if file.name != "errors.py"]
    assert not [file for file in others if re.search(r"^class .*\bslug=", file.read_text(), re.M)]


def test_each_slug_is_a_heading_of_the_page():
    text = MESSAGES.read_text(encoding="utf-8")
    headings = {line[3:].strip() for line in text.splitlines() if line.startswith("## ")}
    assert headings == slugs()


def test_an_error_ends_with_its_slug():
    assert str(errors.SizeError("what happened")) == "what happened [bad-size]"


def test_the_page_of_baselines_names_the_format_that_is_written():
    page = (MESSAGES.parent / "baseline-format.md").read_text(encoding="utf-8")
    numbers = re.findall(r'(?:"format":|format above has the number) (\d+)', page)
    assert numbers == [str(FORMAT)] * 2
