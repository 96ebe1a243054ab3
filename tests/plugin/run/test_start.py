"""A run that measures nothing pays for next to nothing."""

import subprocess
import sys

import pytest

LEAN = {
    "pytest_torchmem",
    "pytest_torchmem.plugin",
    "pytest_torchmem.plugin.stash",
    "pytest_torchmem.plugin.hooks",
    "pytest_torchmem.plugin.hookspecs",
    "pytest_torchmem.plugin.options",
    "pytest_torchmem.plugin.options.option_table",
    "pytest_torchmem.plugin.run",
    "pytest_torchmem.plugin.run.workers",
    "pytest_torchmem.simulate",
}


def loaded(*arguments: str, test: str = "pass", tmp_path) -> set[str]:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n{test}\n", encoding="utf-8")
    (tmp_path / "conftest.py").write_text(
        "import sys\n\ndef pytest_unconfigure():\n"
        "    print('loaded', *(m for m in sys.modules if m.startswith('pytest_torchmem')))\n",
        encoding="utf-8",
    )
    command = (sys.executable, "-m", "pytest", "-q", "-s", *arguments, str(tmp_path))
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (line,) = [line for line in ran.stdout.splitlines() if "loaded pytest_torchmem" in line]
    return set(line.split("loaded ")[1].split())


def test_a_run_without_a_measured_test_loads_what_registers_the_plugin_and_no_more(tmp_path):
    assert loaded(test="def test_a(): pass", tmp_path=tmp_path) == LEAN


@pytest.mark.slow
@pytest.mark.nightly("baseline", "fixture asked for later")
@pytest.mark.parametrize(
    ("arguments", "test"),
    [
        (("--torchmem-summary=all",), "def test_a(): pass"),
        ((), "def test_a(torchmem): pass"),
        ((), '@pytest.mark.memory_budget("1GiB")\ndef test_a(): pass'),
        ((), "@pytest.mark.memory_baseline\ndef test_a(): pass"),
        ((), "def test_a(request): request.getfixturevalue('torchmem')"),
        (("-p", "xdist", "-n1"), "def test_a(): pass"),
    ],
    ids=["option", "fixture", "budget", "baseline", "fixture asked for later", "xdist"],
)
def test_whatever_asks_for_a_measurement_loads_the_rest(tmp_path, arguments, test):
    assert loaded(*arguments, test=test, tmp_path=tmp_path) > LEAN


def test_every_change_that_can_be_stored_can_be_accepted():
    from pytest_torchmem.plugin.options.settings import ACCEPTABLE
    from pytest_torchmem.values.baseline import Change

    not_stored = {Change.SAME, Change.WITHIN, Change.NOT_COMPARED, Change.GONE}
    assert set(ACCEPTABLE) == set(Change) - not_stored


@pytest.mark.slow
def test_tests_of_plugins_that_run_pytest_in_their_own_process_are_measured(pytester):
    """Pytester forgets what such a run has imported, and torch cannot register operators twice."""
    pytester.makeconftest("pytest_plugins = 'pytester'")
    pytester.makepyfile(
        """
        import torch

        MEASURED = '''
        import pytest, torch

        @pytest.mark.memory_budget("1MiB")
        def test_it():
            x = torch.ones(256, requires_grad=True)
            (x * 2).sum().backward()
        '''

        def test_twice(pytester):
            pytester.makepyfile(MEASURED)
            for _ in range(2):
                pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
        """
    )
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
