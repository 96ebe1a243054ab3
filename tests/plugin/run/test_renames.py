"""A renamed test takes its entry along, in each run but that of a required check."""

import subprocess

import pytest

BODY = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("size", [10, 20])
def test_{name}(torchmem, size):
    with torchmem.measure("part") as part: use(({offset} + size) * MiB)
    torchmem.check(part)
"""

CI = "--torchmem-ci"
REQUIRED = "-otorchmem_require_baseline=true"


def renamed(project, offset=0):
    committed(project, BODY.format(name="old", offset=0))
    project.write(BODY.format(name="new", offset=offset))


def committed(project, text):
    """Store the baselines of two tests and commit both."""
    project.write(text)
    project.update().assert_outcomes(passed=2)
    author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], cwd=project.path, check=True)


def test_a_required_check_names_a_rename_and_moves_nothing(project):
    renamed(project)
    before = project.baseline().read_bytes()
    result = project.run(CI)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "test_new[[]10] seems to be the unused test_old[[]10] (*test_it.json)",
            "if renamed, a run without --torchmem-ci takes the entry along",
        ]
    )
    assert project.baseline().read_bytes() == before


@pytest.mark.parametrize("arguments", [(), (REQUIRED,), ("--torchmem-update-baseline",)])
def test_all_entries_of_the_test_move(project, arguments):
    renamed(project)
    before = project.baseline().read_text()
    result = project.run(*arguments)
    # Where one is required, a run that only followed it fails, and the next one passes.
    result.assert_outcomes(**{"failed" if REQUIRED in arguments else "passed": 2})
    result.stdout.fnmatch_lines(
        ["  renamed: test_old[[]10]::part -> test_new[[]10]::part: 10.0 MiB"]
    )
    assert project.baseline().read_text() == before.replace("test_old", "test_new")
    project.run(CI).assert_outcomes(passed=2)


def test_a_renamed_test_that_is_run_alone_has_no_baseline_yet(project):
    renamed(project)
    before = project.baseline().read_bytes()
    project.run(REQUIRED, "test_it.py::test_new").assert_outcomes(failed=2)
    assert project.baseline().read_bytes() == before


def test_a_renamed_test_is_called_renamed_and_not_new(project):
    renamed(project)
    dry = project.update("--torchmem-dry-run")
    dry.stdout.fnmatch_lines(
        ["renamed * test_new[[]10] (was test_old[[]10]) *", "dry run: 4 renamed*"]
    )
    told = project.update()
    told.stdout.fnmatch_lines(["baseline updated: 4 entries in 1 file"])
    for line in ("*  new:*", "*has no baseline;*", "*seems to be*", "*if renamed*"):
        told.stdout.no_fnmatch_line(line)


def test_a_parameter_with_another_id_takes_the_entry_along(project):
    body = """
    @pytest.mark.memory_baseline
    @pytest.mark.parametrize("size", [10, 20], ids={})
    def test_a(size): use(size * MiB)
    """
    project.write(body.format(["small", "large"]))
    project.update()
    project.write(body.format(["small", "huge"]))
    told = project.run()
    told.assert_outcomes(passed=2)
    told.stdout.fnmatch_lines(["  renamed: test_a[[]large] -> test_a[[]huge]: 20.0 MiB"])
    assert sorted(project.entries()) == ["test_a[huge]", "test_a[small]"]


@pytest.mark.parametrize("arguments", [(), (REQUIRED,)])
def test_a_test_with_other_numbers_and_another_body_takes_nothing_along(project, arguments):
    body = "@pytest.mark.memory_baseline\ndef test_old(): use(9 * MiB)\n"
    project.write(body)
    project.update()
    before = project.baseline().read_bytes()
    other = "sizes = [3, 4, 5, 6]\n    for size in sizes:\n        use(size * MiB)"
    project.write(f"@pytest.mark.memory_baseline\ndef test_new():\n    {other}\n")
    result = project.run(*arguments)
    result.assert_outcomes(**{"failed" if arguments else "passed": 1})
    result.stdout.no_fnmatch_line("*renamed:*")
    assert project.baseline().read_bytes() == before


def test_a_test_with_other_numbers_is_known_by_its_code_and_compared(project):
    renamed(project, offset=100)
    project.run().stdout.fnmatch_lines(
        [
            "  renamed: test_old[[]10] -> test_new[[]10]: 10.0 MiB, which the next run compares "
            "with 110.0 MiB",
        ]
    )
    keys = ["test_new[10]", "test_new[10]::part", "test_new[20]", "test_new[20]::part"]
    assert sorted(project.entries()) == keys
    told = project.run()
    told.assert_outcomes(failed=2)
    told.stdout.fnmatch_lines(["*110.0 MiB, +100.0 MiB (+1,000 %) over the baseline of 10.0 MiB*"])


def test_a_dry_run_shows_both_numbers_of_a_renamed_test(project):
    renamed(project, offset=100)
    told = project.update("--torchmem-dry-run", "--torchmem-accept=new")
    told.stdout.fnmatch_lines(["renamed *test_new[[]10] (was test_old[[]10])*10.0 MiB*110.0 MiB*"])


def test_an_update_stores_a_renamed_test_that_grew_as_grown_and_never_as_new(project):
    renamed(project, offset=100)
    told = project.update()
    told.stdout.fnmatch_lines(["  grown: test_old[[]10] -> test_new[[]10]: 10.0 MiB -> 110.0 MiB*"])
    told.stdout.no_fnmatch_line("*  new:*")
    assert "test_old[10]" not in project.entries()
    project.run().assert_outcomes(passed=2)


def test_a_required_check_names_a_renamed_test_that_grew(project):
    renamed(project, offset=100)
    told = project.run(CI)
    told.assert_outcomes(failed=2)
    told.stdout.fnmatch_lines(
        [
            "there is no baseline for test_new[[]10] in *; it seems to be test_old[[]10], renamed; "
            "against that, memory peaked at 110.0 MiB, +100.0 MiB (+1,000 %) over the baseline of "
            "10.0 MiB: +100.0 MiB * at * [[]no-baseline]",
            "test_new[[]10] seems to be the unused test_old[[]10] (*test_it.json): "
            "10.0 MiB -> 110.0 MiB, +100.0 MiB (+1,000 %)",
            "if renamed, *, and --torchmem-update-baseline accepts its new numbers, too",
        ]
    )


def test_two_renamed_tests_that_grew_are_both_known(project):
    body = """
    @pytest.mark.memory_baseline
    def test_{}(): use({} * MiB)
    @pytest.mark.memory_baseline
    def test_{}(): use(2 * {} * MiB); use(MiB)
    """
    committed(project, body.format("a", 4, "b", 4))
    project.write(body.format("first", 8, "second", 8))
    told = project.run()
    told.stdout.fnmatch_lines(["  renamed: test_a -> test_first: 4.0 MiB, *8.0 MiB"])
    told.stdout.fnmatch_lines(["  renamed: test_b -> test_second: *"])


def test_two_that_could_be_it_are_left_alone(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(9 * MiB)\n"
    project.write(body.format("one") + body.format("two"))
    project.update()
    project.write(body.format("three") + body.format("two"))
    project.run().stdout.fnmatch_lines(["  renamed: test_one -> *"])
    project.write(body.format("four") + body.format("five"))
    project.run().stdout.no_fnmatch_line("*renamed:*")
    assert sorted(project.entries()) == ["test_three", "test_two"]


def test_of_two_old_entries_with_the_same_numbers_neither_is_moved(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(9 * MiB)\n"
    project.write(body.format("one") + body.format("two"))
    project.update()
    before = project.baseline().read_bytes()
    project.write(body.format("three"))
    project.run().stdout.no_fnmatch_line("*renamed:*")
    assert project.baseline().read_bytes() == before


def test_a_run_of_a_part_of_the_module_follows_nothing(project):
    renamed(project)
    before = project.baseline().read_bytes()
    project.run("-k", "10")
    assert project.baseline().read_bytes() == before
