"""The known traps of recording torch, one test each or the place of one.

Numbers are those of the facts in the design:

2   peaks are the same every time: below, and tests/stress
3   frees of blocks that were there before: below, and test_recorder.py
8   optimizer state without Python stacks: below
9   the cost of reading: benchmarks/, and test_schemas.py (a schema is looked up once)
10  workspaces of cuBLAS: tests/cuda/test_recorded_traces.py, and tests/cuda/test_measure_cuda.py
11  a dispatch mode changes what it observes: test_undisturbed.py
12  pytest's and xdist's ways: tests/plugin/run/test_xdist.py, tests/plugin/run/test_everywhere.py
13  warnings as errors: tests/plugin/run/test_everywhere.py
14  tensors pinned by tracebacks, a patched ``is_available``: below
15  blocks and requests on CUDA: tests/cuda/test_recorded_traces.py
16  identity without ids: below
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.record.devices import find_device
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd, compiler, profiler
from pytest_torchmem.values.trace import Role, Trace
from tests.measured import measured

pytestmark = pytest.mark.slow


def recorded(body: Callable[[], object]) -> Trace:
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    body()
    return recorder.stop()


def training() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- 2: the same every time -------------------------------------------------------------------


def test_a_warm_step_has_the_same_peak_every_time() -> None:
    step = training()
    step()
    peaks = {measured(step).peak.at_peak for _ in range(3)}
    assert len(peaks) == 1


def test_the_peak_does_not_depend_on_the_number_of_threads() -> None:
    step, count = training(), torch.get_num_threads()
    step()
    peaks = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        peaks.append(measured(step).peak.at_peak)
    torch.set_num_threads(count)
    assert peaks[0] == peaks[1]


# --- 3: frees of what was there before --------------------------------------------------------


def peak_of_replacing(held: list[torch.Tensor]) -> int:
    return measured(lambda: held.append(held.pop().neg())).peak.total


def test_a_free_counts_whether_or_not_an_earlier_session_saw_the_birth() -> None:
    unseen = [torch.ones(1000)]
    seen: list[torch.Tensor] = []
    measured(lambda: seen.append(torch.ones(1000)))
    for _ in range(3):
        assert peak_of_replacing(unseen) == peak_of_replacing(seen) == 8000


def test_a_block_that_changed_hands_unseen_is_freed_with_its_own_size() -> None:
    # The profiler remembers 4000 bytes at an address that holds 2000 by the time of the free.
    big: list[torch.Tensor] = []
    measured(lambda: big.append(torch.ones(1000)))
    place = big.pop().data_ptr()
    others = [torch.ones(500) for _ in range(20)]
    small = [t for t in others if t.data_ptr() == place]
    if not small:
        pytest.skip("the heap did not use the address again")
    others.clear()

    def body() -> None:
        small.pop().sum()
        torch.ones(500)

    result = measured(body)
    assert result.peak.total == 2000 + 4
    assert result.retained.total == 0


def test_what_a_graph_of_before_keeps_is_freed_by_the_backward_pass() -> None:
    weight = torch.ones(1000, requires_grad=True)
    # What `exp` keeps for backward has no Python object.
    loss = weight.exp().exp().sum()

    def body() -> None:
        loss.backward()
        torch.ones(3000)

    # The weight, its gradient and the loss are left when the last line allocates.
    assert measured(body).peak.total == 4000 + 4000 + 4 + 12000


def test_a_gradient_of_before_is_freed_when_it_is_dropped() -> None:
    model = nn.Linear(100, 100, bias=False)
    model(torch.ones(1, 100)).sum().backward()

    def body() -> None:
        model(torch.ones(1, 100)).sum().backward()
        model.zero_grad()
        torch.ones(40_000)

    # Only the weight is left when the last line allocates.
    assert measured(body).peak.total == 40_000 + 160_000


# --- 8: optimizer state without Python stacks -------------------------------------------------


def test_optimizer_state_is_known_without_python_stacks() -> None:
    trace = recorded(training())
    assert not np.isin(trace.tensors["role"], (Role.OPTIMIZER_STATE, Role.MODULE_PARAMETER)).any()
    assert analyze_trace(trace).peak.optimizer_state >= 2 * 2 * 64 * 64 * 4


# --- 14: pinned by a traceback; a device that is said to be there ------------------------------


def pin() -> None:
    pinned = torch.ones(10_000)
    raise ValueError(pinned.sum())


def test_what_a_traceback_pins_is_in_no_footprint() -> None:
    def body() -> None:
        torch.ones(100) * 2

    alone = measured(body).peak.by_category
    with pytest.raises(ValueError, match="1000") as pinned:
        pin()
    assert measured(body).peak.by_category == alone
    assert pinned.value.__traceback__ is not None


def test_a_device_that_is_only_said_to_be_there_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        torch.empty(1, device="cuda")
    except (RuntimeError, AssertionError):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert find_device().type == "cpu"
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert find_device().type == "cuda"


# --- 16: identity without ids -----------------------------------------------------------------


def test_storages_are_told_apart_without_the_profilers_ids() -> None:
    trace = recorded(training())
    allocations, tensors = trace.allocations.copy(), trace.tensors.copy()
    for table in (allocations, tensors):
        assert table["keyed"].any()
        table["keyed"] = False
        table["id"] = table["allocation_id"] = 0
    without = replace(trace, allocations=allocations, tensors=tensors)
    assert analyze_trace(without).result() == analyze_trace(trace).result()


# --- found since ------------------------------------------------------------------------------


class Cycle:
    def __init__(self) -> None:
        self.tensor = torch.ones(1000)
        self.me = self


def cycles() -> None:
    weight = torch.ones(1000, requires_grad=True)
    for _ in range(40):
        Cycle()
        (weight * 2).sum().backward()
        [[] for _ in range(20)]


def test_what_others_left_does_not_decide_when_cycles_are_freed() -> None:
    peaks = set()
    for count in (0, 50, 1000):
        left = [torch.ones(1) for _ in range(count)]
        peaks.add(measured(cycles).peak.total)
        left.clear()
    (peak,) = peaks
    # Some were freed on the way, by the collector alone.
    assert 5 * 4000 < peak < 40 * 4000 + 20_000


def test_resetting_the_compiler_in_a_body_does_not_end_the_watch() -> None:
    handler = compiler.callbacks()
    before = (list(handler.end_callbacks), vars(handler).keys())

    def body() -> None:
        torch._dynamo.reset()
        assert len(handler.end_callbacks) == 1
        torch.ones(10)

    assert measured(body).peak.total == 40
    after = (list(handler.end_callbacks), vars(handler).keys())
    assert after == before


class NameOfModuleCode:
    """An event of a module's code, whose name was freed with it."""

    @property
    def name(self) -> str:
        return b"package/module.py(0): \xc6~uV".decode()


def test_a_name_that_is_gone_is_that_of_a_modules_code() -> None:
    with pytest.raises(UnicodeDecodeError):
        NameOfModuleCode().name  # noqa: B018
    assert profiler.name_of(NameOfModuleCode()) == "package/module.py(0): <module>"  # type: ignore[arg-type]


def test_a_result_in_the_place_of_a_parameter_is_asked_for_no_gradient() -> None:
    # As meta-learning puts it there. torch's own recording asks it, too.
    layer = nn.Linear(4, 4)
    vars(layer)["_parameters"] = {name: p * 1 for name, p in layer.named_parameters()}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorded(lambda: layer(torch.ones(2, 4)).sum().backward())
    assert [each.filename for each in told if "pytest_torchmem" in each.filename] == []


def test_a_result_that_keeps_its_gradient_has_one() -> None:
    result = torch.ones(2, requires_grad=True) * 1
    result.retain_grad()
    result.sum().backward()
    assert autograd.gradient_of(result) is not None
