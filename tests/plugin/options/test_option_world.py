"""``torchmem_world``; what a rank does is tested in tests/simulate."""

import pytest

PLAIN = ("-p", "no:asyncio", "-p", "no:cacheprovider")


def test_it_is_refused_without_a_simulated_gpu_where_it_is_typed(pytester):
    run = pytester.runpytest_subprocess("-otorchmem_world=8", *PLAIN)
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines(["*add --torchmem-simulate=H100*bad-argument*"])


def test_in_the_ini_file_it_waits_for_a_simulated_gpu(pytester):
    pytester.makeini("[pytest]\ntorchmem_world = 8")
    assert pytester.runpytest_subprocess(*PLAIN).ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("size", ["many", "0"])
def test_a_world_of_no_ranks_is_refused(pytester, size):
    run = pytester.runpytest_subprocess(
        "--torchmem-simulate=L4", f"-otorchmem_world={size}", *PLAIN
    )
    assert run.ret == pytest.ExitCode.USAGE_ERROR
    run.stderr.fnmatch_lines([f"*world*{size}*"])
