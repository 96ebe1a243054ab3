"""Measure or record a function."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.values.results import Result


def measured(body: Callable[[], object], device: str = "cpu") -> Result:
    """Measure a function as a test's body is measured; its own exception ends that, too."""
    measurement = BodyMeasurement(device)
    measurement.start()
    try:
        body()
    except BaseException:
        measurement.cancel()
        raise
    return measurement.stop()


def profile_of(body: Callable[[], object]) -> MemoryProfile:
    """Record a function and analyse the trace; its own exception ends the recording, too."""
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    try:
        body()
    finally:
        trace = recorder.stop()
    return analyze_trace(trace)
