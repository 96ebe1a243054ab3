"""--torchmem-device: where to measure when no marker says so."""

import pytest


@pytest.fixture
def says_device(project):
    project.write(
        """
        def test_run(torchmem):
            use(1)
            assert torchmem.device == "cuda:0"

        @pytest.mark.memory_budget("1B", device="cpu")
        def test_marker(torchmem):
            use(1)
            assert torchmem.device == "cpu"
        """
    )
    return project


def test_the_option_chooses_the_device_and_a_marker_beats_it(says_device):
    says_device.run("--torchmem-device=cuda").assert_outcomes(passed=2)
    says_device.run("--torchmem-device=cpu").assert_outcomes(passed=1, failed=1)


def test_the_ini_name_does_the_same_and_the_command_line_beats_it(says_device):
    says_device.ini("torchmem_device = cuda")
    says_device.run().assert_outcomes(passed=2)
    says_device.run("--torchmem-device=cpu").assert_outcomes(passed=1, failed=1)


def test_a_missing_device_skips_its_tests_with_one_message(project):
    project.write(
        """
        @pytest.fixture
        def on_device():
            raise ValueError("the device is missing")

        @pytest.mark.memory_budget("1GiB", device="cuda:1")
        def test_a(on_device): use(1)

        @pytest.mark.memory_budget("1GiB", device="cuda:1")
        def test_b(): use(1)

        @pytest.mark.memory_budget("1GiB")
        def test_c(): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(skipped=2, passed=1)
    lines = [line for line in result.outlines if "there is no device cuda:1" in line]
    assert lines == [
        "not measured: test_it.py::test_a, test_it.py::test_b: there is no device cuda:1; "
        "this machine has cpu, cuda:0 [no-device]"
    ]


def test_a_missing_device_asked_for_by_the_run_skips_too(project):
    project.write("def test_a(torchmem): use(1)")
    result = project.run("--torchmem-device=cuda:7")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["not measured: test_it.py::test_a: there is no device cuda:7*"])


def test_a_name_that_no_device_has_fails_its_test(project):
    project.write(
        """
        @pytest.mark.memory_budget("1KiB", device="cpuu")
        def test_misspelt(): use(1)

        @pytest.mark.xfail
        @pytest.mark.memory_budget("1KiB", device="cpuu")
        def test_expected_to_fail(): use(1)

        @pytest.mark.memory_budget("1KiB", device="cpu")
        def test_right(): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(errors=2, passed=1)
    result.stdout.fnmatch_lines(
        ["test_it.py::test_misspelt: there is no device called 'cpuu' on any machine [[]bad-arg*"]
    )


def test_a_misspelt_device_of_the_run_fails_its_tests(project):
    project.write(
        """
        def test_a(torchmem): use(1)

        def test_asks_in_its_body(request):
            request.getfixturevalue("torchmem")
        """
    )
    result = project.run("--torchmem-device=gpu")
    result.assert_outcomes(errors=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.no_fnmatch_line("*pytest_torchmem*.py:*")
