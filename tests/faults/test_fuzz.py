"""Damaged inputs by the thousand: a value or our own error, soon, and without much memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pytest_torchmem.values.errors import TorchmemError
from tests.faults.readers import READERS, Hung, Reader, every_reader, fuzz, peak_mib

pytestmark = pytest.mark.slow

FEW, MANY = 120, 10_000
FIRST = int(os.environ.get("TORCHMEM_FUZZ_SEED", "0"))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_input_gives_a_value_or_one_clear_error(name: str, tmp_path: Path) -> None:
    outcomes = fuzz(every_reader(tmp_path)[name], tmp_path, range(FIRST, FIRST + FEW))
    assert outcomes.values + outcomes.refused == FEW
    assert outcomes.values, "no input was whole enough to be read"


@pytest.mark.nightly
@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_damaged_inputs_give_a_value_or_one_clear_error(
    name: str, tmp_path: Path
) -> None:
    before = peak_mib()
    reader = every_reader(tmp_path)[name]
    fuzz(reader, tmp_path, range(FIRST, FIRST + 20))  # what is loaded once
    start = peak_mib()
    outcomes = fuzz(reader, tmp_path, range(FIRST, FIRST + MANY))
    print(f"{name}: {outcomes}, {start - before:.0f} + {peak_mib() - start:.0f} MiB")
    assert outcomes.values + outcomes.refused == MANY
    assert peak_mib() - start < 100


def test_another_exception_or_a_reader_that_hangs_would_be_noticed(tmp_path: Path) -> None:
    def hangs(folder: Path, value: object) -> object:
        while True:
            pass

    def raises(folder: Path, value: object) -> object:
        raise (TorchmemError("bad") if value else KeyError("x"))

    with pytest.raises(Hung):
        fuzz(Reader(lambda _: 0, hangs), tmp_path, range(1))
    with pytest.raises(KeyError):
        fuzz(Reader(lambda _: 0, raises), tmp_path, range(1))
    assert fuzz(Reader(lambda _: 1, raises), tmp_path, range(3)).refused == 3
