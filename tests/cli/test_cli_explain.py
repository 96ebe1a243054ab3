"""``torchmem explain``: what it prints and what it ends with."""

from __future__ import annotations

import json

import pytest

from pytest_torchmem.cli.main import Exit
from pytest_torchmem.values.trace import Ownership
from pytest_torchmem.values.units import MiB
from tests.builders import TraceBuilder


@pytest.fixture
def trace(tmp_path):
    """A weight of 1 MiB from before; 30 MiB that are freed before 20 MiB come."""
    b = TraceBuilder()
    weight = b.existing(MiB, Ownership.PARAMETER)
    with b.module(1, "Net"), b.op("aten::mm", reads=[weight]):
        scratch = b.alloc(30 * MiB)
    b.free(scratch)
    b.alloc(20 * MiB)
    path = tmp_path / "step.npz"
    b.build().save(path)
    return path


def test_a_trace_is_told_storage_by_storage(command, trace):
    code, out, _ = command("explain", trace)
    assert code == Exit.OK
    head, *rows, last = out.splitlines()
    assert head.split()[:4] == ["born", "died", "size", "category"]
    assert [row.split()[2:5] for row in rows] == [
        ["1.0", "MiB", "parameter"],
        ["30.0", "MiB", "temporary"],
        ["20.0", "MiB", "temporary"],
    ]
    assert rows[0].split()[:2] == ["before", "never"]
    assert "a module or an optimizer holds it as a parameter" in rows[0]
    assert "aten::mm" in rows[1]
    assert "Net" in rows[1]
    assert last == "3 storages, 51.0 MiB together; times in milliseconds"


def test_category_module_and_moment_choose(command, trace):
    def sizes(*options):
        _, out, _ = command("explain", trace, "--format=json", *options)
        return [row["bytes"] // MiB for row in json.loads(out)]

    assert sizes("--category", "temporary") == [30, 20]
    assert sizes("--module", "Net") == [30]
    assert sizes("--at", "peak") == [1, 30]
    assert sizes("--at", "0") == [1]
    assert sizes("--at", "1000") == [1, 20]


PASS = """
from pytest_torchmem import Category
from pytest_torchmem.hooks import StorageClaim

def cache(storages):
    return [StorageClaim(s, Category.BUFFER, "the cache") for s in storages if s.born_ns]

def broken(storages):
    raise ValueError("no layers")
"""


def test_a_pass_of_the_user_is_told_as_ours_are(command, trace, tmp_path):
    (tmp_path / "own.py").write_text(PASS)
    _, out, _ = command("explain", trace, "--pass", f"{tmp_path}/own.py:cache", "--format=json")
    assert [row["decided_by"] for row in json.loads(out)] == ["parameters", "cache", "cache"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("own.py:broken", "broken raised ValueError: no layers"),
        ("own.py:gone", "there is no function 'gone'"),
        ("gone.py:cache", "--pass takes a file and a function"),
        ("cache", "--pass takes a file and a function"),
        ("torn.py:cache", "SyntaxError"),
    ],
)
def test_a_pass_that_cannot_be_used_ends_the_command(command, trace, tmp_path, place, said):
    (tmp_path / "own.py").write_text(PASS)
    (tmp_path / "torn.py").write_text("def cache(:")
    code, _, err = command("explain", trace, "--pass", f"{tmp_path}/{place}")
    assert code == Exit.BAD_INPUT
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_time_can_be_copied_from_the_columns(command, trace):
    _, out, _ = command("explain", trace, "--category", "temporary")
    born, died = out.splitlines()[1].split()[:2]
    assert "30.0 MiB" in command("explain", trace, "--at", born)[1]
    assert "30.0 MiB" not in command("explain", trace, "--at", died)[1]


def test_a_results_file_is_refused_with_the_way_to_a_recording(command, tmp_path):
    path = tmp_path / "run.json"
    path.write_text("{}")
    code, _, err = command("explain", path)
    assert code == Exit.BAD_INPUT
    assert "is no recording" in err
    assert "save_trace" in err
    assert err.rstrip().endswith("[bad-trace]")


def test_a_file_that_is_not_there_is_said_to_be_missing(command, tmp_path):
    code, _, err = command("explain", tmp_path / "gone.npz")
    assert code == Exit.BAD_INPUT
    assert err.rstrip().endswith("as a trace: No such file or directory [bad-trace]")


def test_a_moment_that_means_nothing_is_bad_input(command, trace):
    code, _, err = command("explain", trace, "--at", "end")
    assert code == Exit.BAD_INPUT
    assert "--at takes 'peak' or a time in milliseconds" in err
