"""--torchmem-repeat: an update measures several times and refuses what is not stable."""

import pytest

WOBBLY = """
RUNS = []

@pytest.mark.memory_baseline
def test_a(torchmem):
    RUNS.append(1)
    with torchmem.measure("part") as part:
        use({size} * MiB)
    assert part.peak.total
    torchmem.check(part)

def test_count(): print("runs:", len(RUNS))
"""


def repeat(project, *arguments):
    return project.update("--torchmem-repeat=3", "-s", *arguments)


def test_a_stable_body_is_stored_with_its_regions(project):
    project.write(WOBBLY.format(size=5))
    result = repeat(project)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*runs: 3*"])
    assert sorted(project.entries()) == ["test_a", "test_a::part"]


def test_an_unstable_body_is_refused_with_its_spread(project):
    project.write(WOBBLY.format(size="(10 + 7 * len(RUNS))"))
    result = repeat(project)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*is not stable, so nothing is stored: 3 runs had 17.0 MiB, 24.0 MiB, 31.0 MiB, "
            "a spread of 14.0 MiB (floor 870.4 KiB); each has more than the one before: the runs "
            "share the test's fixtures [[]unstable]"
        ]
    )
    assert not project.baseline().exists()


def test_a_body_that_varies_is_not_told_of_fixtures(project):
    project.write(WOBBLY.format(size="[0, 30, 10, 20][len(RUNS)]"))
    result = repeat(project)
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*30.0 MiB, 10.0 MiB, 20.0 MiB, a spread of * [[]unstable]"])
    result.stdout.no_fnmatch_line("*the test's fixtures*")


def test_the_runs_share_the_fixtures_of_the_test(project):
    project.write(
        """
        made = []

        @pytest.fixture
        def state():
            made.append(1)
            return []

        @pytest.mark.memory_baseline
        def test_a(state):
            state.append(1)
            use(10 * MiB)

        def test_count(): assert made == [1]
        """
    )
    repeat(project).assert_outcomes(passed=2)


def test_a_cold_first_run_is_told_how_to_warm_up(project):
    project.write(WOBBLY.format(size="(50 if len(RUNS) == 1 else 10)"))
    result = repeat(project)
    result.stdout.fnmatch_lines(["*only the first run differs: warm up with memory_budget(*"])
    project.write(
        WOBBLY.format(size="(50 if len(RUNS) == 1 else 10)").replace(
            "@pytest.mark.memory_baseline",
            "@pytest.mark.memory_baseline\n@pytest.mark.memory_budget(warmup=1)",
        )
    )
    repeat(project).assert_outcomes(passed=2)


def test_a_spread_within_the_tolerance_is_stored(project):
    project.write(WOBBLY.format(size="(500 + len(RUNS))"))
    repeat(project).assert_outcomes(passed=2)
    assert project.entries()["test_a"]["total"] == 503 << 20


def test_without_an_update_the_body_runs_once(project):
    project.write(WOBBLY.format(size="(10 + 7 * len(RUNS))"))
    result = project.run("-s")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*runs: 1*"])


def test_what_the_body_raises_in_an_earlier_run_comes_out(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_skips():
            use(MiB)
            pytest.skip("not today")

        @pytest.mark.memory_baseline
        def test_fails():
            use(MiB)
            assert 0, "mine"

        @pytest.mark.memory_baseline
        def test_passes(): use(MiB)
        """
    )
    repeat(project).assert_outcomes(skipped=1, failed=1, passed=1)


@pytest.mark.parametrize("value", ["0", "-1", "some", "1000001", "0" * 5000 + "3"])
def test_a_number_without_meaning_is_refused(sized, value):
    result = sized.update(f"--torchmem-repeat={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*is not a number of runs, 1 to 1,000,000*"])
