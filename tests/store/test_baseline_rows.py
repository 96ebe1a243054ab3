"""The rows of a baseline file: read back as they were written, whatever is in them."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.store.baseline_file import read_file
from pytest_torchmem.store.baseline_rows import WIDTH, sentence_of
from pytest_torchmem.store.baselines import FileChanges, write_file
from pytest_torchmem.values.baseline import BaselineEntry, Numbers, Reserved, complete
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
KEYS = st.text(st.characters(), min_size=1)  # also half a surrogate pair


@st.composite
def entries(draw):
    at_peak = draw(AMOUNTS)
    return BaselineEntry(
        at_peak.total, at_peak, draw(AMOUNTS), *draw(st.tuples(MANY, AMOUNTS, MANY, MANY))
    )


@pytest.mark.slow
@settings(deadline=None)
@given(st.dictionaries(KEYS, entries(), min_size=1, max_size=3))
def test_whatever_is_written_is_read_back_and_written_as_it_was(stored):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.json"
        write_file(path, CPU, FileChanges(stored))
        texts = path.read_bytes(), path.with_suffix(".origins").read_bytes()
        found = read_file(path, CPU)
        assert {key: found.entry(key, path) for key in found.lines} == stored
        write_file(path, CPU, FileChanges())
        assert (path.read_bytes(), path.with_suffix(".origins").read_bytes()) == texts


def test_the_sizes_for_people_name_what_is_largest_as_far_as_there_is_room():
    numbers = Numbers(
        20 << 20, CategoryBytes(parameter=4 << 20, activation=12 << 20, temporary=1363148), 4 << 20
    )
    assert sentence_of(numbers, WIDTH) == (
        "20.0 MiB: activation 12.0 MiB, parameter 4.0 MiB, temporary 1.3 MiB; 4.0 MiB retained"
    )
    assert sentence_of(numbers, 60) == "20.0 MiB: activation 12.0 MiB; 4.0 MiB retained"
    assert sentence_of(numbers, 30) == "20.0 MiB; 4.0 MiB retained"


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


def test_what_a_simulated_gpu_reserved_has_a_row_of_its_own(tmp_path):
    path, amounts = tmp_path / "a.json", CategoryBytes(activation=5)
    entry = BaselineEntry(5, amounts, amounts, reserved=Reserved(7, 3))
    write_file(
        path, CPU, FileChanges({"test_a": entry, "test_b": BaselineEntry(5, amounts, amounts)})
    )
    rows = [line for line in path.read_text().split("\n") if '"reserved"' in line]
    assert rows == ['["test_a", "reserved", 7, 3],']
    text = path.read_bytes()
    assert read_file(path, CPU).entry("test_a", path).reserved == Reserved(7, 3)
    assert read_file(path, CPU).entry("test_b", path).reserved == Reserved()
    write_file(path, CPU, FileChanges())
    assert path.read_bytes() == text
