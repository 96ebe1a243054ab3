"""--torchmem-strict: what asked to be measured and could not be fails."""

import pytest


@pytest.fixture
def busy(project):
    project.write(
        """
        fake_measure.state["busy"] = True

        @pytest.mark.memory_baseline
        def test_baseline(): use(1)

        def test_fixture(torchmem): use(1)

        def test_unmeasured(): use(1)
        """
    )
    return project


def test_an_unmeasured_body_passes_and_is_named_without_the_option(busy):
    result = busy.run()
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        [
            "not measured: test_it.py::test_baseline, test_it.py::test_fixture: "
            "another profiler is active [[]not-measured]",
            "memory: 2 not measured",
        ]
    )


def test_an_unmeasured_body_fails_with_it(busy):
    result = busy.run("--torchmem-strict")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["the body was not measured: another profiler is active*"])


def test_a_missing_device_fails_with_it(project):
    project.write("def test_a(torchmem): use(1)")
    project.ini("torchmem_device = cuda:1")
    result = project.run("--torchmem-strict")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["not measured: there is no device cuda:1; *[[]no-device]"])


def test_the_ini_name_does_the_same(busy):
    busy.ini("torchmem_strict = true")
    busy.run().assert_outcomes(passed=1, failed=2)


def test_an_update_stores_nothing_for_an_unmeasured_body(busy):
    busy.update()
    assert not busy.baseline().exists()
