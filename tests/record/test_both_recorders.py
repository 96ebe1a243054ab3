"""The library and torch's profiler give the same numbers: many programs, recorded by each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pytest_torchmem.record import recorder
from pytest_torchmem.record.profiled.profiled_observer import ProfiledObserver
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.results import Result
from tests.analysis.storages.small_programs import PROGRAMS
from tests.measured import measured

pytestmark = pytest.mark.slow

Measure = Callable[[Callable[[], object]], Result]


@pytest.fixture
def profiled(monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Measure as where the library cannot be had."""

    def measure(body: Callable[[], object]) -> Result:
        with monkeypatch.context() as patched:
            patched.setattr(recorder, "observer_for", lambda *_: ProfiledObserver())
            return measured(body)

    return measure


def test_there_are_enough_programs() -> None:
    assert len(PROGRAMS) >= 40


# While it notes shapes, torch's profiler keeps alive what a transform of `torch.func` wraps.
TRANSFORMED = ("per_row_with_vmap", "gradient_function")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in TRANSFORMED])
def test_both_give_the_same_numbers(name: str, profiled: Measure) -> None:
    torch.manual_seed(0)
    body = PROGRAMS[name]()
    body()  # a first run imports, and makes what stays
    by_profiler, by_library = profiled(body), measured(body)
    assert by_library.peak.at_peak == by_profiler.peak.at_peak
    assert by_library.peak.by_category == by_profiler.peak.by_category
    assert by_library.retained.by_category == by_profiler.retained.by_category
    lines = {(c.category, c.source, c.module, c.size_bytes) for c in by_profiler.peak.live}
    assert {(c.category, c.source, c.module, c.size_bytes) for c in by_library.peak.live} == lines


@pytest.mark.parametrize("name", TRANSFORMED)
def test_the_profiler_alone_keeps_what_transforms_wrap(name: str, profiled: Measure) -> None:
    body = PROGRAMS[name]()
    body()
    assert measured(body).peak.total < profiled(body).peak.total


def test_a_profiler_around_the_body_is_said_and_left_alone(profiled: Measure) -> None:
    with torch.profiler.profile() as outer:
        with pytest.raises(RecordingError, match="another torch profiler session is active"):
            profiled(lambda: torch.ones(10))
        torch.ones(10)
    assert any(event.key == "aten::ones" for event in outer.key_averages())


def test_a_profiler_of_the_bodys_own_makes_it_unmeasured_not_zero(profiled: Measure) -> None:
    def body() -> None:
        with torch.profiler.profile():
            torch.ones(1000)

    with pytest.raises(RecordingError, match="a torch profiler of its own"):
        profiled(body)
