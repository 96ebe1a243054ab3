"""torchmem_level: a limit on a GPU is answered by the allocator's counters where they can."""

import pytest

ON_GPU = "-otorchmem_device=cuda"


@pytest.fixture
def limited(project):
    project.write(
        """
        @pytest.mark.memory_budget("10MiB")
        def test_limit():
            use(8 * MiB)
            print("ran as number", fake_measure.state["counted"], fake_measure.state["starts"])
        """
    )
    return project


def runs(result):
    return result.stdout.str().count("ran as number")


def test_a_limit_that_the_counters_prove_needs_no_recording(limited):
    result = limited.run(ON_GPU, "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*ran as number 1 0*", "test_it.py::test_limit *at most 8.0 MiB*"])
    assert runs(result) == 1


def test_full_records_every_test(limited):
    result = limited.run(ON_GPU, "-s", "-otorchmem_level=full")
    result.stdout.fnmatch_lines(["*ran as number 0 1*", "test_it.py::test_limit  8.0 MiB*"])


def test_the_ini_name_does_the_same(limited):
    limited.ini("torchmem_level = full")
    limited.run(ON_GPU, "-s").stdout.fnmatch_lines(["*ran as number 0 1*"])


def test_what_is_retained_is_answered_without_a_recording(project):
    project.write(
        """
        @pytest.mark.memory_budget("10MiB", retained="2MiB")
        def test_limit():
            use(6 * MiB)
            use(2 * MiB, retained=True)
            print("ran as number", fake_measure.state["counted"], fake_measure.state["starts"])
        """
    )
    result = project.run(ON_GPU, "-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["*ran as number 1 0*", "test_it.py::test_limit *at most 8.0 MiB * 2.0 MiB *"]
    )


def test_more_retained_than_allowed_is_explained_by_a_second_run(project):
    project.write(
        """
        @pytest.mark.memory_budget(retained="1MiB")
        def test_limit():
            use(2 * MiB, retained=True)
            print("ran as number", fake_measure.state["counted"], fake_measure.state["starts"])
        """
    )
    result = project.run(ON_GPU, "-s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*ran as number 1 0*", "*ran as number 1 1*", "*2.0 MiB *still held by net.CACHE*"]
    )


def test_an_accelerator_without_a_history_is_recorded_for_what_is_retained(project):
    project.write(
        """
        @pytest.mark.memory_budget(retained="1MiB")
        def test_limit():
            print("ran as number", fake_measure.state["counted"], fake_measure.state["starts"])
        """
    )
    result = project.run("-otorchmem_device=xpu", "-s")
    result.stdout.fnmatch_lines(["*ran as number 0 1*"])


def test_on_the_cpu_which_has_no_counters_everything_is_recorded(limited):
    limited.run("-s").stdout.fnmatch_lines(["*ran as number 0 1*"])


def test_what_others_left_behind_fails_nobody(project):
    project.write(
        """
        fake_measure.state["rubbish"] = 50 * MiB

        @pytest.mark.memory_budget("10MiB")
        def test_limit(): use(8 * MiB)
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_limit  8.0 MiB *80% of limit"])


def test_a_limit_that_is_exceeded_is_explained_by_a_second_run(project):
    project.write(
        """
        @pytest.mark.memory_budget("10MiB")
        def test_limit():
            use(12 * MiB)
            print("ran as number", fake_measure.state["counted"], fake_measure.state["starts"])
        """
    )
    result = project.run(ON_GPU, "-s")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*ran as number 1 0*",
            "*ran as number 1 1*",
            "memory peaked at 12.0 MiB, +2.0 MiB (+20 %) over the limit of 10.0 MiB: "
            "largest 12.0 MiB of activation from aten::mm at *",
        ]
    )


def test_a_first_run_that_was_over_for_certain_fails_though_the_second_is_not(project):
    project.write(
        """
        sizes = [12 * MiB, 8 * MiB]

        @pytest.mark.memory_budget("10MiB")
        def test_limit(): use(sizes.pop(0))
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "memory peaked at 12.0 MiB, +2.0 MiB (+20 %) over the limit of 10.0 MiB; the "
            "allocator counted that in a first run, and the recorded second run stayed below"
        ]
    )


def test_an_exception_of_the_second_run_is_the_tests_own(project):
    project.write(
        """
        sizes = [12 * MiB]

        @pytest.mark.memory_budget("10MiB")
        def test_limit(): use(sizes.pop())
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *IndexError: pop from empty list"])


def test_an_exception_of_the_counted_run_is_the_tests_own(project):
    project.write(
        """
        @pytest.mark.memory_budget("10MiB")
        def test_limit():
            use(12 * MiB)
            assert fake_measure.state["starts"]
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(failed=1)
    assert "peaked at" not in result.stdout.str()


@pytest.mark.parametrize(
    "test",
    [
        '@pytest.mark.memory_budget(activation="9MiB")\ndef test_a(): use(MiB); look()',
        '@pytest.mark.memory_budget(retained="9MiB", temporary="9MiB")\n'
        "def test_a(): use(MiB); look()",
        '@pytest.mark.memory_budget("9MiB")\n@pytest.mark.memory_baseline\n'
        "def test_a(): use(MiB); look()",
        '@pytest.mark.memory_budget("9MiB")\ndef test_a(torchmem): use(MiB); look()',
        "import unittest\nclass TestA(unittest.TestCase):\n"
        '    @pytest.mark.memory_budget("9MiB")\n    def test_a(self): use(MiB); look()',
    ],
    ids=["category", "retained and a category", "baseline", "fixture", "TestCase"],
)
def test_what_counters_cannot_answer_is_recorded_at_once(project, test):
    project.write(
        "def look():\n"
        '    assert (fake_measure.state["counted"], fake_measure.state["starts"]) == (0, 1)\n\n'
        + test
    )
    project.run(ON_GPU).assert_outcomes(passed=1)


def test_a_report_needs_what_a_recording_knows(limited):
    result = limited.run(ON_GPU, "-s", "--torchmem-report=mem.json")
    result.stdout.fnmatch_lines(["*ran as number 0 1*"])


def test_limits_on_counters_are_counted(project):
    project.write(
        """
        @pytest.mark.memory_budget(reserved="4MiB", allocated="1MiB")
        def test_enough():
            use(MiB)
            assert not fake_measure.state["starts"]

        @pytest.mark.memory_budget(reserved="3MiB")
        def test_too_much(): use(MiB)
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["reserved memory peaked at 4.0 MiB, +1.0 MiB (+33 %) over the limit of 3.0 MiB: *"]
    )


def test_a_body_that_asks_for_the_fixture_while_it_runs_is_recorded(project):
    project.write(
        """
        @pytest.mark.memory_budget("10MiB")
        def test_limit(request):
            torchmem = request.getfixturevalue("torchmem")
            with torchmem.measure("part") as part:
                use(2 * MiB)
            assert part.peak.total == 2 * MiB
        """
    )
    result = project.run(ON_GPU)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_limit  2.0 MiB*"])


def test_a_wrong_word_stops_the_run(limited):
    result = limited.run("-otorchmem_level=deep")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: -o torchmem_level: 'deep' is not one of auto, full [[]bad-argument]"]
    )
