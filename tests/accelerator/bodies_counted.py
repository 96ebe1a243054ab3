"""What is measured on memdev, held against the device's own counters, to the byte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import memdev_device
import pytest
import torch
from memdev_device import block_bytes
from torch import nn

from pytest_torchmem import measure
from pytest_torchmem.record import devices
from pytest_torchmem.values.errors import DeviceError, LimitError


def train(device: str, steps: int = 2) -> Any:
    model = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(16, 96, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def forward_only(device: str) -> torch.Tensor:
    with torch.no_grad():
        return nn.Linear(300, 200).to(device)(torch.ones(70, 300, device=device)).softmax(-1)


def storages_that_change_size(device: str) -> torch.Tensor:
    x = torch.ones(1000, device=device)
    x.untyped_storage().resize_(40_000)
    x.resize_(20_000)
    torch.ones(3000, device=device)
    return torch.empty(0, device=device).set_(x)  # type: ignore[call-overload]


def views_and_copies(device: str) -> list[torch.Tensor]:
    x = torch.arange(6000, device=device, dtype=torch.float32).view(60, 100)
    return [x.t(), x[3:9].clone(), x.cpu().to(device), x.half(), torch.cat([x, x])]


def a_gradient_of_a_gradient(device: str) -> None:
    x = torch.ones(500, device=device, requires_grad=True)
    (slope,) = torch.autograd.grad(x.exp().sin().sum(), [x], create_graph=True)
    slope.norm().backward()


PROGRAMS = (
    train,
    forward_only,
    storages_that_change_size,
    views_and_copies,
    a_gradient_of_a_gradient,
)


@pytest.mark.parametrize("device", ["memdev:0", "memdev:1"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_peak_and_retained_are_those_of_the_device(
    program: Callable[..., Any], device: str
) -> None:
    index = torch.device(device).index
    before = memdev_device.stats(index)
    with measure("body", device=device) as body:
        kept = program(device)
    after, result = memdev_device.stats(index), body.result
    assert result.peak.total == after["allocated.peak"] - before["allocated.current"] > 0
    assert result.retained.total == after["allocated.current"] - before["allocated.current"]
    assert result.counters is not None
    assert result.counters.allocated == after["allocated.peak"]
    assert result.counters.reserved == after["reserved.peak"]
    assert result.counters.requested == after["requested.peak"] < result.counters.allocated
    assert result.peak.unknown == 0
    assert result.blind_spots == ()
    del kept


def test_categories_are_what_the_tensors_are() -> None:
    x = torch.randn(16, 96, device="memdev")
    with measure("train", device="memdev") as body:
        model, optimizer = train("memdev", steps=1)
        model(x).square().mean().backward()
    parameters = list(model.parameters())
    state = [v for s in optimizer.state.values() for v in s.values() if v.device.type == "memdev"]
    assert body.peak.parameter == body.retained.parameter == block_bytes(*parameters)
    assert body.retained.optimizer_state == block_bytes(*state) > 0
    assert body.retained.gradient == block_bytes(*(p.grad for p in parameters))
    assert body.peak.input == x.untyped_storage().nbytes()
    assert body.peak.activation > 16 * 64 * 4
    assert body.peak.temporary > 0
    assert {c.module for c in body.result.peak.live} >= {"Sequential.*.weight"}


def test_what_runs_on_the_cpu_for_the_device_is_not_counted() -> None:
    with measure("matmul", device="memdev") as body:
        x = torch.ones(128, 128, device="memdev")
        y = x @ x
        torch.ones(1000, 1000)
    assert body.peak.total == body.retained.total == block_bytes(x, y)
    assert body.result.blind_spots == ()


def test_a_number_does_not_depend_on_what_others_left_in_the_cache() -> None:
    totals = []
    for size in (0, 9000, 5000, 20_000):
        torch.empty(size, device="memdev")
        torch.empty(size * 3, device="memdev")
        with measure("body", device="memdev") as body:
            train("memdev")
        totals.append(body.peak.total)
    assert len(set(totals)) == 1


KEPT: list[torch.Tensor] = []


def test_the_holder_of_what_is_left_is_found() -> None:
    told = r"retained 4\.0 KiB, .*, still held by test_counted\.KEPT\[0\]"
    with pytest.raises(LimitError, match=told), measure("leak", retained=0, device="memdev"):
        KEPT.append(torch.ones(1000, device="memdev"))
    KEPT.clear()


def test_the_other_device_is_a_blind_spot() -> None:
    with measure("both", device="memdev:1") as body:
        x = torch.ones(1000, device="memdev:1")
        y = torch.ones(300, device="memdev:0").to("memdev:1")
    assert body.peak.total == block_bytes(x, y)
    assert body.result.blind_spots == ("1.5 KiB were allocated on memdev:0, which is not measured",)


def test_on_the_cpu_the_device_is_a_blind_spot() -> None:
    with measure("cpu", device="cpu") as body:
        torch.ones(1000, device="memdev:0")
    assert "4.0 KiB were allocated on memdev:0, which is not measured" in body.result.blind_spots


def test_what_another_thread_makes_is_told_in_bytes() -> None:
    with measure("thread", device="memdev") as body:
        x = torch.ones(100, device="memdev")
        thread = threading.Thread(target=lambda: torch.ones(1000, device="memdev"))
        thread.start()
        thread.join()
    assert body.peak.total == block_bytes(x)
    assert (
        "the allocator's own peak holds 4.0 KiB that another thread made unseen"
        in body.result.blind_spots
    )
    assert body.result.unexplained_bytes == 4096


@pytest.fixture
def honest(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(devices, "_reporting", set())
    yield
    memdev_device.set_honesty()


@pytest.mark.usefixtures("honest")
@pytest.mark.parametrize(
    ("switch", "told"), [("counts", "counts nothing"), ("reports", "does not report it to torch")]
)
def test_a_device_that_does_not_tell_is_refused(switch: str, told: str) -> None:
    memdev_device.set_honesty(**{switch: False})
    with pytest.raises(DeviceError, match=told), measure("body", device="memdev"):
        pass


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="memdev:2 is not there"), measure(device="memdev:2"):
        pass
