"""Options of Python and of pytest that change how tests run change no outcome and no number."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = """
import pytest, torch, unittest

KEPT = []

@pytest.fixture
def model():
    return torch.nn.Linear(64, 64)

@pytest.mark.memory_budget("1GiB", growth="0B")
@pytest.mark.memory_baseline
def test_steps(torchmem, model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in torchmem.steps(3, warmup=1):
        model(torch.ones(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

@pytest.mark.memory_budget("1KiB")
def test_is_over(model):
    model(torch.ones(1024, 64))

@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.memory_baseline
def test_sizes(size):
    torch.ones(size, 1024)

def test_region(torchmem):
    with torchmem.measure("region") as region:
        torch.ones(1024)
    torchmem.check(region)
    if region.peak.total != 4096:
        raise ValueError(region)

class TestMethods(unittest.TestCase):
    @pytest.mark.memory_budget(retained="0B")
    def test_keeps(self):
        KEPT.append(torch.ones(100))

@pytest.mark.memory_budget("1KiB")
@pytest.mark.xfail(strict=True)
def test_is_expected_to_be_over():
    torch.ones(4096)
"""
UPDATE = ("-p", "no:cacheprovider", "--torchmem-update-baseline")
TRACED = """
import tracemalloc

def pytest_sessionstart():
    tracemalloc.start()

def pytest_sessionfinish():
    tracemalloc.stop()
"""
Found = tuple[dict[str, int], list[str], str]


def found(result: pytest.RunResult, folder: Path) -> Found:
    """Return a run's outcomes, what it says of the tests that fail, and what it stores."""
    outcomes = {key: n for key, n in result.parseoutcomes().items() if "warning" not in key}
    said = r"(memory|retained) .* over the limit|memory: |.* test_it\.py:\d+ test_"
    failures = [line for line in result.outlines if re.match(said, line)]
    assert "Traceback" not in f"{result.outlines}{result.errlines}"
    (file,) = folder.glob("__torchmem__/*/test_it.json")
    text = file.read_text()
    file.unlink()
    return outcomes, failures, text


def as_ever(pytester: pytest.Pytester) -> Found:
    """Return what a run without options finds."""
    pytester.makepyfile(test_it=TESTS)
    expected = found(pytester.runpytest_inprocess(*UPDATE), pytester.path)
    outcomes, failures, _ = expected
    assert outcomes == {"passed": 4, "failed": 2, "xfailed": 1}
    told = "\n".join(failures)
    assert "memory peaked at 528.2 KiB, +527.2 KiB (+52,725 %) over the limit of 1.0 KiB" in told
    assert re.search(r"aten::linear +Linear +test_it\.py:\d+ test_is_over", told)
    return expected


# An isolated Python hears of no environment; developers' mode checks Python's allocator, too. For a
# Python without assertions all of torch is compiled anew, which takes long: that is nightly.
@pytest.mark.nightly
@pytest.mark.parametrize("options", [("-I", "-X", "dev"), ("-O",)], ids=" ".join)
def test_an_option_of_python_changes_nothing(
    torch_pytester: pytest.Pytester, options: tuple[str, ...]
) -> None:
    expected = as_ever(torch_pytester)
    result = torch_pytester.run(sys.executable, "-B", *options, "-m", "pytest", *UPDATE)
    assert found(result, torch_pytester.path) == expected


def test_traced_allocations_and_another_way_to_import_change_nothing(
    torch_pytester: pytest.Pytester,
) -> None:
    expected = as_ever(torch_pytester)
    torch_pytester.makeconftest(TRACED)
    result = torch_pytester.runpytest_inprocess(*UPDATE, "--import-mode=importlib")
    assert found(result, torch_pytester.path) == expected


def test_what_runs_no_body_neither_fails_nor_changes_what_is_stored(
    torch_pytester: pytest.Pytester,
) -> None:
    torch_pytester.makepyfile(test_it=TESTS)
    torch_pytester.runpytest_inprocess(*UPDATE).assert_outcomes(passed=4, failed=2, xfailed=1)
    (file,) = torch_pytester.path.glob("__torchmem__/*/test_it.json")
    stored = file.read_text()
    (torch_pytester.path / "test_it.py").write_text(TESTS.replace("size, 1024", "size, 2048"))
    for option in ("--setup-plan", "--setup-only", "--collect-only"):
        for arguments in (
            ("--torchmem-strict", "-otorchmem_require_baseline=true"),
            ("--torchmem-update-baseline", "--torchmem-accept=new,grown,shrunk,unused"),
        ):
            result = torch_pytester.runpytest_inprocess(option, *arguments)
            assert (result.ret, result.parseoutcomes().keys() - {"tests"}) == (0, set())
            result.stdout.no_fnmatch_line("*memory:*")
            assert file.read_text() == stored
