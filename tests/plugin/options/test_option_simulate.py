"""``--torchmem-simulate``; what it does on a simulated GPU is tested in tests/simulate."""

import sys

import pytest

PLAIN = ("-p", "no:asyncio", "-p", "no:cacheprovider")


def test_a_gpu_that_nobody_knows_is_refused(pytester):
    run = pytester.runpytest_subprocess("--torchmem-simulate=H1000", *PLAIN)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*--torchmem-simulate=H1000: no GPU is called 'H1000'*"])


def test_the_ini_file_and_the_environment_name_a_gpu_too(pytester, monkeypatch):
    pytester.makeini("[pytest]\ntorchmem_simulate = H2000")
    run = pytester.runpytest_subprocess(*PLAIN)
    run.stderr.fnmatch_lines(["*: torchmem_simulate in tox.ini: no GPU is called 'H2000'*"])
    monkeypatch.setenv("TORCHMEM_SIMULATE", "H3000")
    run = pytester.runpytest_subprocess(*PLAIN)
    run.stderr.fnmatch_lines(["*: TORCHMEM_SIMULATE=H3000: no GPU is called 'H3000'*"])
    run = pytester.runpytest_subprocess("--torchmem-simulate=H4000", *PLAIN)
    run.stderr.fnmatch_lines(["*no GPU is called 'H4000'*"])


def test_a_program_that_calls_pytest_is_told_to_be_started_anew(pytester):
    pytester.makepyfile(
        runner="import pytest; raise SystemExit(pytest.main(['--torchmem-simulate=H100']))"
    )
    run = pytester.run(sys.executable, "runner.py")
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*torchmem simulate --gpu H100 -- COMMAND*not-simulated*"])


SKIPPED = """
import pytest

@pytest.mark.memory_budget({"cuda": "1GiB"})
@pytest.mark.skipif(True, reason="needs CUDA")
def test_a_step():
    pass

@pytest.mark.skip(reason="needs a disk")
def test_a_file():
    pass
"""


def test_a_test_that_is_skipped_for_want_of_a_gpu_needs_no_limit_here_and_is_told(
    pytester, monkeypatch
):
    monkeypatch.setattr("pytest_torchmem.plugin.run.controller._DRIVER", pytester.path / "none")
    monkeypatch.delenv("TORCHMEM_SIMULATED", raising=False)
    pytester.makepyfile(SKIPPED)
    run = pytester.runpytest_inprocess(*PLAIN)
    run.assert_outcomes(skipped=2)
    run.stdout.fnmatch_lines(
        ["1 test was skipped because there is no GPU; --torchmem-simulate=H100 runs it on *"]
    )


def test_where_there_is_a_gpu_none_is_offered(pytester, monkeypatch):
    monkeypatch.setattr("pytest_torchmem.plugin.run.controller._DRIVER", pytester.path)
    pytester.makepyfile(SKIPPED)
    run = pytester.runpytest_inprocess(*PLAIN)
    run.assert_outcomes(skipped=2)
    run.stdout.no_fnmatch_line("*because there is no GPU*")
