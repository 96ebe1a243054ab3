"""--torchmem=off: every test runs unmeasured, with the fixture as without."""

import pytest

OFF = "--torchmem=off"
TOLD = "off: no test was measured, and no limit and no baseline was checked"


def test_what_fails_when_measured_runs_unmeasured(project):
    project.write(
        """
        @pytest.mark.memory_budget("1KiB", warmup=2)
        def test_limit():
            use(9)
            print("ran")

        @pytest.mark.memory_baseline
        def test_baseline(): use(9)

        def test_checked(torchmem):
            assert torchmem.device == "cpu"
            for step in torchmem.steps(3, warmup=2):
                use(9)
            assert step == 4
            with torchmem.measure("part") as part:
                use(9)
            torchmem.check(part)
        """
    )
    project.run("-otorchmem_require_baseline=true").assert_outcomes(failed=2, passed=1)
    told = project.run(OFF, "-otorchmem_require_baseline=true", "-otorchmem_strict=true", "-s")
    told.assert_outcomes(passed=3)
    assert told.outlines.count(TOLD) == 1
    assert told.stdout.str().count("ran") == 1


def test_a_trace_is_not_saved_and_a_region_says_that_it_has_no_numbers(project):
    project.write(
        """
        def test_a(torchmem):
            with torchmem.measure("part") as part:
                use(9)
            torchmem.save_trace("step.npz")
            assert repr(part) == "<'part': not measured>"
        """
    )
    project.run(OFF).assert_outcomes(passed=1)
    assert not (project.path / "step.npz").exists()


def test_a_body_still_fails_by_its_own_error(project):
    project.write("def test_a(torchmem):\n    assert 1 + 1 == 3\n")
    project.run(OFF).assert_outcomes(failed=1)


def test_where_a_number_is_read_the_test_is_skipped_there(project):
    project.write(
        """
        def test_a(torchmem):
            with torchmem.measure("part") as part:
                use(9 * MiB)
            print("until here")
            assert part.peak.total <= 1
        """
    )
    project.run().assert_outcomes(failed=1)
    told = project.run(OFF, "-rs", "-s")
    told.assert_outcomes(skipped=1)
    told.stdout.fnmatch_lines(
        ["*until here*", "*not measured: --torchmem=off * reads 'peak' of 'part'"]
    )


def test_an_estimate_has_no_numbers_either(project):
    project.write(
        """
        def test_a(torchmem):
            step = torchmem.estimate(print)
            assert step.peak.total <= 1
        """
    )
    project.run(OFF).assert_outcomes(skipped=1)


def test_a_fixture_that_the_body_itself_asks_for_measures_nothing(project):
    project.write(
        """
        def test_a(request):
            torchmem = request.getfixturevalue("torchmem")
            with torchmem.measure("part"):
                use(1)
            assert not fake_measure.state["starts"]
        """
    )
    project.run(OFF).assert_outcomes(passed=1)


def test_a_missing_device_skips_its_test(project):
    project.write(
        """
        @pytest.mark.memory_budget("1GiB", device="cuda:1")
        def test_a(): use(1)
        """
    )
    project.run(OFF, "--torchmem-strict").assert_outcomes(skipped=1)


def test_no_report_is_written_and_no_entry_is_missed(sized):
    sized.update()
    told = sized.run(OFF, "--torchmem-report=mem.json", "-otorchmem_baseline_all=1B")
    told.assert_outcomes(passed=1)
    assert not (sized.path / "mem.json").exists()
    told.stdout.no_fnmatch_line("*unused*")


def test_on_is_the_default_and_wins_where_it_is_typed_last(sized, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", OFF)
    sized.run().stdout.fnmatch_lines([TOLD])
    sized.run("--torchmem=on").stdout.fnmatch_lines(["1 measurement has no baseline; *"])


@pytest.mark.parametrize("option", ["--torchmem-update-baseline", "--torchmem-ci"])
def test_what_needs_numbers_is_refused_beside_it(sized, option):
    told = sized.run(OFF, option)
    assert told.ret == pytest.ExitCode.USAGE_ERROR
    told.stderr.fnmatch_lines([f"ERROR: --torchmem=off measures nothing, which {option} needs; *"])


def test_workers_measure_nothing_and_it_is_said_once(sized):
    told = sized.run_in_workers(2, OFF)
    told.assert_outcomes(passed=1)
    assert told.outlines.count(TOLD) == 1
