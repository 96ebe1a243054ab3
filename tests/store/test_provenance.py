"""The rank of a process, and the names of its files."""

import pytest

from pytest_torchmem.store.run_reports import path_of_rank
from pytest_torchmem.values.measured import Rank


def test_who_a_process_is_comes_from_its_launcher():
    assert Rank.launched({"RANK": "1", "WORLD_SIZE": "4"}) == Rank(1, 4)
    for nonsense in ({}, {"RANK": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        assert Rank.launched(nonsense) == Rank(0, 1)
    assert Rank.launched({"RANK": "2", "WORLD_SIZE": "2"}) == Rank(0, 1)


@pytest.mark.parametrize(
    ("path", "rank", "expected"),
    [
        ("mem.json", Rank(), "mem.json"),
        ("mem.json", Rank(1, 2), "mem-rank1.json"),
        ("runs/report", Rank(1, 2), "runs/report-rank1"),
        ("{rank}/mem.json", Rank(1, 2), "1/mem.json"),
        ("mem.{rank}.json", Rank(), "mem.0.json"),
    ],
)
def test_no_two_ranks_have_a_file_in_common(path, rank, expected):
    assert path_of_rank(path, rank).as_posix() == expected
