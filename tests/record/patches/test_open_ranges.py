"""A recording is interrupted only where no operator of it is open."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._profiler import _RecordFunctionFast

from pytest_torchmem import measure
from pytest_torchmem.measuring.block import Measure
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.open_ranges import OpenRanges
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.values.errors import RecordingError

RANGE = torch.profiler.record_function
LEAVE: Any = RANGE.__exit__
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
        may_be_cut.append(not ranges.in_the_way(has_calls=False))
        leave(block, *error)

    monkeypatch.setattr(range_type, "__exit__", leaving)
    with Installed() as patches:
        ranges.install(patches)
        with torch.profiler.record_function("mine"):
            may_be_cut.append(not ranges.in_the_way(has_calls=False))
        may_be_cut.append(not ranges.in_the_way(has_calls=False))
    assert may_be_cut == [False, False, True]


def fast_in_a_generator() -> Iterator[None]:
    with _RecordFunctionFast("part"):
        yield


RAW: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "raw": (
        lambda: torch.ops.profiler._record_function_enter("part", None),
        torch.ops.profiler._record_function_exit,
    ),
    "new": (
        lambda: torch.ops.profiler._record_function_enter_new("part", None),
        torch.ops.profiler._record_function_exit._RecordFunction,
    ),
    "with arguments": (
        lambda: torch.autograd._record_function_with_args_enter("part", torch.ones(2)),
        torch.autograd._record_function_with_args_exit,
    ),
    "named before": (partial(RANGE.__enter__, RANGE("part")), lambda b: LEAVE(b, None, None, None)),
    "block": (lambda: RANGE("part").__enter__(), lambda b: b.__exit__(None, None, None)),
    "fast": (lambda: entered(_RecordFunctionFast("part")), lambda r: r.__exit__(None, None, None)),
    "generator": (lambda: begun(fast_in_a_generator()), lambda g: g.close()),
    "dropped": (lambda: entered(_RecordFunctionFast("part")), lambda _: None),
}


def entered(block: Any) -> Any:
    block.__enter__()
    return block


def begun(generator: Any) -> Any:
    next(generator)
    return generator


@pytest.mark.parametrize("kind", RAW)
def test_a_range_that_is_still_open_writes_into_no_later_recording(kind: str) -> None:
    """Where it ended in another session than it began in, the process could end."""
    begin, end = RAW[kind]

    def observed() -> tuple[Any, bool]:
        # A range holds what observes it from its beginning on; there is nothing to hold here.
        recorder = Recorder(torch.device("cpu"))
        recorder.start()
        opened = begin()
        trace = recorder.stop()
        names = [trace.strings[n] for n in trace.events["name"][~trace.events["is_operator"]]]
        return opened, "part" in names

    opened, is_seen = observed()
    assert is_seen == (kind == "block")
    other = Recorder(torch.device("cpu"))
    other.start()
    end(opened)
    del opened
    torch.ones(3)
    assert len(other.stop().allocations)


def test_a_block_that_is_dropped_is_open_no_longer() -> None:
    with measure(device="cpu") as block:
        RANGE("part").__enter__()
        gc.collect()
        assert read_a_region(block) == 1024


@pytest.mark.parametrize("within", [False, True])
def test_a_range_of_the_programs_leaves_its_own_operators_observed(within: bool) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        with _RecordFunctionFast("part"):
            return x * 2

    called = torch.func.vmap(body) if within else body
    called(torch.ones(3, 2))
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    called(torch.ones(3, 2))
    trace = recorder.stop()
    names = [trace.strings[name] for name in trace.events["name"].tolist()]
    assert "part" not in names
    assert names.count("aten::mul") == 1


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
