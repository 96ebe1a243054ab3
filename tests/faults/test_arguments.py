"""Arguments of markers and options, of any length and kind: an error of their own, no crash."""

from __future__ import annotations

import pytest

from tests.project import Project

pytestmark = pytest.mark.slow

VALUES = """
HOSTILE = [
    "9" * 5000 + "B", "9" * 400 + ".0B", "1iB", "", "\\x1b[31m", "٣MiB", "\\udcff", -1, 10**400,
    -(10**5000), float("nan"), float("inf"), 1.5, True, [], {}, {"cpu": "9" * 5000 + "B"},
    {"": 1}, {1: 1}, b"1MiB", object(), lambda: 10**400, lambda: float("nan"), lambda: 1 / 0,
    lambda: "9" * 5000, lambda: None, ("1MiB",), "1MiB" * 5000,
]
"""

TESTS = (
    VALUES
    + """
@pytest.mark.parametrize("n", [pytest.param(
    n, marks=pytest.mark.memory_budget(v), id=str(n)) for n, v in enumerate(HOSTILE)])
def test_limits(n): use(MiB)

@pytest.mark.parametrize("n", [pytest.param(
    n, marks=pytest.mark.memory_baseline(tolerance=v), id=str(n)) for n, v in enumerate(HOSTILE)])
def test_tolerances(n): use(MiB)

@pytest.mark.parametrize("n", [pytest.param(
    n, marks=pytest.mark.memory_baseline(floor=v), id=str(n)) for n, v in enumerate(HOSTILE)])
def test_floors(n): use(MiB)

@pytest.mark.parametrize("n", [pytest.param(
    n, marks=pytest.mark.memory_budget("9GiB", warmup=v), id=str(n))
    for n, v in enumerate(HOSTILE)])
def test_warmups(n): use(MiB)

@pytest.mark.parametrize("n", [pytest.param(
    n, marks=pytest.mark.memory_budget("9GiB", device=v), id=str(n))
    for n, v in enumerate(HOSTILE)])
def test_devices(n): use(MiB)

@pytest.mark.memory_budget("9GiB")
def test_next(): use(MiB)
"""
)


def test_no_argument_of_a_marker_fails_more_than_its_own_test(project: Project) -> None:
    project.write(TESTS)
    result = project.run_apart("-q", "--tb=short")
    text = "\n".join([*result.outlines, *result.errlines])
    assert "INTERNALERROR" not in text
    assert "pytest_torchmem/" not in "\n".join(o for o in result.outlines if o.startswith("E "))
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] <= 8, "most of these values mean nothing"
    assert sum(outcomes.values()) == 28 * 5 + 1
    assert not any("::test_next" in line for line in result.outlines if "ERROR" in line)
    wrong = ("OverflowError", "KeyError", "RecursionError", "AttributeError")
    assert not any(line.startswith("E   " + w) for line in result.outlines for w in wrong)


@pytest.mark.parametrize(
    "option",
    [
        "--torchmem-repeat={}",
        "-otorchmem_tolerance={}",
        "-otorchmem_floor={}",
        "-otorchmem_device={}",
        "--torchmem-accept={}",
        "--torchmem-summary={}",
        "--torchmem={}",
        "--torchmem-report=x.{}",
        "-otorchmem_world={}",
        "--torchmem-simulate={}",
    ],
)
def test_a_value_of_an_option_that_means_nothing_is_one_line(project: Project, option: str) -> None:
    project.write("@pytest.mark.memory_budget('9GiB')\ndef test_a(): use(MiB)\n")
    for value in ("9" * 5000, "\x1b[31m", "²", "-1", "nan", "1e400"):
        result = project.run("--torchmem-update-baseline", option.format(value))
        assert result.ret == 4, (option, value[:20])
        said = [line for line in result.errlines if line.startswith("ERROR: ")]
        assert len(said) == 1
        assert "Traceback" not in "\n".join([*result.outlines, *result.errlines])
