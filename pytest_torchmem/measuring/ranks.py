"""The results of all ranks of a job, which exchange them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from pytest_torchmem.values.errors import RankError, RecordingError
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import Rank
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.analysis.judge.rank_results import RankResults
    from pytest_torchmem.measuring.block import Measure
    from pytest_torchmem.measuring.body_measurement import Region
    from pytest_torchmem.record.environment import ProcessGroup


def gather_ranks(
    measured: Result | Measure | Region, group: ProcessGroup | None = None
) -> RankResults:
    """Return what every rank measured; all ranks of the process group have to call it.

    ``measured`` is a result, or a block or region that is over. Exchanging the results is no part
    of a measurement that is still going on. A process alone gets its own result. Raises
    `RankError` when a rank has no result, and in a job of several ranks without a process group.
    """
    from pytest_torchmem.analysis.judge.rank_results import RankResults
    from pytest_torchmem.measuring.body_measurement import running
    from pytest_torchmem.record.environment import group_rank
    from pytest_torchmem.record.torch_api.distributed import gather

    found = group_rank(group)
    if found is None:
        if (rank := Rank.launched()).count > 1:
            raise RankError(
                f"this is {rank}, and there is no process group to gather results with: call "
                "torch.distributed.init_process_group() first, or save a file for each rank and "
                "read them with load_ranks"
            )
        return RankResults((_result(measured),))
    if found[0] < 0:
        raise RankError("this process is not in the group whose results are gathered")
    # A rank without a result must take part, too: the others would wait for it.
    mine: dict[str, Json]
    try:
        mine = {"result": _result(measured).to_json()}
    except RecordingError as error:
        mine = {"missing": str(error)}
    measurement = running()
    with measurement.paused() if measurement else nullcontext():
        gathered = gather(mine, group)
    for rank_number, data in enumerate(gathered):
        if "missing" in data:
            raise RankError(f"rank {rank_number} has no result: {data['missing']}")
    return RankResults([Result.from_json(data["result"]) for data in gathered])


def _result(measured: Result | Measure | Region) -> Result:
    return measured if isinstance(measured, Result) else measured.result
