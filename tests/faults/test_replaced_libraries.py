"""Tests replace functions of libraries for their body, and these are in place when it is judged."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

# Without these pytest itself can tell of a failure.
NAMES = (
    *("builtins.open", "gc.get_objects", "inspect.signature", "json.dumps", "json.loads"),
    *("numpy.array", "numpy.zeros", "os.getpid", "os.path.exists", "os.path.realpath"),
    *("os.replace", "pathlib.Path.open", "pathlib.Path.read_text", "pathlib.Path.resolve"),
    *("subprocess.run", "tempfile.mkstemp", "time.monotonic", "time.perf_counter_ns"),
    *("time.thread_time", "zlib.compress"),
)
TESTS = f"""
import os
import shutil
import sys

import pytest
import torch

def use():
    torch.ones(int(os.environ.get("SIZE", "10")), 1 << 18)

def broken(*arguments, **options):
    raise RuntimeError("replaced")

@pytest.mark.memory_baseline
@pytest.mark.parametrize("name", {NAMES!r})
def test_replaced(monkeypatch, name):
    use()
    monkeypatch.setattr(name, broken)

@pytest.fixture
def replaced(monkeypatch):
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("time.monotonic", broken)

@pytest.mark.memory_baseline
def test_before(replaced):
    use()

@pytest.mark.memory_baseline
def test_folder_is_gone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(tmp_path)
    use()

def test_what_was_replaced_is_there_until_the_fixtures_end(monkeypatch, torchmem):
    monkeypatch.setattr("os.getpid", broken)
    with torchmem.measure("region") as region:
        use()
    assert region.peak.total >= 5 << 20
    with pytest.raises(RuntimeError, match="replaced"):
        os.getpid()
"""
OUT_OF_REACH = """
import os

import pytest
import torch

@pytest.fixture
def hidden(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("replaced")
    monkeypatch.setattr(os.environ, "get", broken)

@pytest.mark.memory_baseline
def test_baseline(hidden):
    torch.ones(1 << 20)

@pytest.mark.memory_budget("1GiB")
def test_limit(hidden):
    torch.ones(1 << 20)

@pytest.mark.memory_budget("1GiB")
def test_next():
    torch.ones(1 << 20)
"""


def test_a_body_that_replaces_what_we_need_is_measured_and_judged(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(NAMES) + 2
    pytester.makepyfile(TESTS)
    quiet = ("-p", "no:cacheprovider", "-p", "no:rerunfailures", "-otorchmem_device=cpu")
    with monkeypatch.context() as before:
        before.setenv("SIZE", "5")
        stored = pytester.runpytest_subprocess(*quiet, "--torchmem-update-baseline")
        stored.assert_outcomes(passed=count + 1)
        stored.stdout.fnmatch_lines(["*baseline updated: *", f"*memory: {count} new*"])
        assert f"baseline updated: {count} entries" in stored.stdout.str()
    judged = pytester.runpytest_subprocess(*quiet)
    judged.assert_outcomes(passed=1, failed=count)
    over = "memory peaked at 10.0 MiB, +5.0 MiB (+100 %) over the baseline of 5.0 MiB*"
    # All have one cause, which is told in whole once.
    judged.stdout.fnmatch_lines(
        [over, f"* made {count} tests grow: *", f"memory: {count} failed *"]
    )


def test_what_cannot_be_put_back_leaves_a_body_unmeasured_and_no_other(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(OUT_OF_REACH)
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-otorchmem_device=cpu")
    done.assert_outcomes(passed=2, failed=1)
    why = "measuring ended with RuntimeError: replaced (*"
    done.stdout.fnmatch_lines(
        [
            f"the limit on memory cannot be judged: {why}",
            f"not measured: *::test_baseline, *::test_limit: {why}",
        ]
    )
