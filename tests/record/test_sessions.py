"""A long recording is cut into sessions at marks; nothing of its result depends on where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record import recorder
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.results import Result

KEPT: list[torch.Tensor] = []


def train(measurement: BodyMeasurement) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in measurement.steps(4, 0):
        with measurement.region("forward"):
            loss = model(torch.ones(16, 32)).square().mean()
        with measurement.region("backward"):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        KEPT.append(loss.detach())


def infer(measurement: BodyMeasurement) -> None:
    cache = torch.zeros(4, 16)
    for _ in measurement.steps(4, 0):
        with torch.no_grad(), measurement.region("token"):
            cache = torch.cat([cache, torch.ones(1, 16)])


def measured(body: Callable[[BodyMeasurement], None]) -> list[Result]:
    KEPT.clear()
    measurement = BodyMeasurement("cpu")
    measurement.start()
    body(measurement)
    whole = measurement.stop()
    results = [whole, *(region.result for region in measurement.regions)]
    # When it was is another matter.
    return [replace(r, peak=replace(r.peak, time_ns=0)) for r in results]


@pytest.mark.parametrize("body", [train, infer])
def test_results_do_not_depend_on_where_a_recording_is_cut(
    body: Callable[[BodyMeasurement], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    body_results, starts = [], []
    start = profiler.Profiler.start
    measured(body)
    for seconds in (1e9, 0.0):
        count = 0

        def counted(session: profiler.Profiler) -> None:
            nonlocal count
            count += 1
            start(session)

        with monkeypatch.context() as patched:
            patched.setattr(recorder, "_LONG_SESSION_S", seconds)
            patched.setattr(profiler.Profiler, "start", counted)
            body_results.append(measured(body))
        starts.append(count)
    assert starts[1] > starts[0] + 4
    assert body_results[0] == body_results[1]
