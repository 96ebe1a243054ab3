"""torchmem_device: where to measure when no marker says so."""

import pytest


@pytest.fixture(scope="module")
def loaded_torch():
    """Load torch before `pytester` looks: a run forgets what it imports, and torch loads once."""
    return pytest.importorskip("torch")


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
    says_device.run("-otorchmem_device=cuda").assert_outcomes(passed=2)
    says_device.run("-otorchmem_device=cpu").assert_outcomes(passed=1, failed=1)


def test_the_ini_name_does_the_same_and_the_command_line_beats_it(says_device):
    says_device.ini("torchmem_device = cuda")
    says_device.run().assert_outcomes(passed=2)
    says_device.run("-otorchmem_device=cpu").assert_outcomes(passed=1, failed=1)


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


def test_a_missing_device_that_was_typed_ends_the_run(project):
    project.write("def test_a(torchmem): use(1)")
    result = project.run("-otorchmem_device=cuda:7")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: -o torchmem_device: there is no device cuda:7; *no-device]"]
    )
    in_workers = project.run_in_workers(2, "-otorchmem_device=cuda:7")
    assert in_workers.ret == pytest.ExitCode.USAGE_ERROR


def test_a_missing_device_of_the_ini_file_skips_its_tests(project):
    project.write("def test_a(torchmem): use(1)")
    project.ini("torchmem_device = cuda:7")
    result = project.run()
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
        ["*::test_misspelt: memory_budget, device: there is no device *'cpuu'*[[]bad-argument]"]
    )


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:01"])
def test_a_name_that_no_device_has_is_a_usage_error(project, name):
    project.write("def test_a(torchmem): use(1)")
    said = f"there is no device called {name!r} on any machine*[[]bad-argument]"
    result = project.run(f"-otorchmem_device={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: -o torchmem_device: {said}"])
    project.ini(f"torchmem_device = {name}")
    result = project.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: torchmem_device in tox.ini: {said}"])


def test_a_misspelt_device_of_a_marker_is_told_at_collection(project):
    project.write('@pytest.mark.memory_budget("1KiB", device="gpu")\ndef test_a(): use(1)')
    result = project.run("--collect-only")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*::test_a: memory_budget, device: there is no device *'gpu'*"])


@pytest.mark.usefixtures("loaded_torch")
def test_torch_says_which_names_there_are(pytester):
    pytester.makepyfile("def test_a(torchmem): pass")
    for name in ("gpu", "cpuu"):
        result = pytester.runpytest_inprocess(f"-otorchmem_device={name}")
        result.stderr.fnmatch_lines([f"ERROR: *called {name!r} *they are called cpu, cuda, *"])
    for name in ("hpu", "vulkan"):  # torch knows them
        pytester.makeini(f"[pytest]\ntorchmem_device = {name}")
        pytester.runpytest_inprocess().assert_outcomes(skipped=1)


def test_none_measures_where_the_run_does(project):
    project.write(
        """
        pytestmark = pytest.mark.memory_budget("1GiB", device="cuda:7")

        @pytest.mark.memory_budget(device=None)
        def test_a(torchmem):
            use(1)
            assert torchmem.device == "cuda:0"
        """
    )
    project.run("-otorchmem_device=cuda").assert_outcomes(passed=1)


def test_the_command_that_accepts_a_change_measures_on_the_device_that_was_typed(project):
    project.write("@pytest.mark.memory_baseline(floor=0)\ndef test_a(): use(1)")
    project.run("-otorchmem_device=cpu", "--torchmem-update-baseline")
    project.write("@pytest.mark.memory_baseline(floor=0)\ndef test_a(): use(2)")
    run = project.run("-otorchmem_device=cpu")
    run.stdout.fnmatch_lines(
        ["*pytest *::test_a -o torchmem_device=cpu --torchmem-update-baseline"]
    )


@pytest.mark.usefixtures("loaded_torch")
def test_a_device_without_memory_ends_the_run_with_what_to_do(pytester):
    pytester.makepyfile("def test_a(torchmem): pass")
    result = pytester.runpytest_inprocess("-otorchmem_device=meta")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            "ERROR: -o torchmem_device: meta cannot be measured: its tensors have no memory; "
            "measure on cpu, or on a simulated GPU with --torchmem-simulate=H100 ?bad-argument?"
        ]
    )


@pytest.mark.usefixtures("loaded_torch")
def test_a_device_that_cannot_be_measured_is_not_said_to_want_a_gpu(pytester, monkeypatch):
    monkeypatch.setattr("pytest_torchmem.plugin.run.controller._DRIVER", pytester.path / "none")
    monkeypatch.delenv("TORCHMEM_SIMULATED", raising=False)
    pytester.makepyfile("def test_a(torchmem): pass")
    pytester.makeini("[pytest]\ntorchmem_device = fpga")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(
        ["not measured: *::test_a: fpga cannot be measured here: torch has no memory statistics *"]
    )
    result.stdout.no_fnmatch_line("*because there is no GPU*")
