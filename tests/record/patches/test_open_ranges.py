"""A recording is interrupted only where no operator of it is open."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_torchmem import measure
from pytest_torchmem.measuring.block import Measure
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.open_ranges import OpenRanges
from pytest_torchmem.values.errors import RecordingError

REFUSED = "inside a record_function block, an autograd function, a hook"


def read_a_region(block: Measure) -> int:
    with block.region("part") as part:
        torch.ones(256)
    return part.peak.total


def test_a_region_is_not_read_within_an_annotation() -> None:
    with measure(device="cpu") as block:
        with torch.profiler.record_function("mine"), pytest.raises(RecordingError, match=REFUSED):
            read_a_region(block)
        assert read_a_region(block) == 1024


def test_a_region_is_not_read_in_a_hook() -> None:
    weight = torch.ones(4, requires_grad=True)
    said: list[str] = []

    def hook(gradient: torch.Tensor) -> None:
        try:
            read_a_region(block)
        except RecordingError as error:
            said.append(str(error))

    weight.register_hook(hook)
    with measure(device="cpu") as block:
        weight.sum().backward()
    assert len(said) == 1
    assert REFUSED in said[0]


def test_a_range_is_open_until_torch_has_closed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, range_type = OpenRanges(), torch.autograd.profiler.record_function
    may_be_cut: list[bool] = []
    leave = range_type.__exit__

    def leaving(block: Any, *error: Any) -> None:
        may_be_cut.append(ranges.may_be_cut(has_calls=False))
        leave(block, *error)

    monkeypatch.setattr(range_type, "__exit__", leaving)
    with Installed() as patches:
        ranges.install(patches)
        with torch.profiler.record_function("mine"):
            may_be_cut.append(ranges.may_be_cut(has_calls=False))
        may_be_cut.append(ranges.may_be_cut(has_calls=False))
    assert may_be_cut == [False, False, True]


class Calls(torch.nn.Module):
    """Runs a function where torch is the caller, as the start of a process by ``mp.spawn`` does."""

    def forward(self, function: Any) -> Any:
        return function()


def test_what_torch_called_before_the_recording_is_no_obstacle() -> None:
    def work() -> int:
        with measure(device="cpu") as block:
            peak_bytes = read_a_region(block)
            with pytest.raises(RecordingError, match=REFUSED):
                Calls()(lambda: read_a_region(block))
        return peak_bytes

    assert Calls()(work) == 1024
