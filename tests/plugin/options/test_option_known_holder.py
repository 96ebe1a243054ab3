"""torchmem_known_holder: what limits do not count, and which entries have become stale."""

import pytest

from pytest_torchmem.analysis.judge.holders import KnownHolder
from pytest_torchmem.values.errors import MarkerError

# The engine that stands in here says that `net.CACHE` holds all that is retained.
KEEPS = """
    @pytest.mark.memory_budget(retained="1MiB")
    def test_keeps():
        use(4 * MiB, retained=True)
"""
STALE = "known holder net.OLD excused nothing in this run: remove it"


def test_a_known_holder_is_not_counted_and_the_end_says_so(project):
    project.write(KEEPS)
    project.run().assert_outcomes(failed=1)
    result = project.run("-otorchmem_known_holder=net.C* because it is kept")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["known holder net.C[*]: 4.0 MiB in 1 test (it is kept)"])


def test_a_known_holder_excuses_no_peak(project):
    project.write(KEEPS.replace("retained=", "total=", 1))
    project.run("-otorchmem_known_holder=net.* because it is kept").assert_outcomes(failed=1)


def test_of_a_whole_run_stale_entries_are_named(project):
    project.ini("torchmem_known_holder =", "    net.C* because so", "    net.OLD because then")
    project.write(KEEPS)
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([STALE])
    for part in (["test_it.py"], ["-k", "keeps"]):
        assert STALE not in project.run(*part).outlines


def test_under_xdist_the_controller_knows_what_was_excused(project):
    pytest.importorskip("xdist")
    project.ini("torchmem_known_holder =", "    net.C* because so", "    net.OLD because then")
    project.write(KEEPS)
    result = project.run_in_workers(1)
    result.stdout.fnmatch_lines(["known holder net.C[*]: 4.0 MiB in 1 test (so)", STALE])


@pytest.mark.parametrize("text", ["models.CACHE*", "* because of all", " because ", "a because "])
def test_a_holder_needs_a_name_and_a_reason(project, text):
    project.write(KEEPS)
    result = project.run(f"-otorchmem_known_holder={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*-o torchmem_known_holder: *names no holder with a reason*"])


def test_brackets_are_what_they_are_and_a_star_is_any_text():
    known = KnownHolder.read("net.CACHE['*'][0] because because")
    assert known.reason == "because"
    assert known.matches("net.CACHE['last'][0]")
    assert not known.matches("net.CACHE['last']0")
    with pytest.raises(MarkerError):
        KnownHolder.read("net.CACHE")
