"""torchmem_tolerance: how far above its baseline a number may be, as a share of it."""

import pytest


def test_the_default_is_two_percent(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "102")
    sized.run().assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "103")
    result = sized.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "memory peaked at 103.0 MiB, +3.0 MiB (+3 %) over the baseline of 100.0 MiB: "
            "+3.0 MiB of activation from aten::mm at fake_measure.py:12 in net.fc",
            "grown against the baseline (tolerance 2 %), in all *",
        ]
    )


def test_the_command_line_beats_the_ini_file(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "108")
    sized.ini("torchmem_tolerance = 10%")
    sized.run().assert_outcomes(passed=1)
    sized.run("-otorchmem_tolerance=0.05").assert_outcomes(failed=1)


def test_a_marker_beats_both(project, monkeypatch):
    project.write(
        """
        import os

        @pytest.mark.memory_baseline(tolerance="50%")
        def test_a(): use(int(os.environ.get("SIZE", "100")) * MiB)
        """
    )
    project.update()
    monkeypatch.setenv("SIZE", "149")
    project.run("-otorchmem_tolerance=1%").assert_outcomes(passed=1)


@pytest.mark.parametrize("value", ["2", "much", "-1%"])
def test_a_value_that_means_nothing_is_a_usage_error(sized, value):
    result = sized.run(f"-otorchmem_tolerance={value}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: -o torchmem_tolerance*[[]bad-size]"])


def test_the_message_names_the_option_and_the_missing_sign(sized):
    for given, said in (("2", "*'2' *percent need the sign: '2%'*"), ("much", "*such as '2%'*")):
        result = sized.run(f"-otorchmem_tolerance={given}")
        result.stderr.fnmatch_lines([f"ERROR: -o torchmem_tolerance: cannot read {said}"])
    result = sized.run("-otorchmem_floor=2")
    result.stderr.fnmatch_lines(
        ["ERROR: -o torchmem_floor: cannot read '2' as a size*[[]bad-size]"]
    )


@pytest.mark.parametrize("tolerance", ["100%", "200%"])
def test_a_number_may_be_twice_and_three_times_its_baseline(sized, monkeypatch, tolerance):
    sized.update()
    monkeypatch.setenv("SIZE", "199")
    sized.run(f"-otorchmem_tolerance={tolerance}").assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "301")
    sized.run(f"-otorchmem_tolerance={tolerance}").assert_outcomes(failed=1)


def test_where_a_limit_fails_too_the_advice_says_so(project, monkeypatch):
    project.write(
        """
        import os

        @pytest.mark.memory_budget("120MiB")
        @pytest.mark.memory_baseline
        def test_a(): use(int(os.environ.get("SIZE", "100")) * MiB)
        """
    )
    project.update()
    monkeypatch.setenv("SIZE", "110")
    project.run().stdout.fnmatch_lines(["if this change is wanted, accept it: pytest *"])
    monkeypatch.setenv("SIZE", "130")
    project.run().stdout.fnmatch_lines(
        ["if this change is wanted, raise the limit and accept it: pytest *"]
    )
