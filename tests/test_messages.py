"""Every slug that a message can end with is explained in docs/messages.md."""

from pathlib import Path

from pytest_torchmem import errors
from pytest_torchmem.analysis.verdict import SLUGS

MESSAGES = Path(__file__).parent.parent / "docs" / "messages.md"


def slugs():
    found = {*SLUGS, "no-baseline"}
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.TorchmemError):
            found.add(value.slug)
    return found - {errors.TorchmemError.slug}


def test_each_slug_is_a_heading_of_the_page():
    text = MESSAGES.read_text(encoding="utf-8")
    headings = {line[3:].strip() for line in text.splitlines() if line.startswith("## ")}
    assert headings == slugs()


def test_an_error_ends_with_its_slug():
    assert str(errors.SizeError("what happened")) == "what happened [bad-size]"
