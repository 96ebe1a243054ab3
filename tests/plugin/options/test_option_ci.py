"""--torchmem-ci: what a required check wants."""

import pytest

from pytest_torchmem.store.run_reports import read_run

CI = "--torchmem-ci"


def test_a_missing_baseline_fails_and_a_stored_one_is_enough(sized):
    sized.run(CI).assert_outcomes(failed=1)
    sized.update()
    sized.run(CI).assert_outcomes(passed=1)


def test_a_test_that_cannot_be_measured_fails(project):
    project.write(
        """
        @pytest.mark.memory_budget("1GiB", device="cuda:1")
        def test_elsewhere(): use(1)

        def test_busy(torchmem): fake_measure.state["busy"] = True
        """
    )
    project.run().assert_outcomes(skipped=1, passed=1)
    project.run(CI).assert_outcomes(errors=1, passed=1)


def test_a_report_is_written_to_a_folder_of_the_rootdir(sized, monkeypatch):
    sized.update()
    below = sized.path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    sized.run(CI, "..").assert_outcomes(passed=1)
    folder = sized.path / "torchmem-report"
    assert len(read_run(folder / "results.json").tests) == 1
    assert (folder / "index.html").exists()


def test_the_report_goes_where_it_is_wanted(sized):
    sized.update()
    sized.run(CI, "--torchmem-report=mem.json")
    assert (sized.path / "mem.json").exists()
    assert not (sized.path / "torchmem-report").exists()


def test_what_shrank_is_told_and_annotated_and_passes(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "70")
    told = sized.run(CI)
    told.assert_outcomes(passed=1)
    told.stdout.fnmatch_lines(["shrunk: test_it.py::test_a: memory peaked at 70.0 MiB, 30 % *"])
    told.stdout.no_fnmatch_line("::*")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    told = sized.run(CI)
    told.stdout.fnmatch_lines(["::notice file=test_it.py,line=*,title=memory shrunk*70.0 MiB*"])


def test_what_grew_fails_and_is_annotated(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "170")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    told = sized.run(CI)
    told.assert_outcomes(failed=1)
    told.stdout.fnmatch_lines(["::error file=test_it.py,*170.0 MiB*"])


def test_nothing_is_stored_not_even_a_new_name(sized):
    sized.update()
    before = sized.baseline().read_bytes()
    (sized.path / "test_it.py").write_text(
        (sized.path / "test_it.py").read_text().replace("def test_a", "def test_b")
    )
    told = sized.run(CI)
    told.assert_outcomes(failed=1)
    told.stdout.fnmatch_lines(["if renamed, a run without --torchmem-ci takes the entry along"])
    assert sized.baseline().read_bytes() == before
    sized.run().stdout.fnmatch_lines(["  renamed: test_a -> test_b: *"])
    sized.run(CI).assert_outcomes(passed=1)


def test_it_cannot_be_typed_together_with_an_update(sized):
    told = sized.update(CI)
    assert told.ret == pytest.ExitCode.USAGE_ERROR
    told.stderr.fnmatch_lines(
        ["ERROR: --torchmem-ci stores no baseline, and --torchmem-update-baseline stores *"]
    )
    assert not sized.baseline().exists()


def test_an_update_in_addopts_ends_every_run(sized):
    sized.pytester.makeini("[pytest]\naddopts = --torchmem-update-baseline")
    for arguments in ((), (CI,)):
        told = sized.run(*arguments)
        assert told.ret == pytest.ExitCode.USAGE_ERROR
        told.stderr.fnmatch_lines(["ERROR: --torchmem-* *"])
    assert not sized.baseline().exists()


def test_workers_are_as_strict(sized):
    sized.run_in_workers(2, CI).assert_outcomes(failed=1)
    assert (sized.path / "torchmem-report" / "results.json").exists()
