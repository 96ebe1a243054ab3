"""Threads that the profiler does not see: their memory is missing, and the result says so."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest
import torch

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.measuring.body import BodyMeasurement
from pytest_torchmem.record.patches import threads
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.findings import FindingKind
from pytest_torchmem.values.results import Result

SIZE = 1 << 16
KEPT: list[torch.Tensor] = []


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    KEPT.clear()


def measured(body: Callable[[], object]) -> Result:
    measurement = BodyMeasurement("cpu")
    measurement.start()
    try:
        torch.ones(16)
        body()
    finally:
        result = measurement.stop()
    return result


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()


def test_a_body_without_threads_has_no_blind_spot():
    layer = torch.nn.Linear(8, 8)
    result = measured(lambda: layer(torch.ones(2, 8)).sum().backward())
    assert (result.blind_spots, result.unexplained_bytes) == ((), 0)


def test_a_thread_that_runs_torch_is_named():
    (spot,) = measured(lambda: in_thread(lambda: torch.ones(SIZE).sum())).blind_spots
    assert "other threads" in spot
    assert "loader" in spot


def test_a_module_called_on_a_thread_is_noticed():
    layer = torch.nn.Linear(8, 8)
    x = torch.ones(2, 8)
    assert measured(lambda: in_thread(lambda: layer(x))).blind_spots


def test_a_thread_without_torch_is_nobodys_business():
    assert measured(lambda: in_thread(lambda: sum(map(int, range(1000))))).blind_spots == ()


def test_a_pool_that_was_there_before_is_noticed():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        used, *ran = measured(lambda: pool.submit(torch.ones, SIZE).result().sum()).blind_spots
        assert "another thread made it" in used
        # Before torch 2.8 nobody's calls are known while a pool lives that was measured before.
        if profiler.KEEPS_COUNT or ran:
            assert "from before the body ran torch" in ran[0]
        assert measured(lambda: pool.submit(sum, range(9)).result()).blind_spots == ()


def test_reading_regions_one_after_the_other_is_no_other_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        measurement = BodyMeasurement("cpu")
        measurement.start()
        regions = []
        for name in ("one", "two"):
            with measurement.region(name) as region:
                torch.ones(SIZE)
            regions.append(region)
        assert [region.peak.total for region in regions] == [4 * SIZE] * 2
        assert measurement.stop().blind_spots == ()


def test_what_another_thread_made_and_left_alive_is_counted_as_unexplained():
    result = measured(lambda: in_thread(lambda: KEPT.append(torch.ones(SIZE))))
    assert result.unexplained_bytes == 4 * SIZE
    assert any("256.0 KiB that are alive at the end" in spot for spot in result.blind_spots)


def test_memory_of_another_allocator_is_not_in_the_footprint_and_is_named():
    def body() -> None:
        for n in range(1, 20):
            torch.from_numpy(np.ones(n * SIZE, np.float32)).sum()

    result = measured(body)
    assert result.peak.total < 4 * SIZE
    (spot,) = result.blind_spots
    assert "another allocator (such as numpy's)" in spot


def test_what_a_compiler_traces_with_is_no_memory():
    x = torch.ones(64, 8)

    def body() -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(x)

    assert measured(body).blind_spots == ()


def test_memory_of_another_allocator_that_was_there_before_is_in_the_footprint():
    tensor = torch.from_numpy(np.ones(SIZE, np.float32))
    result = measured(tensor.sum)
    assert result.peak.total >= 4 * SIZE
    assert result.blind_spots == ()


def test_the_number_in_a_threads_name_is_left_out():
    def body() -> None:
        thread = threading.Thread(target=lambda: torch.ones(SIZE).sum())
        thread.start()
        thread.join()

    (spot,) = measured(body).blind_spots
    assert spot.endswith("Thread (<lambda>) ran torch")


def test_shared_memory_reconciles():
    def body() -> None:
        KEPT.append(torch.ones(SIZE).share_memory_())
        torch.ones(SIZE)

    assert measured(body).unexplained_bytes == 0


def test_what_was_there_before_is_explained():
    KEPT.append(torch.ones(SIZE))
    assert measured(KEPT[0].sum).unexplained_bytes == 0


def test_a_profiler_of_threads_is_left_in_place():
    seen: list[str] = []

    def profile(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    threading.setprofile(profile)
    try:
        measured(lambda: in_thread(lambda: torch.ones(4)))
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(None)
    assert seen


def test_nothing_is_left_behind():
    inside: list[object] = []
    measured(lambda: in_thread(lambda: inside.append(torch.ones(4)) or sys.getprofile()))
    assert threading.getprofile() is None
    assert sys.getprofile() is None


def test_what_another_thread_leaves_passes_no_limit_in_silence() -> None:
    kept: list[torch.Tensor] = []

    def body() -> None:
        torch.empty(8)
        other = threading.Thread(target=lambda: kept.append(torch.empty(1 << 20)))
        other.start()
        other.join()

    result = measured(body)
    assert result.unexplained_bytes == 4 << 20
    (finding,) = judge_limits(result, {"retained": 1 << 20})
    assert finding.kind is FindingKind.UNSEEN
    assert (
        "cannot be judged: another thread or another allocator made 4.0 MiB unseen"
        in finding.sentence
    )
    assert judge_limits(result, {"retained": 4 << 20}) == ()
    assert judge_limits(result, {"activation": 1 << 20, "total": 8 << 20})[0].key == "activation"


def test_what_torchs_own_threads_make_is_counted() -> None:
    """A thread of torch's works with the state of the one that asked it, the profiler included."""

    @torch.jit.script
    def made(size: int) -> torch.Tensor:
        return torch.ones(size) * 2

    def body() -> None:
        KEPT.append(torch.jit.wait(torch.jit.fork(made, SIZE)))

    body()
    KEPT.clear()
    result = measured(body)
    assert result.retained.total == 4 * SIZE
    assert result.peak.total >= 2 * 4 * SIZE
    assert result.unexplained_bytes == 0


def test_what_a_pool_of_before_leaves_passes_no_limit_in_silence() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        result = measured(lambda: KEPT.append(pool.submit(torch.empty, SIZE).result()))
    assert result.unexplained_bytes == 4 * SIZE
    findings = judge_limits(result, {"retained": 2 * SIZE, "total": 2 * SIZE})
    assert {finding.kind for finding in findings} == {FindingKind.UNSEEN}


GIVEN_BACK = {
    "operators": lambda: len(KEPT[0] + 1),
    "an_index": lambda: len(KEPT[0][KEPT[0] > 0]),
    "a_constructor": lambda: torch.FloatTensor(SIZE),
    "a_transform": lambda: torch.fft.fft(KEPT[0]),
    "an_operator_by_name": lambda: torch.ops.aten.exp(KEPT[0]),
    "after_many_calls": lambda: [abs(n) for n in range(30_000)] and KEPT[0] + 1,
}


@pytest.mark.parametrize("work", GIVEN_BACK.values(), ids=GIVEN_BACK)
def test_a_thread_that_gives_all_back_is_named(work: Callable[[], object]) -> None:
    KEPT.append(torch.ones(SIZE))
    (spot,) = measured(lambda: in_thread(work)).blind_spots
    assert "memory of other threads is not in the figures: loader ran torch" in spot


def variables() -> None:
    kept = KEPT[0] + 1
    kept *= 2
    del kept
    doubled = [KEPT[0] * 2]
    doubled[0] += 1


def test_what_a_thread_has_in_its_variables_is_noticed() -> None:
    KEPT.append(torch.ones(SIZE))
    assert measured(lambda: in_thread(variables)).blind_spots


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ThreadPool])
def test_the_threads_of_a_pool_are_noticed(kind: Callable[[int], Any]) -> None:
    KEPT.append(torch.ones(SIZE))

    def body() -> None:
        with kind(2) as pool:
            list(pool.map(lambda n: KEPT[0] + n, (1, 2)))

    assert any("ran torch" in spot for spot in measured(body).blind_spots)


def test_a_thread_with_the_users_own_profile_function_is_noticed() -> None:
    seen: list[object] = []
    KEPT.append(torch.ones(SIZE))

    def note(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    threading.setprofile(note)
    try:
        (spot,) = measured(
            lambda: in_thread(lambda: [seen.append(sys.getprofile()), KEPT[0] + 1][1])
        ).blind_spots
    finally:
        threading.setprofile(None)
    assert "loader ran torch" in spot
    assert note in seen
    assert "return" in seen


def test_a_thread_that_is_not_followed_to_its_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PATIENCE", 50)
    work = GIVEN_BACK["after_many_calls"]
    KEPT.append(torch.ones(SIZE))
    (spot,) = measured(lambda: in_thread(work)).blind_spots
    assert "may be missing from the figures: loader made too many calls to be followed" in spot
