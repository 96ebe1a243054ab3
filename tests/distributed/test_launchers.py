"""However two ranks are started, they read the same: with torchrun, and again with mp.spawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SEES_THREADS, TORCHRUN, needs_gloo, run
from test_jobs import JOB, job_of
from training import RANKS

LAUNCHERS = {"spawn": (), "torchrun": TORCHRUN}

pytestmark = [pytest.mark.slow, pytest.mark.nightly, needs_gloo]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Path]:
    """What finished jobs left behind, by how their ranks were started."""
    places = {name: tmp_path_factory.mktemp(name) for name in LAUNCHERS}
    for name, place in places.items():
        done = run(*LAUNCHERS[name], JOB, place)
        assert done.returncode == 0, done.stderr
    return places


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_reads_the_same_in_two_jobs(jobs, rank):
    one, other = (job_of(place, "ddp").of(rank) for place in jobs.values())
    assert one.peak.by_category == other.peak.by_category
    assert (one.peak.total, one.retained) == (other.peak.total, other.retained)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_sharded_rank_reads_the_same_in_two_jobs(jobs, rank):
    one, other = (job_of(place, "fsdp").of(rank) for place in jobs.values())
    if SEES_THREADS:
        assert one.peak.by_category == other.peak.by_category
        assert (one.peak.total, one.retained) == (other.peak.total, other.retained)
    # Elsewhere gloo's own thread lets go of full parameters and gradients in its own time.
    for category in ("parameter", "optimizer_state", "activation", "buffer"):
        assert one.peak.by_category[category] == other.peak.by_category[category]
