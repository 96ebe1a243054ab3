"""Markers: where they can stand, which one wins, and what a bad one does."""

import pytest


def test_markers_are_registered(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        @pytest.mark.memory_budget("1GiB")
        def test_a(): use(1)
        """
    )
    project.run("--strict-markers").assert_outcomes(passed=1)
    project.run("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.memory_budget(total*", "@pytest.mark.memory_baseline(*"]
    )


def test_a_marker_works_on_function_class_module_and_param(project):
    project.write(
        """
        pytestmark = pytest.mark.memory_budget("1MiB")

        def test_module(): use(2 * MiB)

        @pytest.mark.memory_budget("3MiB")
        def test_function(): use(2 * MiB)

        @pytest.mark.memory_budget("3MiB")
        class TestClass:
            def test_class(self): use(2 * MiB)

            @pytest.mark.memory_budget("1MiB")
            def test_method(self): use(2 * MiB)

        @pytest.mark.memory_budget("1MiB")
        @pytest.mark.parametrize(
            "size",
            [2, pytest.param(3, marks=pytest.mark.memory_budget("3MiB"))],
        )
        def test_param(size): use(size * MiB)
        """
    )
    result = project.run("-rA")
    result.assert_outcomes(passed=3, failed=3)
    passed = [line for line in result.outlines if line.startswith("PASSED")]
    assert [line.split("::", 1)[1] for line in passed] == [
        "test_function",
        "TestClass::test_class",
        "test_param[3]",
    ]


def test_the_closest_marker_wins_key_by_key(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB", activation="1MiB")
        class TestClass:
            @pytest.mark.memory_budget("3MiB")
            def test_a(self): use(2 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["activation peaked at 2.0 MiB*"])
    result.stdout.no_fnmatch_line("*also: memory peaked*")


def test_a_derived_class_wins_over_its_base(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB")
        class Base:
            def test_a(self): use(2 * MiB)

        @pytest.mark.memory_budget("3MiB")
        class TestDerived(Base): pass
        """
    )
    project.run().assert_outcomes(passed=1)


def test_none_lifts_a_limit_set_further_out(project):
    project.write(
        """
        pytestmark = pytest.mark.memory_budget("1MiB")

        @pytest.mark.memory_budget(total=None)
        def test_a(): use(2 * MiB)
        """
    )
    project.run().assert_outcomes(passed=1)


def test_none_stands_for_what_the_run_has(project, monkeypatch):
    project.write(
        """
        pytestmark = [
            pytest.mark.memory_budget(warmup=3),
            pytest.mark.memory_baseline(tolerance="90%", floor="1GiB"),
        ]
        runs = []

        @pytest.mark.memory_baseline(tolerance=None, floor=None)
        @pytest.mark.memory_budget(warmup=None)
        def test_a():
            runs.append(1)
            use(3 * MiB if "GROWN" in __import__("os").environ else MiB)

        def test_b(): assert runs == [1]
        """
    )
    project.update().assert_outcomes(passed=2)
    monkeypatch.setenv("GROWN", "1")
    project.run("-otorchmem_floor=4MiB").assert_outcomes(passed=2)
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["*+2.0 MiB (+200 %) over the baseline of 1.0 MiB*"])


@pytest.mark.parametrize("given", ["2", "retained=2", "total=1023", "{'cpu': 2}"])
def test_a_bare_number_that_few_mean_as_bytes_is_asked_about(project, given):
    project.write(f"@pytest.mark.memory_budget({given})\ndef test_a(): pass")
    number = "1023" if "1023" in given else "2"
    result = project.run("--collect-only")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    asked = f"{number} alone is so many bytes; did you mean '{number}GiB' or '{number}MiB'?"
    result.stdout.fnmatch_lines([f"*::test_a: memory_budget, *{asked} *'{number}B'*bad-argument?"])


@pytest.mark.parametrize("given", ["0", "1024", "retained='2B'", "lambda: 2"])
def test_bytes_that_are_meant_are_not_asked_about(project, given):
    project.write(f"@pytest.mark.memory_budget({given})\ndef test_a(): pass")
    assert project.run("--collect-only").ret == pytest.ExitCode.OK


@pytest.mark.parametrize("unit", ["Gb", "Gib"])
def test_bits_are_asked_about_at_collection(project, unit):
    project.write(f"@pytest.mark.memory_budget('2{unit}')\ndef test_a(): pass")
    told = f"*::test_a: memory_budget, total: '2{unit}' reads as bits; did you mean '2GiB'*"
    project.run("--collect-only").stdout.fnmatch_lines([told])


def test_a_marker_added_by_a_conftest_counts(project):
    project.write("def test_a(): use(2 * MiB)")
    with (project.path / "conftest.py").open("a") as conftest:
        conftest.write(
            "\nimport pytest\n"
            "def pytest_collection_modifyitems(items):\n"
            "    for item in items: item.add_marker(pytest.mark.memory_budget('1MiB'))\n"
        )
    project.run().assert_outcomes(failed=1)


BAD = {
    "'1 Gibibyte'": "cannot read '1 Gibibyte' as a size",
    "-1": "a size cannot be negative",
    "activations='1GiB'": "no argument 'activations' (did you mean 'activation'?)",
    "peak='1GiB'": "no argument 'peak' (did you mean 'total'?)",
    "'1GiB', '2GiB'": "takes one positional argument",
    "'1GiB', total='2GiB'": "got the total twice",
    "": "needs a limit",
    "device='cpu'": "no marker sets a limit",
    "'1GiB', device=1": "1 is not a device",
    "'1GiB', warmup=-1": "-1 is not a number of runs",
    "'1GiB', warmup='1'": "'1' is not a number of runs, 0 to 1,000,000",
    "'1GiB', warmup=10**6 + 1": "1000001 is not a number of runs, 0 to 1,000,000",
    "'1GiB', warmup=10**5000": "is not a number of runs, 0 to 1,000,000",
    "True": "cannot read True as a size",
}


@pytest.mark.parametrize("arguments", BAD)
def test_a_bad_budget_argument_fails_its_test_and_no_other(project, arguments):
    project.write(
        f"""
        @pytest.mark.memory_budget({arguments})
        def test_bad(): use(1)

        @pytest.mark.memory_budget("1MiB")
        def test_good(): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(errors=1, passed=1)
    output = result.stdout.str()
    message = next(
        line for line in output.splitlines() if line.startswith("test_it.py::test_bad: ")
    )
    assert BAD[arguments] in message
    assert message.endswith("[bad-argument]")
    assert output.count(message) == 1
    assert "INTERNALERROR" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("'2%'", "takes keywords only"),
        ("tolerance='2'", "cannot read '2' as a tolerance"),
        ("tolerance=2", "cannot read 2 as a tolerance"),
        ("floor='much'", "cannot read 'much' as a size"),
        ("tolerence='2%'", "(did you mean 'tolerance'?)"),
    ],
)
def test_a_bad_baseline_argument_fails_its_test_and_no_other(project, arguments, message):
    project.write(
        f"""
        @pytest.mark.memory_baseline({arguments})
        def test_bad(): use(1)

        def test_good(): pass
        """
    )
    result = project.run()
    result.assert_outcomes(errors=1, passed=1)
    assert message in result.stdout.str()
    assert "[bad-argument]" in result.stdout.str()


def test_a_bad_argument_is_found_before_anything_runs(project):
    project.write(
        """
        @pytest.mark.memory_budget("much")
        def test_bad(): pass
        """
    )
    result = project.run("--collect-only")
    result.stdout.fnmatch_lines(["test_it.py::test_bad: memory_budget*[[]bad-argument]"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_bad_argument_is_not_the_failure_that_xfail_expects(project):
    project.write(
        """
        @pytest.mark.xfail
        @pytest.mark.memory_budget("much")
        def test_bad(): pass
        """
    )
    project.run().assert_outcomes(errors=1)


def test_warmup_runs_the_body_before_the_run_that_counts(project):
    project.write(
        """
        runs = []

        @pytest.mark.memory_budget("1MiB", warmup=2)
        def test_a():
            runs.append(fake_measure.state["recording"])
            use(2 * MiB if len(runs) < 3 else 1)

        def test_runs():
            assert runs == [False, False, True]
        """
    )
    project.run().assert_outcomes(passed=2)


def test_a_warm_up_run_that_fails_fails_the_test(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB", warmup=1)
        def test_a():
            assert fake_measure.state["recording"], "in the warm-up"
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: in the warm-up*"])


def test_a_warm_up_run_judges_no_measured_number(project):
    project.write(
        """
        runs = []

        @pytest.mark.memory_budget("1GiB", warmup=1)
        def test_a(torchmem):
            for _ in torchmem.steps(2):
                pass
            with torchmem.measure("forward") as forward:
                use(1 if runs else 2 * MiB)
            runs.append(1)
            torchmem.check(forward)
            assert forward.peak.total == 1
            runs.append("judged")

        def test_runs():
            assert runs == [1, 1, "judged"]
        """
    )
    project.run().assert_outcomes(passed=2)


def test_a_test_case_cannot_be_warmed_up_and_says_so(project):
    project.write(
        """
        import unittest

        class TestIt(unittest.TestCase):
            @pytest.mark.memory_budget("1GiB", warmup=1)
            def test_a(self): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*warmup: the body of a TestCaseFunction cannot be run twice*"])


DYNAMIC = """
@pytest.fixture
def limited(request):
    request.applymarker(pytest.mark.memory_budget("1MiB"))

@pytest.fixture
def bad(request):
    request.applymarker(pytest.mark.memory_budget("1 Gibibyte"))

@pytest.fixture
def elsewhere(request):
    request.applymarker(pytest.mark.memory_budget("1MiB", device="cuda"))
"""


def test_a_marker_added_by_a_fixture_counts(project):
    project.write(
        DYNAMIC
        + """
def test_over(limited): use(2 * MiB)

def test_within(limited): use(1 * MiB)

@pytest.mark.memory_budget("1GiB", activation="1GiB")
def test_closest(limited): use(2 * MiB)

def test_with_the_fixture(torchmem, limited): use(2 * MiB)

def test_elsewhere(elsewhere): use(1 * MiB)
"""
    )
    result = project.run()
    result.assert_outcomes(failed=2, passed=3)
    lines = [line for line in result.outlines if line.startswith("FAILED")]
    assert [line.split("::")[1].split(" ")[0] for line in lines] == [
        "test_over",
        "test_with_the_fixture",
    ]


def test_a_marker_that_a_fixture_gets_wrong_fails_its_test(project):
    project.write(
        DYNAMIC
        + """
def test_bad(bad): use(1)

@pytest.mark.xfail
def test_expected_to_fail(bad): use(1)

def test_late(torchmem, elsewhere): use(1)

def test_other(): pass
"""
    )
    result = project.run()
    result.assert_outcomes(failed=3, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_bad: memory_budget, total: cannot read '1 Gibibyte' as a size*bad-argument?",
            "*::test_late: memory_budget, device: a fixture sets it, after *bad-argument?",
        ]
    )


@pytest.mark.parametrize("fixture", ["", ", torchmem"])
def test_a_marker_added_by_the_body_is_too_late_and_is_told(project, fixture):
    project.write(
        f"""
        def test_a(request{fixture}):
            request.applymarker(pytest.mark.memory_budget("1MiB"))
            use(2 * MiB)

        def test_next(): pass
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["a memory marker was added while the body ran, *bad-argument?"])
