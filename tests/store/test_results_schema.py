"""docs/results-schema.md has every key that a results file has, where it is, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pytest_torchmem.store.run_reports import RunReport, render_run
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.measured import BaselineChange
from pytest_torchmem.values.picture import Blocks
from pytest_torchmem.values.results import Fate, Holder
from tests.documents import DOCS
from tests.report.sample_run import on_gpu, report_of, sample_run

PAGE = (DOCS / "results-schema.md").read_text(encoding="utf-8")
SECTIONS = {
    title.strip(): text
    for title, text in re.findall(r"^#+ (.+)\n((?:(?!^#).*\n)*)", PAGE, re.MULTILINE)
}


def written() -> dict[str, Any]:
    """A results file with something of every kind in it, as a reader gets it."""
    run = sample_run()
    (first, *others), counters = run.tests, report_of("test_on_gpu", on_gpu("test_on_gpu"))
    body = first.windows[0]
    holder = Holder(1, 1, Fate.HELD, "model.last")
    retained = replace(body.result.retained, holders=(holder,))
    result = replace(body.result, retained=retained, counters=on_gpu("").result.counters)
    change = BaselineChange("x.json", "test_a", Change.GROWN, 1, 2, True)
    tests = (replace(first, windows=(replace(body, result=result),)), *others, counters)
    whole: RunReport = replace(run, tests=tests, changes=(change,))
    parsed: dict[str, Any] = json.loads(render_run(whole))
    return parsed


def values() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of value in a results file, and the section that describes its keys in a table."""
    run = written()
    body = run["tests"][0]["windows"][0]
    yield "The results file", run
    yield "A test", run["tests"][0]
    yield "A window", body
    yield "A result", body["result"]
    yield "A picture", body["picture"]
    yield "The blocks of a picture", Blocks().to_json()


def parts() -> Iterator[tuple[str, dict[str, Any]]]:
    """Values within those, whose keys stand in the text of a section."""
    run = written()
    body = run["tests"][0]["windows"][0]
    result, picture = body["result"], body["picture"]
    yield "The results file", run["changes"][0]
    yield "A result", result["peak"]
    yield "A result", result["peak"]["live"][0]
    yield "A result", result["retained"]
    yield "A result", result["retained"]["holders"][0]
    yield "A result", result["counters"]
    yield "A picture", picture["tracks"][0]


def keys_of_table(text: str) -> list[str]:
    cells = re.findall(r"^\| (`[^|]*) \|", text, re.MULTILINE)
    return [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(("section", "value"), list(values()))
def test_a_table_has_the_keys_that_are_written_and_no_other(section, value):
    assert sorted(keys_of_table(SECTIONS[section])) == sorted(value)


@pytest.mark.parametrize(("section", "value"), list(parts()))
def test_the_keys_of_a_part_are_named_where_the_part_is(section, value):
    assert [key for key in value if f"`{key}`" not in SECTIONS[section]] == []


def test_a_key_that_is_missing_or_too_many_would_be_noticed():
    table = "| Key | What it is |\n|---|---|\n| `a`, `b` | one |\n| `c` | with `d` |\n"
    assert keys_of_table(table) == ["a", "b", "c"]
