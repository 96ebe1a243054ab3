"""Results in files, one for each rank, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pytest_torchmem import MiB, Ranks, load, measure, save
from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.analysis.estimated.static import lifetimes_by_last_use
from pytest_torchmem.cli.main import Exit, main
from pytest_torchmem.record.environment import current_rank, environment
from pytest_torchmem.store.run_reports import FORMAT, merged, read_run
from pytest_torchmem.values.baseline import environment_name
from pytest_torchmem.values.errors import RankError, RecordingError, ReportError
from pytest_torchmem.values.measured import Rank
from pytest_torchmem.values.static_graph import (
    NodeKind,
    StaticGraph,
    StaticNode,
    StaticRun,
    StaticStorage,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Not a rank of whoever runs these tests, and in a folder of its own."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def as_rank(monkeypatch):
    def become(number, count):
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", str(count))

    return become


def block_of(mib, name="step"):
    with measure(name, device="cpu") as block:
        torch.ones(mib * MiB // 4)
        with block.region("part"):
            torch.ones(MiB // 4)
    return block


def save_ranks(as_rank, sizes, path="mem.json"):
    for number, mib in enumerate(sizes):
        as_rank(number, len(sizes))
        block_of(mib).save(path)


def test_a_block_comes_back_as_it_was():
    block = block_of(3)
    assert block.save("folder/mem.json") == Path("folder/mem.json")
    loaded = load("folder/mem.json")
    assert list(loaded) == ["step", "step::part"]  # type: ignore[arg-type]
    assert loaded["step"].peak.by_category == block.peak.by_category
    assert loaded["step"].retained == block.retained
    assert (loaded["step"].name, loaded["step::part"].name) == ("step", "part")
    assert loaded["step::part"].peak.total == 1 * MiB


def test_a_file_says_its_format_and_where_it_is_from():
    block_of(1).save("mem.json")
    data = json.loads(Path("mem.json").read_text(encoding="utf-8"))
    assert data["format"] == FORMAT
    assert (data["rank"], data["rank_count"]) == (0, 1)
    assert data["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    source = data["tests"][0]["windows"][0]["result"]["peak"]["live"][0]["source"]
    assert source[0].endswith("measuring/test_saving.py")
    assert not source[0].startswith("/")


def test_output_writes_a_file_and_does_so_before_a_limit_raises():
    with (
        pytest.raises(AssertionError),
        measure("step", total="1B", output="mem.json", device="cpu"),
    ):
        torch.ones(MiB // 4)
    assert load("mem.json")["step"].peak.total == 1 * MiB


def test_results_of_calls_are_numbered_in_a_file():
    @measure(device="cpu")
    def work(mib):
        torch.ones(mib * MiB // 4)

    for mib in (2, 1):
        work(mib)
    save("mem.json", work.results)
    found = {name: result.peak.total for name, result in load("mem.json").items()}
    assert found == {"work": 2 * MiB, "work (2)": 1 * MiB}


def test_an_estimate_stays_one_in_a_file(capsys):
    node = StaticNode("x", NodeKind.INPUT, makes=(0,))
    graph = StaticGraph((node,), (StaticStorage(10, "cpu"),))
    save("mem.json", [Estimate.of(StaticRun(graph, lifetimes_by_last_use(graph), "cpu"))])
    assert load("mem.json")["measured"].estimated
    assert main(["show", "mem.json"]) == Exit.OK
    assert "(estimated)" in capsys.readouterr().out


def test_a_file_of_ours_is_one_that_the_command_reads(capsys):
    block_of(3).save("one.json")
    block_of(5).save("two.json")
    assert main(["show", "one.json"]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines[:2]] == [
        ["3.0 MiB", "step"],
        ["1.0 MiB", "step::part"],
    ]
    assert main(["show", "one.json", "step"]) == Exit.OK
    assert "footprint, change by change:" in capsys.readouterr().out
    assert main(["diff", "one.json", "two.json"]) == Exit.GROWN
    assert "grown   step  3.0 MiB -> 5.0 MiB" in capsys.readouterr().out


def test_a_file_that_is_not_there_or_damaged_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"absent\.json cannot be read"):
        load("absent.json")
    block_of(1).save("mem.json")
    text = (tmp_path / "mem.json").read_text(encoding="utf-8")
    (tmp_path / "mem.json").write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ReportError, match=r"mem\.json cannot be read"):
        load("mem.json")
    (tmp_path / "mem.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ReportError, match="no results file"):
        load("mem.json")
    with pytest.raises(ReportError, match="cannot be written"):
        block_of(1).save("mem.json/below.json")
    assert [path.name for path in tmp_path.iterdir()] == ["mem.json"]


def test_a_process_alone_is_the_only_rank():
    assert current_rank() == Rank(0, 1)


def test_the_files_of_all_ranks_become_their_results(as_rank, tmp_path):
    save_ranks(as_rank, (2, 5, 3))
    for paths in ("mem-rank*.json", tmp_path, sorted(tmp_path.glob("*"), reverse=True)):
        ranks = Ranks.load(paths)
        assert (len(ranks), ranks.largest.rank, ranks.spread_bytes) == (3, 1, 3 * MiB)
    assert Ranks.load("mem-rank*.json", "step::part").spread_bytes == 0


def test_the_command_tells_ranks_apart(as_rank, tmp_path, capsys):
    save_ranks(as_rank, (2, 2), "before/mem.json")
    save_ranks(as_rank, (2, 5), "after/mem.json")
    assert main(["diff", "before", "after"]) == Exit.GROWN
    told = capsys.readouterr().out
    assert told.count("grown   step  2.0 MiB -> 5.0 MiB") == 1
    assert told.endswith("1 grown, 3 same\n")
    assert main(["show", "after"]) == Exit.OK
    assert "5.0 MiB  step on cpu, rank 1 of 2," in capsys.readouterr().out
    files = [str(path) for path in sorted((tmp_path / "after").iterdir())]
    assert main(["report", *files, "-o", "all.json"]) == Exit.OK
    assert list(load("all.json")) == [  # type: ignore[arg-type]
        f"step [rank {n} of 2]{part}" for n in (0, 1) for part in ("", "::part")
    ]


def test_shards_of_one_rank_still_count_a_test_once():
    run = read_run(block_of(1).save("mem.json"))
    assert len(merged([run, run]).tests) == 1


def test_files_that_are_not_those_of_one_job_are_refused(as_rank, tmp_path):
    save_ranks(as_rank, (1, 1))
    (tmp_path / "again.json").write_bytes((tmp_path / "mem-rank1.json").read_bytes())
    with pytest.raises(RankError, match="are both of rank 1"):
        Ranks.load(tmp_path)
    (tmp_path / "again.json").unlink()
    as_rank(2, 3)
    block_of(1).save("mem.json")
    with pytest.raises(RankError, match="jobs of different sizes"):
        Ranks.load("mem-rank*.json")
    with pytest.raises(RankError, match="of 3 ranks there is no file of rank 0, 1"):
        Ranks.load("mem-rank2.json")
    with pytest.raises(RankError, match="there is no file in 'none-\\*'"):
        Ranks.load("none-*")
    with pytest.raises(ReportError, match="cannot be read"):
        Ranks.load("none.json")


def test_a_result_is_asked_for_by_name_where_a_file_has_several():
    save("mem.json", [block_of(1, "one").result, block_of(2, "two").result])
    with pytest.raises(RankError, match="more than one result, and no name given; it has one, two"):
        Ranks.load("mem.json")
    with pytest.raises(RankError, match="no result called 'three'"):
        Ranks.load("mem.json", "three")
    assert Ranks.load("mem.json", "two").largest.result.peak.total == 2 * MiB


def test_a_process_alone_gathers_its_own_result():
    block = block_of(2)
    for measured in (block, block.result):
        assert Ranks.gather(measured).results == (block.result,)
    with pytest.raises(RecordingError, match="nothing has been measured"):
        Ranks.gather(measure())


def test_gathering_without_a_process_group_is_an_error_in_a_job(as_rank):
    as_rank(1, 2)
    with pytest.raises(RankError, match="rank 1 of 2, and there is no process group"):
        Ranks.gather(block_of(1))


def test_each_rank_has_baselines_of_its_own(as_rank):
    assert "rank" not in environment("cpu")
    as_rank(1, 2)
    assert environment("cpu")["rank"] == "1 of 2"
    assert environment_name(environment("cpu")).endswith("-rank1of2")
