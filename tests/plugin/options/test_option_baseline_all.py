"""torchmem_baseline_all: whoever needs enough has a baseline; of others nothing is said."""

import sys
import types

import pytest

ALL = "-otorchmem_baseline_all=2MiB"
BODIES = """
    import os

    SIZE = int(os.environ.get("SIZE", "4")) * MiB

    def test_large(): use(SIZE)

    def test_small(): use(1 * MiB)

    def test_nothing(): pass

    @pytest.mark.memory_budget("8MiB")
    def test_limited(): use(SIZE)

    @pytest.mark.memory_baseline
    def test_asks(): use(3)
"""


@pytest.fixture
def suite(project, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    project.write(BODIES)
    return project


def test_who_needs_enough_is_stored_and_compared(suite, monkeypatch):
    suite.update(ALL).assert_outcomes(passed=5)
    assert sorted(suite.entries()) == ["test_asks", "test_large", "test_limited"]
    monkeypatch.setenv("SIZE", "6")
    result = suite.run(ALL, "-otorchmem_require_baseline=true")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["memory peaked at 6.0 MiB, +2.0 MiB (+50 %) over the baseline*"])


def test_of_small_tests_nothing_is_said(suite):
    lines = suite.run(ALL, "-v").outlines
    summary = lines[next(n for n, line in enumerate(lines) if "== torchmem ==" in line) :]
    assert not [line for line in summary if "small" in line or "nothing" in line]
    assert "memory: 3 new" in summary


def test_who_has_an_entry_and_needs_less_now_is_compared_still(suite, monkeypatch):
    suite.update(ALL)
    monkeypatch.setenv("SIZE", "1")
    result = suite.run(ALL)
    result.stdout.fnmatch_lines(["shrunk: *::test_large: *75 % below the baseline of 4.0 MiB*"])


def test_who_did_not_ask_keeps_its_own_outcome_and_is_not_listed(suite):
    suite.write(
        """
        def test_raises():
            use(4 * MiB)
            raise RuntimeError("own")

        def test_no_device(): use(4 * MiB)

        def test_busy():
            fake_measure.state["busy"] = True
        """
    )
    result = suite.run(ALL, "--torchmem-strict")
    result.assert_outcomes(passed=2, failed=1)
    assert "memory: 1 new" in result.outlines
    suite.ini("torchmem_device = cuda:7")
    suite.run(ALL).assert_outcomes(passed=2, failed=1)


def test_who_did_not_ask_is_listed_where_measuring_it_ends_in_an_error(suite):
    suite.update(ALL)
    suite.write(
        """
        def test_large():
            use(4 * MiB)
            def raises(*args, **kwargs): raise RuntimeError("lost")
            fake_measure.BodyMeasurement.stop = raises
        """
    )
    result = suite.run(ALL, "--torchmem-strict")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*test_large: measuring ended with RuntimeError: lost*"])


def test_where_torch_is_not_imported_nothing_is_measured(suite, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    suite.write("def test_a(): assert fake_measure.state['starts'] == 0")
    result = suite.run(ALL)
    result.assert_outcomes(passed=1)
    assert "torchmem" not in result.stdout.str()


@pytest.mark.parametrize("size", ["0B", "much"])
def test_a_size_of_no_use_is_refused(suite, size):
    result = suite.run(f"-otorchmem_baseline_all={size}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
