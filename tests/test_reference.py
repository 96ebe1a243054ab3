"""The reference has each option, key and public name as the code has them, and no other."""

from __future__ import annotations

import re

import pytest

import pytest_torchmem
from pytest_torchmem.plugin.item.fixture import Torchmem
from pytest_torchmem.plugin.options.option_table import MARKERS, OPTIONS
from tests.documents import DOCS
from tools.reference import PAGE, option_row, options_page

MARKERS_PAGE = (DOCS / "markers.md").read_text(encoding="utf-8")
API_PAGE = (DOCS / "api.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return MARKERS_PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """Return what stands in code font in the first column of the tables in ``text``."""
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_the_page_of_options_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == options_page(), "run python tools/reference.py"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_a_default_is_told_once(option) -> None:
    _, _, default, what = option_row(option)
    assert "default" not in what
    assert "|" not in default + what


def test_the_options_are_those_that_pytest_knows(pytester: pytest.Pytester) -> None:
    told = pytester.runpytest_inprocess("--help", "-p", "no:cacheprovider").stdout.str()
    flags = set(re.findall(r"^  (--torchmem[a-z-]*)", told, re.MULTILINE))
    names = set(re.findall(r"^  (torchmem_[a-z_]+) \(", told, re.MULTILINE))
    assert flags == {option.flag for option in OPTIONS if option.is_typed}
    assert names == {option.ini for option in OPTIONS if option.is_setting}


@pytest.mark.parametrize("registered", MARKERS)
def test_every_key_of_a_marker_is_in_its_table_and_no_other(registered: str) -> None:
    name, _, signature = registered.partition(":")[0].partition("(")
    keys = [key.strip() for key in signature.rstrip(")").split(",") if key.strip() != "*"]
    text = section("Markers")
    start = text.index(f"`@pytest.mark.{name}(")
    table = text[start:].partition("\n\n`@pytest.mark.")[0]
    assert sorted(first_cells(table)) == sorted(keys)


def test_every_name_of_the_fixture_is_in_the_table_and_no_other() -> None:
    public = {name for name in vars(Torchmem) if not name.startswith("_")}
    told = re.findall(r"torchmem\.(\w+)", " ".join(first_cells(section("The fixture"))))
    assert sorted(told) == sorted(public)


def test_every_public_name_is_on_the_page_of_the_api_and_no_other() -> None:
    told = re.findall(r"^\.\. auto\w+:: pytest_torchmem\.(\w+)(?:\(\))?$", API_PAGE, re.MULTILINE)
    assert sorted(told) == sorted(set(pytest_torchmem.__all__) - {"__version__"})
