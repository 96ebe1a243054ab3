"""The rows of a baseline file: written as text, and the same as JSON would be."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.judge.environments import complete
from pytest_torchmem.store.baseline_file import FileChanges, read_file, write_file
from pytest_torchmem.store.baseline_rows import entry_lines, row_lines, rows_of
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)

CPU = complete({"device": "cpu", "torch": "2.13"})
SIZES = st.integers(0, 1 << 50)
AMOUNTS = st.builds(CategoryBytes.of, st.dictionaries(st.sampled_from(Category), SIZES))
CONTRIBUTORS = st.builds(
    Contributor,
    st.sampled_from(Category),
    SIZES,
    st.integers(1, 1000),
    st.text(),
    st.text(),
    st.none() | st.builds(Source, st.text(), st.integers(0, 99999), st.text()),
    st.sampled_from(Phase),
)
MANY = st.lists(CONTRIBUTORS, max_size=3).map(tuple)
ENTRIES = st.builds(BaselineEntry, SIZES, AMOUNTS, AMOUNTS, MANY, AMOUNTS, MANY)


@given(st.text(min_size=1), ENTRIES)
def test_the_text_of_an_entry_is_what_json_makes_of_its_rows(key, entry):
    assert entry_lines(key, entry) == row_lines(key, rows_of(key, entry.to_json()))
    rows = [json.loads(line[:-1]) for line in entry_lines(key, entry)]
    assert rows == list(rows_of(key, entry.to_json()))[: len(rows)]


def test_a_key_that_somebody_spelled_with_escapes_is_the_same_key(tmp_path):
    path = tmp_path / "a.json"
    amounts = CategoryBytes(activation=5)
    live = (Contributor(Category.ACTIVATION, 5, 1, "aten::mm", "net", None, Phase.FORWARD),)
    write_file(path, CPU, FileChanges({"test_ü": BaselineEntry(5, amounts, amounts, live)}))
    plain = path.read_text(encoding="utf-8")
    path.write_text(plain.replace("ü", "\\u00fc"), encoding="utf-8")
    assert "ü" not in path.read_text(encoding="utf-8")
    entry = read_file(path, CPU).entry("test_ü", path)
    assert (entry.total, tuple(entry.live)) == (5, live)
    write_file(path, CPU, FileChanges({"test_b": BaselineEntry(5, amounts, amounts)}))
    assert all(line in path.read_text(encoding="utf-8") for line in plain.splitlines())
