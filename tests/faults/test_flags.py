"""Options of Python and of pytest that change how tests run change no outcome and no number."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

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
PYTHON = {"no assertions": ("-O",), "for developers": ("-X", "dev")}
Found = tuple[dict[str, int], list[str], str]


def found(
    pytester: pytest.Pytester, python: tuple[str, ...] = (), arguments: tuple[str, ...] = ()
) -> Found:
    """Return the outcomes of a run, what it says of the tests that fail, and what it stores."""
    stored = pytester.path / "__torchmem__"
    shutil.rmtree(stored, ignore_errors=True)
    result = pytester.run(
        sys.executable,
        *(*python, "-m", "pytest", "-p", "no:cacheprovider", "--torchmem-update-baseline"),
        *arguments,
    )
    outcomes = {key: n for key, n in result.parseoutcomes().items() if "warning" not in key}
    failures = [
        line
        for line in result.outlines
        if re.match("(memory|retained) .* over the limit|memory: ", line)
    ]
    (file,) = stored.glob("*/test_it.json")
    return outcomes, failures, file.read_text()


@pytest.fixture(scope="module")
def as_ever() -> dict[str, Found]:
    """What a run without options found, once for all."""
    return {}


def expect_as_ever(
    as_ever: dict[str, Found], pytester: pytest.Pytester, *options: tuple[str, ...]
) -> None:
    pytester.makepyfile(test_it=TESTS)
    if not as_ever:
        as_ever["found"] = found(pytester, ("-B",))
    outcomes, failures, _ = as_ever["found"]
    assert outcomes == {"passed": 4, "failed": 2, "xfailed": 1}
    assert len(failures) == 3
    assert found(pytester, *options) == as_ever["found"]


@pytest.mark.parametrize("name", PYTHON)
def test_an_option_of_python_changes_nothing(
    as_ever: dict[str, Found], pytester: pytest.Pytester, name: str
) -> None:
    expect_as_ever(as_ever, pytester, ("-B", *PYTHON[name]))


def test_pythons_checked_allocator_changes_nothing(
    as_ever: dict[str, Found], pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    expect_as_ever(as_ever, pytester, ("-B",))


def test_another_way_to_import_changes_nothing(
    as_ever: dict[str, Found], pytester: pytest.Pytester
) -> None:
    expect_as_ever(as_ever, pytester, ("-B",), ("--import-mode=importlib",))


@pytest.mark.parametrize("option", ["--setup-plan", "--setup-only", "--collect-only"])
def test_what_runs_no_body_neither_fails_nor_changes_what_is_stored(
    pytester: pytest.Pytester, option: str
) -> None:
    pytester.makepyfile(test_it=TESTS)
    *_, stored = found(pytester)
    (pytester.path / "test_it.py").write_text(TESTS.replace("size, 1024", "size, 2048"))
    for arguments in (
        ("--torchmem-strict", "--torchmem-require-baseline"),
        ("--torchmem-update-baseline", "--torchmem-accept=new,grown,shrunk,unused"),
    ):
        result = pytester.run(sys.executable, "-m", "pytest", option, *arguments)
        assert (result.ret, result.parseoutcomes().keys() - {"tests"}) == (0, set())
        result.stdout.no_fnmatch_line("*memory:*")
        (file,) = pytester.path.glob("__torchmem__/*/test_it.json")
        assert file.read_text() == stored
