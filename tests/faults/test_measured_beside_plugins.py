"""Real bodies beside plugins that time, trace or order tests, a clock that jumps, and odd names."""

from __future__ import annotations

import importlib.util
import json

import pytest

pytestmark = pytest.mark.slow

TESTS = """
import gc, pytest, torch

@pytest.fixture
def runs(request):
    # with pytest-benchmark its own calls, otherwise one
    if request.config.pluginmanager.has_plugin("benchmark"):
        return request.getfixturevalue("benchmark")
    return lambda body: body()

def step():
    weight = torch.ones(256, 256, requires_grad=True)
    (torch.ones(1024, 256) @ weight).relu().sum().backward()

@pytest.mark.memory_baseline
def test_step(runs):
    runs(step)

@pytest.mark.memory_budget("64MiB", retained="0B")
@pytest.mark.memory_baseline
def test_frozen():
    gc.collect()
    gc.freeze()
    try:
        step()
    finally:
        gc.unfreeze()

@pytest.mark.memory_budget("1MiB")
def test_too_much():
    torch.ones(2 ** 20)
"""
PLUGINS = {
    "benchmark": ("pytest_benchmark.plugin", "--benchmark-min-rounds=20"),
    "memray": ("pytest_memray.plugin", "--memray"),
    "order": ("pytest_order.plugin", "--order-scope=module"),
    "timeout": ("pytest_timeout", "--timeout=100"),
    "reruns": ("pytest_rerunfailures", "--reruns=1"),
}


def peaks(path) -> dict[str, tuple[int, int]]:
    run = json.loads(path.read_text())
    results = {test["test"]: test["windows"][0]["result"] for test in run["tests"]}
    return {
        name: (result["peak"]["total"], result["retained"]["total"])
        for name, result in results.items()
    }


@pytest.mark.nightly("reruns")
@pytest.mark.parametrize("name", PLUGINS)
def test_the_numbers_are_those_without_the_plugin(torch_pytester, name):
    plugin, *arguments = PLUGINS[name]
    if importlib.util.find_spec(plugin.partition(".")[0]) is None:
        pytest.skip(f"needs {plugin.partition('.')[0]}, which is not installed")
    torch_pytester.makepyfile(test_it=TESTS)
    alone = torch_pytester.runpytest_subprocess(
        "--torchmem-update-baseline", "--torchmem-report=alone.json"
    )
    alone.assert_outcomes(passed=2, failed=1)
    beside = torch_pytester.runpytest_subprocess(
        "-p", plugin, *arguments, "--torchmem-report=beside.json"
    )
    outcomes = beside.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (2, 1), beside.stdout.str()
    beside.stdout.fnmatch_lines(["memory peaked at 4.0 MiB, +3.0 MiB (+300 %) over the limit*"])
    folder = torch_pytester.path
    assert peaks(folder / "beside.json") == peaks(folder / "alone.json")


CLOCK = """
import time, pytest, torch

@pytest.mark.memory_budget(growth="0B")
def test_clock(torchmem):
    kept, real = [], time.time_ns
    for step in torchmem.steps(3):
        kept.append(torch.ones(1000))
        time.time_ns = lambda: real() + {} * 3600 * 10**9
"""


@pytest.mark.nightly("1")
@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_set_in_a_body_loses_no_holder(torch_pytester, hours):
    torch_pytester.makepyfile(test_it=CLOCK.format(hours))
    result = torch_pytester.runpytest_subprocess()
    result.stdout.fnmatch_lines(
        ["grew by 3.9 KiB per step, *, held at its end by kept[[]*] in test_clock, freed later"]
    )


CASES = """
import pytest, torch

@pytest.mark.memory_baseline
def test_a(): torch.ones({} * 2**18)

@pytest.mark.memory_baseline
def test_A(): torch.ones({} * 2**18)
"""


@pytest.mark.nightly
def test_names_that_differ_by_case_have_entries_of_their_own(torch_pytester):
    folder = torch_pytester.path
    (folder / "test_it.py").write_text(CASES.format(4, 8))
    if (folder / "TEST_IT.py").exists():
        pytest.skip("this file system does not tell them apart")
    (folder / "test_IT.py").write_text(CASES.format(16, 32))
    torch_pytester.runpytest_subprocess("--torchmem-update-baseline").assert_outcomes(passed=4)
    result = torch_pytester.runpytest_subprocess("--torchmem-report=x.json")
    result.assert_outcomes(passed=4)
    assert sorted(total >> 20 for total, _ in peaks(folder / "x.json").values()) == [4, 8, 16, 32]
    stored = folder / "__torchmem__"
    assert len([*stored.rglob("*.json")]) == 2
