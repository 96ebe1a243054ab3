"""--torchmem-follow-renames: a renamed test takes its entry along, and only if asked."""

import pytest

BODY = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("size", [10, 20])
def test_{name}(torchmem, size):
    with torchmem.measure("part") as part: use(({offset} + size) * MiB)
    torchmem.check(part)
"""


def renamed(project, offset=0):
    project.write(BODY.format(name="old", offset=0))
    project.update().assert_outcomes(passed=2)
    project.write(BODY.format(name="new", offset=offset))


def test_a_rename_is_offered_and_nothing_is_moved(project):
    renamed(project)
    before = project.baseline().read_bytes()
    result = project.run()
    result.stdout.fnmatch_lines(
        [
            "test_new[[]10] has the numbers of the unused test_old[[]10] (*test_it.json)",
            "if renamed, --torchmem-follow-renames takes the entry along",
        ]
    )
    assert project.baseline().read_bytes() == before


def test_with_the_option_all_entries_of_the_test_move(project):
    renamed(project)
    before = project.baseline().read_text()
    result = project.run("--torchmem-follow-renames")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["  renamed: test_old[[]10]::part -> test_new[[]10]::part: 10.0 MiB"]
    )
    assert project.baseline().read_text() == before.replace("test_old", "test_new")
    project.run("--torchmem-require-baseline").assert_outcomes(passed=2)


def test_a_renamed_test_is_called_renamed_and_not_new(project):
    renamed(project)
    dry = project.update("--torchmem-follow-renames", "--torchmem-dry-run")
    dry.stdout.fnmatch_lines(
        ["renamed * test_new[[]10] (was test_old[[]10]) *", "dry run: 4 renamed*"]
    )
    told = project.update("--torchmem-follow-renames")
    told.stdout.fnmatch_lines(["baseline updated: 4 entries in 1 file"])
    for line in ("*  new:*", "*has no baseline;*", "*has the numbers of*", "*if renamed*"):
        told.stdout.no_fnmatch_line(line)


@pytest.mark.parametrize("required", [(), ("--torchmem-require-baseline",)])
def test_who_can_follow_a_rename_is_not_told_to_store_it_as_new(project, required):
    renamed(project)
    told = project.run(*required)
    told.stdout.fnmatch_lines(["if renamed, --torchmem-follow-renames takes the entry along"])
    told.stdout.no_fnmatch_line("*no baseline;*")
    told.stdout.no_fnmatch_line("unused: *")


def test_an_update_that_has_stored_a_renamed_test_as_new_offers_nothing(project):
    renamed(project)
    told = project.update()
    told.stdout.fnmatch_lines(["test_new[[]10] has the numbers of the unused test_old[[]10] *"])
    told.stdout.no_fnmatch_line("*if renamed*")


def test_a_parameter_with_another_id_takes_the_entry_along(project):
    body = """
    @pytest.mark.memory_baseline
    @pytest.mark.parametrize("size", [10, 20], ids={})
    def test_a(size): use(size * MiB)
    """
    project.write(body.format(["small", "large"]))
    project.update()
    project.write(body.format(["small", "huge"]))
    project.run("--torchmem-follow-renames").stdout.fnmatch_lines(
        ["  renamed: test_a[[]large] -> test_a[[]huge]: 20.0 MiB"]
    )
    assert sorted(project.entries()) == ["test_a[huge]", "test_a[small]"]


def test_other_changes_are_not_accepted_by_it(project):
    renamed(project, offset=100)
    before = project.baseline().read_bytes()
    project.run("--torchmem-follow-renames").stdout.no_fnmatch_line("*renamed:*")
    assert project.baseline().read_bytes() == before


def test_two_that_could_be_it_are_left_alone(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(9 * MiB)\n"
    project.write(body.format("one") + body.format("two"))
    project.update()
    project.write(body.format("three") + body.format("two"))
    project.run("--torchmem-follow-renames").stdout.fnmatch_lines(["  renamed: test_one -> *"])
    project.write(body.format("four") + body.format("five"))
    project.run("--torchmem-follow-renames").stdout.no_fnmatch_line("*renamed:*")
    assert sorted(project.entries()) == ["test_three", "test_two"]


def test_of_two_old_entries_with_the_same_numbers_neither_is_moved(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(9 * MiB)\n"
    project.write(body.format("one") + body.format("two"))
    project.update()
    before = project.baseline().read_bytes()
    project.write(body.format("three"))
    project.run("--torchmem-follow-renames").stdout.no_fnmatch_line("*renamed:*")
    assert project.baseline().read_bytes() == before


def test_a_run_of_a_part_of_the_module_offers_nothing(project):
    renamed(project)
    project.run("-k", "10").stdout.no_fnmatch_line("*has the numbers of*")


def test_the_ini_name_does_the_same(project):
    renamed(project)
    project.ini("torchmem_follow_renames = true")
    project.run().stdout.fnmatch_lines(["  renamed: *"])
