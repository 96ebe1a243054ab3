"""``torchmem.estimate`` in a test, and limits that only a GPU could answer on a machine without."""

from __future__ import annotations

import json
from inspect import signature

from pytest_torchmem import Torchmem, estimate


def failure(result):
    """Return the first line of the only failure."""
    lines = result.stdout.lines
    start = next(n for n, line in enumerate(lines) if line.startswith("____"))
    return lines[start + 1]


def test_a_reserved_limit_without_a_gpu_is_held_against_a_simulation(project):
    project.write(
        """
        @pytest.mark.memory_budget(reserved="30MiB")
        def test_it(): use(33 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    assert failure(result).startswith(
        "reserved memory peaked at an estimated 34.0 MiB, +4.0 MiB (+13 %) over the limit of "
        "30.0 MiB: "
    )
    result.stdout.fnmatch_lines(
        ["note: reserved memory is estimated: *, simulated over the allocations on cpu*"]
    )


def test_a_reserved_limit_that_the_simulation_keeps_passes(project):
    project.write(
        """
        @pytest.mark.memory_budget(reserved="34MiB", allocated="34MiB", active="34MiB")
        def test_it(): use(33 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*within limits (allocated, active, reserved estimated)"])


def test_a_gpu_that_counts_is_not_simulated(project):
    project.write(
        """
        @pytest.mark.memory_budget(reserved="3MiB", device="cuda")
        def test_it(): use(33 * MiB)
        """
    )
    result = project.run()
    assert failure(result).startswith("reserved memory peaked at 4.0 MiB, ")


def test_an_estimate_is_a_result_for_plain_asserts(project):
    project.write(
        """
        def test_it(torchmem):
            estimate = torchmem.estimate(lambda size: size, 33 * MiB, name="step")
            assert estimate.estimated
            assert estimate.peak.total == estimate.peak.activation == 33 * MiB
            assert estimate.fits("64MiB")
            assert not estimate.fits("32MiB")
            assert estimate.simulate("expandable_segments:True").peak.reserved == 40 * MiB
        """
    )
    project.run().assert_outcomes(passed=1)


def test_the_limits_of_the_marker_hold_for_an_estimate(project):
    project.write(
        """
        @pytest.mark.memory_budget("32MiB", reserved="1GiB")
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, 33 * MiB, device="cuda:0", name="step")
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    assert failure(result) == (
        "in 'step (estimated)', memory peaked at an estimated 33.0 MiB, +1.0 MiB (+3 %) over the "
        "limit of 32.0 MiB: largest 33.0 MiB of activation from aten::mm in net "
        "(fake_measure.py:12)"
    )


def test_they_hold_for_a_body_that_used_memory_as_well(project):
    project.write(
        """
        @pytest.mark.memory_budget("32MiB")
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, MiB)
            use(33 * MiB)
        """
    )
    result = project.run()
    assert failure(result).startswith("memory peaked at 33.0 MiB, +1.0 MiB (+3 %) over the limit")


def test_a_body_that_only_estimates_needs_no_reading_of_its_own(project):
    project.write(
        """
        @pytest.mark.memory_budget("34MiB", reserved="34MiB")
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, 33 * MiB, name="step")
        """
    )
    result = project.run("--torchmem-summary=all")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*::step (estimated)*33.0 MiB (estimated)*"])
    assert " 0 B" not in result.stdout.str().partition(" torchmem ")[2].partition("retained")[0]


def test_without_an_estimate_such_a_body_still_fails(project):
    project.write(
        """
        @pytest.mark.memory_budget("34MiB")
        def test_it(torchmem): pass
        """
    )
    assert failure(project.run()).endswith("[no-reading]")


def test_what_a_body_leaves_behind_is_not_answered_by_an_estimate(project):
    project.write(
        """
        @pytest.mark.memory_budget("34MiB", growth="0B")
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, MiB)
        """
    )
    assert failure(project.run()).endswith("[no-reading]")


def test_a_checked_estimate_has_an_entry_of_its_own_that_says_estimated(project):
    project.write(
        """
        import os

        def test_it(torchmem):
            size = int(os.environ.get("SIZE", "100")) * MiB
            with torchmem.measure("step") as step:
                use(10 * MiB)
            torchmem.check(step)
            torchmem.check(torchmem.estimate(lambda size: size, size, name="step"))
        """
    )
    project.update().assert_outcomes(passed=1)
    text = project.baseline().read_text()
    assert "test_it::step (estimated)" in text
    assert '"test_it::step"' in text
    project.run("-otorchmem_require_baseline=true").assert_outcomes(passed=1)


def test_an_estimate_that_grew_fails_against_its_own_entry(project, monkeypatch):
    project.write(
        """
        import os

        def test_it(torchmem):
            size = int(os.environ.get("SIZE", "100")) * MiB
            torchmem.check(torchmem.estimate(lambda size: size, size, name="step"))
        """
    )
    project.update()
    monkeypatch.setenv("SIZE", "120")
    result = project.run()
    result.assert_outcomes(failed=1)
    assert failure(result).startswith(
        "in 'step (estimated)', memory peaked at an estimated 120.0 MiB, +20.0 MiB (+20 %) over "
        "the baseline of 100.0 MiB: "
    )


def test_the_baseline_marker_compares_each_estimate(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, MiB, name="step")
        """
    )
    result = project.run("-otorchmem_require_baseline=true")
    assert failure(result).startswith(
        "in 'step (estimated)', there is no baseline for test_it::step (estimated) in "
    )
    project.update()
    project.run("-otorchmem_require_baseline=true").assert_outcomes(passed=1)


def test_a_body_with_a_baseline_that_now_only_estimates_fails(project):
    project.write("@pytest.mark.memory_baseline\ndef test_it(): use(33 * MiB)\n")
    project.update()
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_it(torchmem):
            torchmem.estimate(lambda size: size, MiB)
        """
    )
    assert "[no-reading]" in failure(project.run())


def test_no_region_can_take_the_name_of_an_estimate(project):
    project.write(
        """
        def test_it(torchmem):
            with torchmem.measure("step (estimated)"): pass
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*is kept for what torchmem.estimate returns*bad-argument*"])


def test_two_checked_estimates_need_two_names(project):
    project.write(
        """
        def test_it(torchmem):
            for _ in range(2):
                torchmem.check(torchmem.estimate(lambda size: size, MiB, name="step"))
        """
    )
    project.run().stdout.fnmatch_lines(["*two estimates named 'step' are checked*bad-argument*"])


def test_of_two_estimates_of_one_name_none_can_be_checked(project):
    project.write(
        """
        def test_it(torchmem):
            made = [torchmem.estimate(lambda size: size, MiB, name="step") for _ in range(2)]
            torchmem.check(made[0])
        """
    )
    project.run().stdout.fnmatch_lines(["*two estimates named 'step' are checked*bad-argument*"])


def test_an_estimate_of_another_body_cannot_be_checked(project):
    project.write(
        """
        def test_it(torchmem):
            torchmem.check(fake_measure.estimate_of(MiB))
        """
    )
    project.run().stdout.fnmatch_lines(["*needs an estimate that torchmem.estimate made*"])


def test_a_warm_up_run_makes_no_windows_of_its_estimates(project):
    project.write(
        """
        @pytest.mark.memory_budget("34MiB", warmup=2)
        def test_it(torchmem):
            torchmem.check(torchmem.estimate(lambda size: size, 33 * MiB, name="step"))
        """
    )
    result = project.run("--torchmem-report=r.json")
    result.assert_outcomes(passed=1)
    (test,) = json.loads((project.path / "r.json").read_text())["tests"]
    windows = test.get("windows") or test["measured"]["windows"]
    assert [window["result"]["name"] for window in windows] == ["step (estimated)"]


def test_the_fixture_s_estimate_has_the_defaults_of_the_function():
    own, public = (signature(f).parameters for f in (Torchmem.estimate, estimate))
    for name in ("backward", "optimizer", "device"):
        assert own[name].default == public[name].default
