"""torchmem_require_baseline: a missing baseline fails its test."""


def test_a_missing_baseline_passes_without_the_option(sized):
    sized.run().assert_outcomes(passed=1)


def test_a_missing_baseline_fails_in_one_line_and_the_end_of_the_run_says_what_to_do(sized):
    result = sized.run("-otorchmem_require_baseline=true")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "there is no baseline for test_a in __torchmem__/cpu-torch2.99/test_it.json "
            "[[]no-baseline]",
            "1 measurement has no baseline; --torchmem-update-baseline stores it",
        ]
    )
    result.stdout.no_fnmatch_line("live at the peak*")


def test_a_stored_baseline_is_enough(sized):
    sized.update()
    sized.run("-otorchmem_require_baseline=true").assert_outcomes(passed=1)


def test_an_update_stores_what_is_required(sized):
    sized.update("-otorchmem_require_baseline=true").assert_outcomes(passed=1)
    assert sized.baseline().exists()


def test_the_ini_name_does_the_same(sized):
    sized.ini("torchmem_require_baseline = true")
    sized.run().assert_outcomes(failed=1)


def test_a_region_needs_its_own(project):
    project.write(
        """
        def test_a(torchmem):
            with torchmem.measure("forward") as forward: use(1)
            torchmem.check(forward)
        """
    )
    result = project.run("-otorchmem_require_baseline=true")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*no baseline for test_a::forward in *"])


def test_ci_is_told_to_use_the_option_only_where_it_does_not(sized, monkeypatch):
    monkeypatch.setenv("CI", "true")
    hint = "*so CI passes whatever the body needs*"
    sized.run().stdout.fnmatch_lines([hint])
    sized.run("-otorchmem_require_baseline=true").stdout.no_fnmatch_line(hint)
