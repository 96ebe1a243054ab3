"""Measuring works wherever pytest runs a body, and leaves outcomes as they are."""

import pytest

pytestmark = pytest.mark.slow


def test_a_method_of_a_test_case_is_measured(project):
    project.write(
        """
        import unittest

        class TestIt(unittest.TestCase):
            @pytest.fixture(autouse=True)
            def memory(self, torchmem):
                self.torchmem = torchmem

            @pytest.mark.memory_budget("1MiB")
            def test_over(self):
                use(2 * MiB)

            @pytest.mark.memory_budget("1MiB")
            def test_own_failure(self):
                use(2 * MiB)
                self.fail("my own")

            def test_region(self):
                with self.torchmem.measure("forward") as forward:
                    use(2 * MiB)
                self.assertEqual(forward.peak.total, 2 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        ["memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the limit*", "*AssertionError: my own"]
    )
    assert result.stdout.str().count("over the limit of 1.0 MiB: largest") == 1


def test_a_failed_test_case_changes_no_baseline(project):
    project.write(
        """
        import unittest

        class TestIt(unittest.TestCase):
            @pytest.mark.memory_baseline
            def test_a(self):
                use(2 * MiB)
                self.fail("my own")
        """
    )
    project.update().assert_outcomes(failed=1)
    assert not project.baseline().exists()


def test_a_method_of_a_test_case_that_does_not_come_to_its_end_is_held_against_nothing(project):
    project.write(
        """
        import unittest

        @pytest.mark.memory_budget("1MiB")
        @pytest.mark.memory_baseline
        class TestIt(unittest.TestCase):
            @unittest.skip("not here")
            def test_skipped(self): pass

            def test_skips(self):
                use(2 * MiB)
                self.skipTest("not now")

            @unittest.expectedFailure
            def test_expected(self):
                use(2 * MiB)
                self.fail()

            def test_own_failure(self):
                use(2 * MiB)
                self.fail("my own")
        """
    )
    result = project.run("-otorchmem_require_baseline=true")
    result.assert_outcomes(failed=1, skipped=2, xfailed=1)
    result.stdout.fnmatch_lines(["memory: 1 failed (1 ended by an exception), 1 xfailed"])
    result.stdout.no_fnmatch_line("*no baseline*")


def test_async_tests_are_measured_warm_up_included(project):
    pytest.importorskip("pytest_asyncio")
    project.ini("asyncio_default_fixture_loop_scope = function")
    project.write(
        """
        import asyncio, unittest

        runs = []

        @pytest.mark.asyncio
        @pytest.mark.memory_budget("1MiB", warmup=1)
        async def test_over():
            await asyncio.sleep(0)
            runs.append(1)
            use(2 * MiB)

        def test_runs():
            assert len(runs) == 2

        class TestIt(unittest.IsolatedAsyncioTestCase):
            @pytest.mark.memory_budget("1MiB")
            async def test_a(self):
                use(2 * MiB)
        """
    )
    project.run("-p", "asyncio").assert_outcomes(failed=2, passed=1)


@pytest.mark.skipif(not hasattr(pytest, "Subtests"), reason="subtests came with pytest 9")
def test_subtests_do_not_count_twice(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_passes(subtests):
            for i in range(3):
                with subtests.test(i=i):
                    use(1 * MiB)

        @pytest.mark.memory_baseline
        def test_fails(subtests):
            use(1 * MiB)
            with subtests.test():
                assert False
        """
    )
    result = project.update()
    result.stdout.fnmatch_lines(["memory: 1 failed, 1 new"])
    assert list(project.entries()) == ["test_passes"]


def test_a_doctest_can_measure(project):
    (project.path / "conftest.py").write_text(
        "import pytest, fake_measure\n"
        "fake_measure.install()\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        item.add_marker(pytest.mark.memory_budget('1MiB'))\n"
    )
    (project.path / "over.txt").write_text(
        ">>> from fake_measure import use, MiB\n>>> use(2 * MiB)\n"
    )
    (project.path / "region.txt").write_text(
        ">>> from fake_measure import use, MiB\n"
        ">>> torchmem = getfixture('torchmem')\n"
        ">>> with torchmem.measure('forward') as forward: use(MiB)\n"
        ">>> forward.peak.total == MiB\n"
        "True\n"
    )
    project.run("--doctest-glob=*.txt").assert_outcomes(failed=1, passed=1)


def test_a_doctest_that_asks_first_in_its_body_is_measured(project):
    (project.path / "region.txt").write_text(
        ">>> from fake_measure import use, MiB\n"
        ">>> torchmem = getfixture('torchmem')\n"
        ">>> with torchmem.measure('forward') as forward: use(MiB)\n"
        ">>> forward.peak.total == MiB\n"
        "True\n"
        ">>> torchmem.check(forward)\n"
    )
    project.update("--doctest-glob=*.txt").assert_outcomes(passed=1)
    assert list(project.entries("region.txt")) == ["region.txt::forward"]


def test_parameters_have_entries_of_their_own(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        @pytest.mark.parametrize("size", [1, 2], ids=["a::b", "c/d"])
        def test_a(size): use(size * MiB)
        """
    )
    project.update().assert_outcomes(passed=2)
    assert {key: entry["total"] for key, entry in project.entries().items()} == {
        "test_a[a::b]": 1 << 20,
        "test_a[c/d]": 2 << 20,
    }


def test_xfail_expects_a_memory_failure_like_any_other(project):
    project.write(
        """
        @pytest.mark.xfail
        @pytest.mark.memory_budget("1MiB")
        def test_over(): use(2 * MiB)

        @pytest.mark.xfail(strict=True)
        @pytest.mark.memory_budget("1MiB")
        def test_strictly_over(): use(2 * MiB)

        @pytest.mark.xfail(strict=True)
        @pytest.mark.memory_budget("1MiB")
        def test_within(): use(1 * MiB)
        """
    )
    run = project.run()
    run.assert_outcomes(xfailed=2, failed=1)
    run.stdout.fnmatch_lines(["memory: 1 failed, 2 xfailed"])


def test_xfail_can_tell_a_memory_failure_by_its_class(project):
    project.write(
        """
        @pytest.mark.xfail(raises=pytest.fail.Exception, strict=True)
        @pytest.mark.memory_budget("1MiB")
        def test_over(): use(2 * MiB)

        @pytest.mark.xfail(raises=pytest.fail.Exception)
        @pytest.mark.memory_budget("1MiB")
        def test_wrong(): assert use(2 * MiB)

        @pytest.mark.xfail(raises=AssertionError)
        @pytest.mark.memory_budget("1MiB")
        def test_over_where_an_assert_was_expected(): use(2 * MiB)

        @pytest.mark.xfail(raises=AssertionError)
        def test_the_assert_of_a_region(torchmem):
            with torchmem.measure("part") as part:
                use(2 * MiB)
            assert part.peak.total <= MiB
        """
    )
    result = project.run("-rx")
    result.assert_outcomes(xfailed=2, failed=2)
    result.stdout.fnmatch_lines(["XFAIL *::test_over*", "XFAIL *::test_the_assert_of_a_region*"])


def test_a_failing_body_keeps_its_own_error(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB")
        def test_a():
            use(2 * MiB)
            raise ValueError("my own")

        @pytest.mark.memory_budget("1MiB")
        def test_after():
            use(1 * MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["E       ValueError: my own"])
    result.stdout.no_fnmatch_line("*over the limit*")


def test_a_skip_in_the_body_stays_a_skip(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB")
        def test_a():
            use(2 * MiB)
            pytest.skip("not today")

        @pytest.mark.skip
        @pytest.mark.memory_budget("1MiB")
        def test_b(): use(2 * MiB)
        """
    )
    project.run("--torchmem-strict").assert_outcomes(skipped=2)


def test_a_memory_failure_stops_a_run_at_the_first(project):
    project.write(
        """
        @pytest.mark.memory_budget("1MiB")
        def test_a(): use(2 * MiB)

        def test_b(): pass
        """
    )
    project.run("-x").assert_outcomes(failed=1)


def test_last_failed_runs_a_memory_failure_again(project):
    project.pytester.makeini("[pytest]\n")
    project.write(
        """
        @pytest.mark.memory_budget("1MiB")
        def test_a(): use(2 * MiB)

        def test_b(): pass
        """
    )
    project.run().assert_outcomes(failed=1, passed=1)
    project.run("--lf").assert_outcomes(failed=1)


def test_a_rerun_is_measured_anew_and_counted_once(project):
    pytest.importorskip("pytest_rerunfailures")
    project.write(
        """
        runs = []

        @pytest.mark.memory_baseline
        @pytest.mark.memory_budget("1MiB")
        def test_a():
            runs.append(1)
            use(2 * MiB if len(runs) == 1 else 1 * MiB)
        """
    )
    result = project.update("-p", "rerunfailures", "--reruns=2")
    result.stdout.fnmatch_lines(["memory: 1 new", "* 1 passed, 1 rerun*"])
    assert project.entries()["test_a"]["total"] == 1 << 20


def test_a_fixture_of_a_rerun_is_before_the_body_again(project):
    pytest.importorskip("pytest_rerunfailures")
    project.write(
        """
        said = []

        @pytest.fixture
        def early(request):
            torchmem = request.getfixturevalue("torchmem")
            try:
                torchmem.measure("part")
            except Exception as error:
                said.append(str(error))

        def test_a(early):
            assert len(said) == 2
            assert all("this is before the test body" in text for text in said)
        """
    )
    result = project.run("-p", "rerunfailures", "--reruns=1")
    assert result.parseoutcomes() == {"passed": 1, "rerun": 1}


def test_a_teardown_error_changes_no_baseline(project):
    project.write(
        """
        @pytest.fixture
        def broken():
            yield
            raise ValueError

        @pytest.mark.memory_baseline
        def test_a(broken): use(2 * MiB)
        """
    )
    project.update().assert_outcomes(passed=1, errors=1)
    assert not project.baseline().exists()


def test_a_run_under_warnings_as_errors_is_undisturbed(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        @pytest.mark.memory_budget("1MiB")
        def test_a(torchmem): use(1 * MiB)
        """
    )
    result = project.run_apart("-W", "error", "--torchmem-update-baseline")
    result.assert_outcomes(passed=1)


def test_a_run_without_the_plugin_is_a_run_without_it(project, monkeypatch):
    monkeypatch.delenv("PYTEST_PLUGINS")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    project.write("def test_a(): pass")
    result = project.run_apart("-p", "no:torchmem")
    result.assert_outcomes(passed=1)


UNUSED = """
def test_a():
    import sys
    late = {"torch", "numpy", "tabulate", "pytest_torchmem.measuring.body_measurement"}
    loaded = late & set(sys.modules)
    assert not loaded - EXPECTED
"""


def test_an_unused_plugin_loads_nothing_and_says_nothing(pytester):
    pytester.makepyfile("EXPECTED = set()\n" + UNUSED)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    assert "torchmem " not in result.stdout.str().replace("torchmem-", "")


def test_the_check_for_what_is_loaded_can_fail(pytester):
    pytester.makepyfile("import numpy\nEXPECTED = set()\n" + UNUSED)
    pytester.runpytest_subprocess().assert_outcomes(failed=1)


def test_what_pytest_sets_up_is_not_the_body_and_what_unittest_sets_up_is(project):
    project.write(
        """
        import unittest

        class TestOfPytest:
            def setup_method(self): use(2 * MiB)

            @pytest.mark.memory_budget("1MiB")
            def test_a(self): use(MiB)

        class TestOfUnittest(unittest.TestCase):
            @classmethod
            def setUpClass(cls): use(8 * MiB)

            def setUp(self): use(2 * MiB)

            @pytest.mark.memory_budget("1MiB")
            def test_a(self): use(MiB)
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["memory peaked at 3.0 MiB, +2.0 MiB (+200 %) over the limit *"])
