"""--torchmem-floor: an increase of no more than this never fails, however small the baseline."""


def test_the_default_is_one_mebibyte(sized, monkeypatch):
    monkeypatch.setenv("SIZE", "3")
    sized.update()
    monkeypatch.setenv("SIZE", "4")
    sized.run().assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "5")
    result = sized.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*2.0 MiB over the baseline of 3.0 MiB (floor 1.0 MiB): *"])


def test_the_command_line_beats_the_ini_file(sized, monkeypatch):
    monkeypatch.setenv("SIZE", "3")
    sized.update()
    monkeypatch.setenv("SIZE", "5")
    sized.ini("torchmem_floor = 2MiB")
    sized.run().assert_outcomes(passed=1)
    sized.run("--torchmem-floor=1MiB").assert_outcomes(failed=1)


def test_the_larger_of_tolerance_and_floor_decides(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "104")
    sized.run("--torchmem-floor=4MiB", "--torchmem-tolerance=1%").assert_outcomes(passed=1)
    sized.run("--torchmem-floor=1MiB", "--torchmem-tolerance=4%").assert_outcomes(passed=1)
    sized.run("--torchmem-floor=3MiB", "--torchmem-tolerance=3%").assert_outcomes(failed=1)


def test_a_value_that_means_nothing_is_a_usage_error(sized):
    result = sized.run("--torchmem-floor=1")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --torchmem-floor: cannot read '1'*"])
