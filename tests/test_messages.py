"""Every slug that a message can end with is explained in docs/messages.md."""

from pathlib import Path

from pytest_torchmem.analysis import caching_allocator  # noqa: F401, so are its errors
from pytest_torchmem.analysis.judge.verdict import SLUGS
from pytest_torchmem.values import errors, static_graph  # noqa: F401, so are its errors

MESSAGES = Path(__file__).parent.parent / "docs" / "messages.md"


def slugs():
    waiting, found = [errors.TorchmemError], {*SLUGS, "no-baseline"}
    while waiting:
        error = waiting.pop()
        waiting += error.__subclasses__()
        found.add(error.slug)
    return found - {errors.TorchmemError.slug}


def test_an_error_defined_elsewhere_counts():
    assert {"bad-allocator-settings", "bad-requests", "not-estimated"} <= slugs()


def test_each_slug_is_a_heading_of_the_page():
    text = MESSAGES.read_text(encoding="utf-8")
    headings = {line[3:].strip() for line in text.splitlines() if line.startswith("## ")}
    assert headings == slugs()


def test_an_error_ends_with_its_slug():
    assert str(errors.SizeError("what happened")) == "what happened [bad-size]"
