"""Two ranks on the CPU, DDP and FSDP2, started with mp.spawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import needs_gloo, run
from training import BATCH, LAYERS, PARAMETER_BYTES, RANKS, WIDTH

from pytest_torchmem import MiB, Ranks
from pytest_torchmem.types import LimitError

JOB = Path(__file__).with_name("training.py")
ABORTED = "terminate called without an active exception"

pytestmark = [pytest.mark.slow, needs_gloo]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What a finished job left behind."""
    folder = tmp_path_factory.mktemp("spawn")
    done = run(JOB, folder)
    # Rarely a process aborts when its work is done and Python ends, as it does without us: a thread
    # of gloo's still runs (pytorch/pytorch#190489). What it wrote is whole by then.
    assert done.returncode == 0 or ABORTED in done.stderr, done.stderr
    return folder


def job_of(folder: Path, name: str) -> Ranks:
    return Ranks.load(folder / f"{name}-rank*.json")


def test_each_rank_leaves_a_file(folder):
    assert len(job_of(folder, "ddp")) == RANKS


def test_ranks_under_ddp_need_the_same(folder):
    ranks = job_of(folder, "ddp")
    assert ranks.spread_bytes == 0
    assert ranks.of(0).peak.by_category == ranks.of(1).peak.by_category
    ranks.check(spread=0)


def test_ddp_holds_all_parameters_and_all_of_the_state(folder):
    for one in job_of(folder, "ddp"):
        peak = one.result.peak
        assert peak.parameter == PARAMETER_BYTES
        # In `.grad`, and in the buckets that were there before the block.
        assert peak.gradient == 2 * PARAMETER_BYTES
        assert one.result.blind_spots == ()
        # Two moments; the step counters of AdamW are a few bytes each.
        assert peak.optimizer_state == 2 * PARAMETER_BYTES + 4 * LAYERS
        assert peak.total > 5 * PARAMETER_BYTES
        assert peak.activation == LAYERS * BATCH * WIDTH * 4


def test_fsdp_holds_half_of_the_parameters_and_of_the_state(folder):
    for one in job_of(folder, "fsdp"):
        peak = one.result.peak
        assert peak.parameter == PARAMETER_BYTES // RANKS
        assert peak.optimizer_state == 2 * PARAMETER_BYTES // RANKS + 4 * LAYERS


def test_the_rank_with_more_work_is_the_largest(folder):
    ranks = job_of(folder, "fsdp")
    assert ranks.of(1).peak.activation == 2 * ranks.of(0).peak.activation
    assert ranks.largest.rank == 1
    assert ranks.spread_bytes >= BATCH * WIDTH * 4
    with pytest.raises(LimitError, match=r"^rank 1 of 2 peaked at .* and rank 0 at .*training\.py"):
        ranks.check(spread=0)


def test_gathering_results_is_no_part_of_a_measurement(folder):
    for rank in range(RANKS):
        noted = json.loads((folder / f"exchange-rank{rank}.json").read_text())
        assert noted["peaks"] == [1 * MiB] * RANKS
        assert noted["gathered"] == 2  # one tensor, made and freed
        assert noted["recorded"] > 2
