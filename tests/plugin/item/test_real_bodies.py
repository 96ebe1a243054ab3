"""The plugin on the real engine: torch on the CPU, each kind of body, in one run."""

import importlib.util
import inspect
from pathlib import Path

import pytest

pytest.importorskip("torch")

from pytest_torchmem.measuring import body_measurement
from pytest_torchmem.record import devices, environment

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]

BODIES = """
import asyncio
import unittest

import pytest
import torch
from torch import nn

MiB = 1 << 20


def net():
    return nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))


@pytest.mark.memory_budget("64MiB", activation="1MiB")
def test_over_its_activation_limit():
    net()(torch.ones(4096, 256)).sum().backward()


@pytest.mark.memory_baseline
@pytest.mark.memory_budget("64MiB", activation="32MiB", warmup=1)
def test_regions_and_steps(torchmem):
    model = net().to(torchmem.device)
    for _ in torchmem.steps(3, warmup=1):
        with torchmem.measure("forward") as forward:
            loss = model(torch.ones(4096, 256)).sum()
        assert forward.peak.activation >= 4 * MiB
        loss.backward()
        model.zero_grad()
    assert torchmem.device == "cpu"
    torchmem.check(forward)


class TestCase(unittest.TestCase):
    @pytest.mark.memory_budget("1MiB")
    def test_method(self):
        torch.ones(1024, 1024)


class TestAsync(unittest.IsolatedAsyncioTestCase):
    @pytest.mark.memory_budget("1MiB")
    async def test_coroutine(self):
        await asyncio.sleep(0)
        torch.ones(1024, 1024)


@pytest.mark.memory_budget("1GiB", reserved="1MiB")
def test_counter():
    torch.ones(1024)


@pytest.mark.memory_budget("1GiB", device="cuda:99")
def test_missing_device():
    torch.ones(1024)


@pytest.mark.memory_budget("1GiB")
def test_no_tensor():
    pass


def test_not_asked():
    torch.ones(1024, 1024)
"""


def test_every_kind_of_body_on_the_real_engine(torch_pytester):
    torch_pytester.makeini("[pytest]")
    torch_pytester.makepyfile(test_it=BODIES)
    result = torch_pytester.runpytest_inprocess(
        "-otorchmem_device=cpu", "--torchmem-update-baseline"
    )
    result.assert_outcomes(passed=2, failed=5, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            "activation peaked at * over the limit of 1.0 MiB: largest 4.0 MiB from aten::* in *",
            "memory peaked at 4.0 MiB, +3.0 MiB (+300 %) over the limit of 1.0 *at test_it.py:*",
            "reserved memory peaked at an estimated 2.0 MiB, * over the limit of 1.0 MiB: *",
            "the body used no memory on cpu: *",
            "not measured: test_it.py::test_missing_device: *cuda:99*",
            "  new: test_regions_and_steps: *",
            "  new: test_regions_and_steps::forward: *",
        ]
    )
    arguments = ("-otorchmem_device=cpu", "-k", "regions", "-otorchmem_require_baseline=true")
    result = torch_pytester.runpytest_subprocess("-p", "xdist", "-n1", *arguments)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_regions_and_steps *same as baseline"])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (body_measurement, "BodyMeasurement"),
        (body_measurement, "BodyRegion"),
        (environment, "environment"),
        (environment, "device_names"),
        (devices, "measurable_device"),
    ],
)
def test_the_stand_in_is_called_as_the_real_engine_is(module, name):
    # Under a name of its own: the projects that other tests run in this process import theirs.
    path = Path(__file__).parents[2] / "fake_measure.py"
    spec = importlib.util.spec_from_file_location("stand_in", path)
    stand_in = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(stand_in)
    real, fake = getattr(module, name), getattr(stand_in, name)
    if not inspect.isclass(fake):
        assert list(inspect.signature(fake).parameters) == list(inspect.signature(real).parameters)
        return
    for method, function in vars(fake).items():
        if inspect.isfunction(function) and not method.startswith("_"):
            expected = inspect.signature(getattr(real, method)).parameters
            assert list(inspect.signature(function).parameters) == list(expected)


HELD = """
import os

import pytest
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        if os.environ.get("KEEPS"):
            self.last = torch.ones(1 << 20)
        return x + 1


def test_region(torchmem):
    model = Model()
    with torchmem.measure("forward") as forward:
        out = model(torch.ones(1 << 19))
    torchmem.check(forward)
    del model, out
"""


def test_a_region_s_failure_names_who_held_what_it_retained(torch_pytester, monkeypatch):
    torch_pytester.makepyfile(test_held=HELD)
    arguments = ("-p", "no:cacheprovider", "-otorchmem_device=cpu")
    torch_pytester.runpytest_inprocess(*arguments, "--torchmem-update-baseline").assert_outcomes(
        passed=1
    )
    monkeypatch.setenv("KEEPS", "1")
    result = torch_pytester.runpytest_inprocess(*arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "in 'forward', memory peaked at 8.0 MiB, +4.0 MiB (+100 %) over *, "
            "held at its end by model.last in test_region, freed later",
            "what held it:",
            "    4.0 MiB in 1 storage: held at its end by model.last in test_region, freed later",
        ]
    )


KEPT = """
import pytest
import torch


def test_list(torchmem):
    kept = []
    with torchmem.measure("part") as part:
        kept.append(torch.ones(1 << 18))
    assert part.retained.total == 0


class TestClass:
    @pytest.mark.memory_budget(retained=0)
    def test_attribute(self):
        self.kept = torch.ones(1 << 18)


@pytest.mark.memory_budget(growth=0)
def test_growth(torchmem):
    kept = []
    for _ in torchmem.steps(2):
        kept.append(torch.ones(1 << 18))
"""


def test_asserts_and_limits_name_who_holds_what_is_retained(torch_pytester):
    torch_pytester.makepyfile(test_kept=KEPT)
    result = torch_pytester.runpytest_inprocess("-p", "no:cacheprovider", "-otorchmem_device=cpu")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "E             largest 1.0 MiB of temporary from aten::ones at test_kept.py:8, "
            "still held by kept[[]0] in test_list (test_kept.py:*)",
            "retained 1.0 MiB, *, still held by an object of type test_kept.TestClass: kept",
            "grew by 1.0 MiB per step, *, held at its end by kept[[]*] in test_growth, freed later",
        ]
    )


def test_what_a_recording_replaced_is_back_in_the_next_test(torch_pytester):
    torch_pytester.makepyfile(
        """
        import sys
        import pytest
        import torch
        from pytest_torchmem.record.patches import PATCHES, How, found

        def patched():
            return {
                patch.name: found(patch.name)
                for patch in PATCHES
                if patch.how is How.REPLACED
                and patch.name.startswith("torch.nn.Module.")
            }

        BEFORE = patched()

        @pytest.mark.parametrize("_", range(2))
        @pytest.mark.memory_budget("1MiB")
        def test_measured(_):
            torch.ones(8)
            assert patched() != BEFORE

        def test_after():
            assert len(BEFORE) == 2
            assert patched() == BEFORE
        """
    )
    torch_pytester.runpytest().assert_outcomes(passed=3)


RAGGED = """
import pytest
import torch


@pytest.mark.memory_budget(reserved="36MiB")
def test_ragged(torchmem):
    kept = []
    for size in range(1, 9):
        batch = torch.ones(size, 1024, 1024, dtype=torch.uint8)
        kept.append(torch.ones(size, 1024, 512, dtype=torch.uint8))
"""


def test_a_reserved_limit_names_what_the_allocator_keeps(torch_pytester):
    torch_pytester.makeini("[pytest]")
    torch_pytester.makepyfile(test_it=RAGGED)
    result = torch_pytester.runpytest_inprocess("-otorchmem_device=cpu")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "reserved memory peaked at *: at least 17.0 MiB of that was free in segments of which "
            "other parts were in use; segments reserved from aten::ones at test_it.py:9 had "
            "18.5 MiB that no tensor held, 1.5 MiB more held no tensor either"
        ]
    )
