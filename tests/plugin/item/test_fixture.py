"""The fixture: the body and its regions, measured from inside."""

import pytest


def test_a_region_has_its_own_numbers_right_after_it(project):
    project.write(
        """
        def test_a(torchmem):
            use(1 * MiB)
            with torchmem.measure("forward") as forward:
                use(2 * MiB)
                use(3 * MiB, "gradient", retained=True)
            assert forward.peak.activation == 2 * MiB
            assert forward.retained.gradient == 3 * MiB
            assert forward.peak.total == 5 * MiB
            assert torchmem.device == "cpu"
        """
    )
    project.run().assert_outcomes(passed=1)


def test_the_fixture_alone_measures_the_body(project):
    project.write("def test_a(torchmem): use(3 * MiB)")
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_a *3.0 MiB*", "memory: 1 ok"])


def test_steps_come_after_the_warm_up(project):
    project.write(
        """
        def test_a(torchmem):
            assert list(torchmem.steps(3, warmup=2)) == [0, 1, 2, 3, 4]
            assert len(torchmem._body.measurement._steps) == 3
        """
    )
    project.run().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("measure('')", "needs the region's name"),
        ("measure(3)", "needs the region's name"),
        ("steps(0)", "cannot make 0 steps"),
        ("steps(True)", "cannot make True steps"),
        ("steps(2, warmup=-1)", "after -1 for warm-up"),
        ("steps(2, warmup=10**400)", "cannot make 2 steps after"),
        ("check('forward')", "needs a region of this body, got 'forward'"),
    ],
)
def test_a_bad_argument_fails_the_call(project, call, message):
    project.write(
        f"""
        def test_a(torchmem):
            torchmem.{call}
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    assert message in result.stdout.str()
    assert "[bad-argument]" in result.stdout.str()


def test_a_checked_region_has_its_own_entry(project):
    project.write(
        """
        import os

        def test_a(torchmem):
            use(50 * MiB)
            with torchmem.measure("forward") as forward:
                use(int(os.environ.get("SIZE", "1")) * MiB, module="net.norm")
            torchmem.check(forward)
        """
    )
    project.update().assert_outcomes(passed=1)
    assert list(project.entries()) == ["test_a::forward"]


def test_a_checked_region_that_grew_fails_the_test(project, monkeypatch):
    test_a_checked_region_has_its_own_entry(project)
    monkeypatch.setenv("SIZE", "4")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "in 'forward', memory peaked at 4.0 MiB, +3.0 MiB (+300 %) over the baseline of "
            "1.0 MiB: +3.0 MiB of activation from aten::mm at fake_measure.py:12 in net.norm"
        ]
    )


def test_a_check_can_have_its_own_tolerance(project, monkeypatch):
    project.write(
        """
        import os

        def test_a(torchmem):
            with torchmem.measure("forward") as forward:
                use(int(os.environ.get("SIZE", "100")) * MiB)
            torchmem.check(forward, tolerance="50%", floor=0)
        """
    )
    project.update()
    monkeypatch.setenv("SIZE", "149")
    project.run().assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "151")
    project.run().assert_outcomes(failed=1)


def test_two_checked_regions_need_two_names(project):
    project.write(
        """
        def test_a(torchmem):
            for _ in range(2):
                with torchmem.measure("forward") as forward:
                    use(1)
                torchmem.check(forward)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*two regions named 'forward' are checked*[[]bad-argument]"])


def test_other_fixtures_can_use_the_device_but_not_measure(project):
    project.write(
        """
        @pytest.fixture
        def model(torchmem):
            assert torchmem.device == "cpu"
            return torchmem

        @pytest.fixture
        def measured(torchmem):
            with torchmem.measure("setup"):
                pass

        def test_device(model): use(1)
        def test_measured(measured): use(1)
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*this is before the test body [[]bad-argument]"])


def test_a_region_of_an_unmeasured_body_has_no_numbers(project):
    project.write(
        """
        fake_measure.state["busy"] = True

        def test_reads(torchmem):
            with torchmem.measure("forward") as forward:
                use(1)
            assert forward.peak.total < 5

        def test_does_not_read(torchmem):
            with torchmem.measure("forward") as forward:
                use(1)
            torchmem.check(forward)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["*the region 'forward' has no peak: another profiler is active [[]not-measured]"]
    )


def test_the_fixture_explains_itself(project):
    result = project.run("--fixtures", "-v")
    result.stdout.fnmatch_lines(["torchmem *", "*Measures the memory of the test body*"])
