"""Nothing is lost in silence: modules that moved or went, tests that were renamed and changed."""

import pytest

BODY = """
@pytest.mark.memory_baseline
def test_a(): use({} * MiB)

@pytest.mark.memory_baseline
def test_b(): use(7 * MiB)
"""
REMOVE = ("--torchmem-update-baseline", "--torchmem-accept=unused")
TOLD = " ".join(REMOVE)


@pytest.fixture
def moved(project):
    """A module that moved, and of which one test needs more now."""
    project.write(BODY.format(9), "test_old")
    project.write("@pytest.mark.memory_baseline\ndef test_c(): use(MiB)\n", "test_other")
    project.update().assert_outcomes(passed=3)
    (project.path / "test_old.py").unlink()
    project.write(BODY.format(400), "deep/test_new")
    return project


def test_a_required_check_says_in_one_line_that_a_module_moved(moved):
    before = moved.baseline("test_old").read_bytes()
    told = moved.run("--torchmem-ci")
    told.assert_outcomes(passed=1, failed=2)
    lines = [line for line in told.outlines if "test_old" in line]
    assert lines == [
        "test_old.py is gone and has baselines (2 entries): deep/test_new.py has its tests and no "
        "baseline; a run without --torchmem-ci takes them along"
    ]
    assert moved.baseline("test_old").read_bytes() == before


def test_a_required_check_says_by_how_much_a_test_of_a_renamed_module_grew(moved):
    (moved.path / "deep/test_new.py").rename(moved.path / "test_new.py")
    told = moved.run("--torchmem-ci")
    told.stdout.fnmatch_lines(
        [
            "there is no baseline for test_a in *test_new.json; it seems to be that of "
            "test_old.py, renamed; against that, memory peaked at 400.0 MiB, +391.0 MiB *"
        ]
    )


def test_followed_it_is_compared_with_its_old_numbers_and_what_grew_fails(moved):
    told = moved.run()
    told.assert_outcomes(passed=3)
    lines = [line for line in told.outlines if "test_old" in line]
    assert lines == [
        "test_old.py is gone and has baselines (2 entries): moved to deep/test_new.py, which the "
        "next run compares with them"
    ]
    assert not moved.baseline("test_old").exists()
    assert not moved.baseline("test_old").with_suffix(".origins").exists()
    told = moved.run()
    told.assert_outcomes(passed=2, failed=1)
    told.stdout.fnmatch_lines(["*400.0 MiB, +391.0 MiB (+4,344 %) over the baseline of 9.0 MiB: *"])
    told.stdout.no_fnmatch_line("*is gone*")


def test_where_nothing_can_be_written_a_plain_run_goes_on_and_an_update_fails(moved, monkeypatch):
    def refuse(*_):
        raise OSError("read-only")

    monkeypatch.setattr("pytest_torchmem.plugin.run.updates.move", refuse)
    told = moved.run()
    told.assert_outcomes(passed=3)
    assert told.ret == pytest.ExitCode.OK
    told.stdout.fnmatch_lines(["renames are not followed: a baseline cannot be moved: read-only *"])
    assert moved.update().ret == pytest.ExitCode.TESTS_FAILED


def test_one_update_follows_a_module_and_stores_what_grew_and_what_is_new(moved):
    extra = "\n@pytest.mark.memory_baseline\ndef test_d(): use(3 * MiB)\n"
    moved.write(BODY.format(400) + extra, "deep/test_new")
    told = moved.update("-otorchmem_require_baseline=true")
    told.assert_outcomes(passed=4)
    told.stdout.fnmatch_lines(
        [
            "  new: test_d: 3.0 MiB*",
            "  grown: test_a: 9.0 MiB -> 400.0 MiB*",
            "test_old.py is gone *: moved to deep/test_new.py, which this run has compared with *",
        ]
    )
    told.stdout.no_fnmatch_line("*: test_b: *")
    again = moved.run("-otorchmem_require_baseline=true", "-otorchmem_fail_shrunk=true")
    again.assert_outcomes(passed=4)
    again.stdout.no_fnmatch_line("*is gone*")


def test_an_update_that_accepts_new_ones_alone_leaves_what_grew_to_the_next_run(moved):
    moved.update("--torchmem-accept=new")
    moved.run().assert_outcomes(passed=2, failed=1)


def test_where_a_baseline_is_required_a_run_that_only_followed_one_fails(moved):
    required = "-otorchmem_require_baseline=true"
    moved.run(required).assert_outcomes(passed=1, failed=2)
    moved.run(required).assert_outcomes(passed=2, failed=1)


NOT_ALSO = ("*has no baseline;*", "*have no baseline;*", "*takes them along*")


def test_a_dry_run_says_what_would_be_moved(moved):
    told = moved.update("--torchmem-dry-run")
    told.stdout.fnmatch_lines(["test_old.py is gone *without --torchmem-dry-run moves them to *"])
    for line in (*NOT_ALSO, "*nothing would change*"):
        told.stdout.no_fnmatch_line(line)


def test_who_can_follow_a_module_is_not_told_to_store_its_tests_as_new(moved):
    moved.run().stdout.no_fnmatch_line("*have no baseline;*")


def test_what_is_followed_is_not_removed_as_unused(moved):
    moved.run(*REMOVE).stdout.fnmatch_lines(["test_old.py is gone *: moved to deep/test_new.py, *"])
    assert (moved.path / "deep/__torchmem__/cpu-torch2.99/test_new.json").exists()


def test_a_dry_run_moves_and_removes_nothing(moved):
    dry = (*REMOVE, "--torchmem-dry-run")
    moved.run(*dry)
    assert moved.baseline("test_old").exists()
    (moved.path / "deep/test_new.py").unlink()
    moved.run(*dry[:3]).stdout.fnmatch_lines(["test_old.py is gone *unused removes them"])
    assert moved.baseline("test_old").exists()


def test_the_baselines_of_a_module_that_is_gone_are_removed_as_unused(moved):
    (moved.path / "deep/test_new.py").unlink()
    told = moved.run()
    told.stdout.fnmatch_lines([f"test_old.py is gone and has baselines (2 entries): {TOLD} *"])
    moved.run(*REMOVE).stdout.fnmatch_lines(["test_old.py is gone *: removed"])
    assert not moved.baseline("test_old").exists()
    assert moved.baseline("test_other").exists()


def test_with_one_folder_for_all_baselines_it_is_the_same(project):
    folder = "-otorchmem_baseline_dir=stored"
    project.write(BODY.format(9), "unit/test_old")
    project.update(folder)
    (project.path / "unit/test_old.py").rename(project.path / "test_new.py")
    project.run(folder)
    assert (project.path / "stored/cpu-torch2.99/test_new.json").exists()
    project.run(folder, "-otorchmem_require_baseline=true").assert_outcomes(passed=2)


def test_of_two_that_could_be_it_none_is_taken(moved):
    moved.write(BODY.format(9), "deep/test_newer")
    moved.run().stdout.fnmatch_lines(["test_old.py is gone *removes them"])
    assert moved.baseline("test_old").exists()


def test_half_of_its_tests_are_enough_to_know_a_module_again(moved):
    half = BODY.format(9).replace("test_b", "test_d")
    moved.write(half, "deep/test_new")
    told = moved.run("--torchmem-ci")
    told.stdout.fnmatch_lines(["test_old.py is gone *: deep/test_new.py has its tests *"])
    moved.write(half + "\n@pytest.mark.memory_baseline\ndef test_e(): use(MiB)\n", "deep/test_new")
    moved.run().stdout.fnmatch_lines(["test_old.py is gone *removes them"])


@pytest.mark.parametrize("selection", [("-k", "test_c"), ("test_other.py::test_c",)])
def test_a_run_of_a_part_says_nothing_of_it(moved, selection):
    moved.run(*selection).stdout.no_fnmatch_line("*is gone*")
    moved.run(*REMOVE, *selection)
    assert moved.baseline("test_old").exists()


def test_a_test_that_was_renamed_and_changed_leaves_an_entry_that_a_plain_run_names(project):
    project.write(BODY.format(9))
    project.update()
    project.write(BODY.format(10).replace("test_a():", "test_z(): print('another test') or"))
    project.run().stdout.fnmatch_lines(
        [f"unused: no test uses 1 entry of the baselines (test_a): {TOLD} removes it"]
    )


def test_thousands_of_unused_entries_are_ten_lines(project):
    body = "@pytest.mark.memory_baseline\n@pytest.mark.parametrize('n', range({}))\n"
    body += "def test_a(n): use(MiB)\n"
    project.write(body.format(60))
    project.update()
    project.write(body.format(3))
    plain = [line for line in project.run().outlines if line.startswith("unused")]
    assert len(plain) == 1
    told = project.run(*REMOVE)
    assert len([line for line in told.outlines if line.startswith("  unused: ")]) == 10
    told.stdout.fnmatch_lines(["  ... and 47 more unused entries, removed"])
    assert len(project.entries()) == 3


def test_an_id_that_utf8_cannot_hold_loses_no_update(project):
    option = "disable_test_id_escaping_and_forfeit_all_rights_to_community_support = True"
    project.ini(option)
    project.write(
        "@pytest.mark.memory_baseline\n@pytest.mark.parametrize('text', ['sur\\udcff', 'plain'])\n"
        "def test_a(text): use(MiB)\n".replace("\\udcff", "\\\\udcff")
    )
    arguments = ("--torchmem-update-baseline", "--torchmem-report=out.json", "-s")
    told = project.run_apart(*arguments)
    told.assert_outcomes(passed=2)
    assert "INTERNALERROR" not in told.stdout.str() + told.stderr.str()
    assert (project.path / "out.json").exists()
    project.run_apart("-otorchmem_require_baseline=true").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("variable", "start"), [("CI", "1 m"), ("GITHUB_ACTIONS", "::warning *::1 m")]
)
def test_in_ci_a_missing_baseline_is_loud(project, monkeypatch, variable, start):
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    monkeypatch.delenv("CI", raising=False)
    loud = "*CI passes whatever the body needs: *--torchmem-ci*"
    project.run().stdout.no_fnmatch_line(loud)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv(variable, "true")
    project.run().stdout.fnmatch_lines([f"{start}easurement has no baseline, so {loud[1:]}"])
    project.update()
    project.run().stdout.no_fnmatch_line(loud)


def test_a_run_of_one_folder_says_nothing_of_another_one(project):
    for name in ("here/test_a", "there/test_b"):
        project.write("@pytest.mark.memory_baseline\ndef test_it(): use(MiB)\n", name)
    project.update().assert_outcomes(passed=2)
    (project.path / "there/test_b.py").unlink()
    project.run("here").stdout.no_fnmatch_line("*is gone*")
    project.run().stdout.fnmatch_lines(["there/test_b.py is gone *"])


def test_a_module_that_has_baselines_of_its_own_takes_over_no_others(project):
    project.write(BODY.format(9), "test_old")
    project.write("@pytest.mark.memory_baseline\ndef test_c(): use(MiB)\n", "test_other")
    project.update().assert_outcomes(passed=3)
    (project.path / "test_old.py").unlink()
    project.write(BODY.format(9), "test_other")
    told = [line for line in project.run().outlines if line.startswith("test_old.py is gone")]
    assert len(told) == 1
    assert "test_other" not in told[0]
