"""--torchmem-update-baseline: accept what was measured, and show what changed."""

import pytest


def test_a_new_entry_is_stored_and_compared_with_from_then_on(sized):
    result = sized.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_a *new, no baseline",
            "1 measurement has no baseline; --torchmem-update-baseline stores it",
        ]
    )
    assert not sized.baseline().exists()
    result = sized.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "__torchmem__/cpu-torch2.99/test_it.json:",
            "  new: test_a: 100.0 MiB",
            "baseline updated: 1 entry in 1 file",
        ]
    )
    sized.run().stdout.fnmatch_lines(["test_it.py::test_a *same as baseline", "1 measured"])


def test_growth_is_accepted_and_the_test_passes(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "200")
    sized.run().assert_outcomes(failed=1)
    result = sized.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  grown: test_a: 100.0 MiB -> 200.0 MiB"])
    sized.run().assert_outcomes(passed=1)


def test_shrinking_passes_and_is_stored_by_an_update(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "50")
    result = sized.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_a *shrunk, peak -50.0 MiB"])
    sized.update().stdout.fnmatch_lines(["  shrunk: test_a: 100.0 MiB -> 50.0 MiB"])
    assert sized.entries()["test_a"]["total"] == 50 << 20


def test_a_change_within_the_tolerance_rewrites_nothing(sized, monkeypatch):
    sized.update()
    before = sized.baseline().read_bytes()
    monkeypatch.setenv("SIZE", "101")
    result = sized.update()
    result.stdout.no_fnmatch_line("*updated*")
    assert sized.baseline().read_bytes() == before


def test_the_failure_names_the_command_that_accepts(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "200")
    result = sized.run()
    command = next(line for line in result.outlines if line.startswith("    pytest "))
    assert command == "    pytest test_it.py::test_a --torchmem-update-baseline"
    sized.run(*command.split()[1:]).assert_outcomes(passed=1)
    sized.run().assert_outcomes(passed=1)


def test_a_failed_test_changes_nothing(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_fails():
            use(1)
            assert False

        @pytest.mark.memory_baseline
        @pytest.mark.memory_budget("1MiB")
        def test_over_its_limit():
            use(2 * MiB)

        @pytest.mark.memory_baseline
        @pytest.mark.xfail
        def test_expected_to_fail():
            use(1)
            assert False

        @pytest.mark.memory_baseline
        def test_passes():
            use(1)
        """
    )
    project.update()
    assert list(project.entries()) == ["test_passes"]


def test_other_entries_of_the_file_stay_as_they_are(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use({} * MiB)\n"
    project.write(body.format("a", 1) + body.format("b", 2))
    project.update()
    project.write(body.format("a", 10) + body.format("b", 20))
    project.update("-k", "test_a")
    assert {key: entry["total"] >> 20 for key, entry in project.entries().items()} == {
        "test_a": 10,
        "test_b": 2,
    }


def test_an_entry_that_no_test_asks_for_is_shown_and_kept(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update()
    project.write(body.format("a"))
    line = "  unused: test_b: no test asked for it; kept"
    project.update().stdout.fnmatch_lines([line])
    assert sorted(project.entries()) == ["test_a", "test_b"]


def test_a_partial_run_calls_nothing_unused(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update()
    for selection in (["-k", "test_a"], ["test_it.py::test_a"], ["--deselect=test_it.py::test_b"]):
        project.update(*selection).stdout.no_fnmatch_line("unused:*")


def test_a_skipped_or_failed_test_keeps_its_entries_in_use(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(torchmem):\n    {}\n    use(MiB)\n"
    region = "\n    with torchmem.measure('r') as r: use(1)\n    torchmem.check(r)"
    project.write(body.format("a", region) + body.format("b", region))
    project.update()
    assert len(project.entries()) == 4
    project.write(body.format("a", "pytest.skip()") + body.format("b", "assert False"))
    project.update().stdout.no_fnmatch_line("unused:*")


def test_the_ini_name_does_the_same(sized):
    sized.ini("torchmem_update_baseline = true")
    sized.run().assert_outcomes(passed=1)
    assert sized.baseline().exists()


def test_a_new_contributor_is_named_and_an_old_one_on_a_new_line_is_not(project):
    before = (
        "@pytest.mark.memory_baseline\ndef test_a():\n    use(100 * MiB, module='net.fc', line=5)\n"
    )
    project.write(before)
    project.update()
    project.write(
        before.replace("line=5", "line=9") + "    use(9 * MiB, 'temporary', operator='aten::sum')\n"
    )
    result = project.run()
    result.stdout.fnmatch_lines(
        [
            "temporary peaked at 9.0 MiB, 9.0 MiB over the baseline of 0 B (floor 1.0 MiB): "
            "+9.0 MiB from aten::sum in net (fake_measure.py:12)",
            "grown against the baseline:",
            "+9.0 MiB  new  temporary *",
        ]
    )


def four(project):
    """Store entries that are grown, shrunk and unused in the project as it is then, one is new."""
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use({} * MiB)\n"
    project.write(body.format("grows", 10) + body.format("shrinks", 10) + body.format("goes", 7))
    project.update().assert_outcomes(passed=3)
    project.write(body.format("grows", 20) + body.format("shrinks", 5) + body.format("comes", 8))


def totals(project):
    return {key[5:]: entry["total"] >> 20 for key, entry in project.entries().items()}


BEFORE = {"grows": 10, "shrinks": 10, "goes": 7}


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("", {"grows": 20, "shrinks": 5, "goes": 7, "comes": 8}),
        ("=new", {**BEFORE, "comes": 8}),
        ("=new,shrunk", {**BEFORE, "shrinks": 5, "comes": 8}),
        ("=grown", {**BEFORE, "grows": 20}),
        ("=unused", {"grows": 10, "shrinks": 10}),
        ("=unused,new,grown,shrunk", {"grows": 20, "shrinks": 5, "comes": 8}),
    ],
)
def test_only_the_named_changes_are_stored(project, words, after):
    four(project)
    result = project.run(f"--torchmem-update-baseline{words}", "test_it.py")
    assert totals(project) == after
    failed = 0 if not words or "grown" in words else 1
    result.assert_outcomes(passed=3 - failed, failed=failed)


def test_the_bare_flag_does_not_take_a_path_for_its_words(project):
    four(project)
    project.run("--torchmem-update-baseline", "test_it.py").assert_outcomes(passed=3)
    project.write("def test_other(): pass\n", "test_other")
    project.run("--torchmem-update-baseline", "test_other.py").assert_outcomes(passed=1)


def test_what_is_removed_is_said(project):
    four(project)
    result = project.run("--torchmem-update-baseline=unused")
    result.stdout.fnmatch_lines(
        ["  unused: test_goes: no test asked for it; removed", "baseline updated: 1 entry *"]
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("-k", "grows or shrinks"),
        ("-m", "memory_baseline"),
        ("test_it.py::test_shrinks",),
        ("--deselect=test_it.py::test_comes",),
        ("-x",),
    ],
)
def test_a_module_that_is_not_run_as_a_whole_loses_nothing(project, arguments):
    four(project)
    project.run("--torchmem-update-baseline=unused", *arguments)
    # All tests have the mark, so -m takes nothing out; but it could.
    assert totals(project) == BEFORE


@pytest.mark.parametrize(
    "change",
    [
        "@pytest.mark.skip\ndef test_more(): pass\n",
        "def test_more(): pytest.skip()\n",
        "class TestMore:\n    pytest.skip('now', allow_module_level=True)\n",
        "import gone\n",
        "def test_more():\n    raise KeyboardInterrupt\n",
    ],
)
def test_a_module_with_something_that_did_not_run_loses_nothing(project, change):
    four(project)
    text = (project.path / "test_it.py").read_text()
    (project.path / "test_it.py").write_text(text + change)
    project.run_apart("--torchmem-update-baseline=unused")
    assert totals(project) == BEFORE


def test_tests_that_a_conftest_takes_out_quietly_are_noticed(project):
    four(project)
    conftest = project.path / "conftest.py"
    conftest.write_text(
        conftest.read_text() + "\ndef pytest_collection_modifyitems(items): del items[-1]\n"
    )
    project.run("--torchmem-update-baseline=unused")
    assert totals(project) == BEFORE


def test_the_same_name_in_another_module_does_not_keep_an_entry(project):
    four(project)
    project.write("@pytest.mark.memory_baseline\ndef test_goes(): use(7 * MiB)\n", "test_other")
    project.run("--torchmem-update-baseline=unused")
    assert "goes" not in totals(project)


def test_a_test_that_is_measured_elsewhere_keeps_its_entry_here(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update()
    elsewhere = "@pytest.mark.memory_budget(device='cuda')\n"
    project.write(elsewhere + body.format("a") + body.format("b"))
    project.run("--torchmem-update-baseline=unused")
    assert sorted(project.entries()) == ["test_a", "test_b"]


def test_words_nobody_knows_are_refused(sized):
    result = sized.run("--torchmem-update-baseline=all")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*: 'all' is not one of *"])
    result = sized.run_apart("--torchmem-update-baseline=nwe")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'nwe' is not one of new, grown, shrunk, unused*"])
    sized.ini("torchmem_update_baseline = new, all")
    result = sized.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    place = "ERROR: torchmem_update_baseline in tox.ini"
    result.stderr.fnmatch_lines([f"{place}: 'all' is not one of new, grown, shrunk, unused*"])


@pytest.mark.parametrize("word", ["nwe", "", "new,", "NEW grown"])
def test_words_nobody_knows_are_refused_with_where_they_were_given(sized, monkeypatch, word):
    argument = f"--torchmem-update-baseline={word}"
    told = (
        f"'{word.split(',')[-1].lower()}' is not one of new, grown, shrunk, unused *bad-argument?"
    )

    def refused(where, *arguments):
        result = sized.run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --torchmem-update-baseline{where}: {told}"])

    refused("", argument)
    monkeypatch.setenv("PYTEST_ADDOPTS", f"'{argument}'")
    refused(" in PYTEST_ADDOPTS")
    monkeypatch.delenv("PYTEST_ADDOPTS")
    sized.pytester.makeini(f"[pytest]\naddopts = -q '{argument}'")
    refused(" in addopts of tox.ini")


@pytest.mark.parametrize("dry", [(), ("--torchmem-dry-run",)])
def test_a_body_that_uses_nothing_is_stored_and_told(project, dry):
    project.write(
        """
        import os

        @pytest.mark.memory_baseline
        def test_a(torchmem):
            with torchmem.measure("part") as part:
                if "GROWN" in os.environ: use(3 * MiB)
            torchmem.check(part)
        """
    )
    told = "0 B; no memory was used; is the work done on another device, or in another *"
    shown = [f"  new: test_a: {told}", f"  new: test_a::part: {told}"]
    project.update(*dry).stdout.fnmatch_lines(["new *test_a *- *0 B*"] if dry else shown)


def test_only_what_an_update_would_store_is_offered_to_be_stored(project):
    project.write(
        """
        @pytest.mark.memory_baseline
        def test_new(): use(MiB)

        @pytest.mark.memory_budget("1MiB")
        @pytest.mark.memory_baseline
        def test_over(): use(2 * MiB)
        """
    )
    told = "1 measurement has no baseline; --torchmem-update-baseline stores it"
    project.run().stdout.fnmatch_lines([told])
    project.run("--torchmem-require-baseline").stdout.fnmatch_lines([told])
    project.update().stdout.no_fnmatch_line("*has no baseline;*")


def test_growth_from_nothing_fails_with_both_numbers(project, monkeypatch):
    project.write(
        """
        import os

        @pytest.mark.memory_baseline
        def test_a():
            if "SIZE" in os.environ: use(int(os.environ["SIZE"]) * MiB)
        """
    )
    project.update()
    project.run().stdout.fnmatch_lines(["*test_a * 0 B * same as baseline"])
    monkeypatch.setenv("SIZE", "1")
    project.run().assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "3")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["activation peaked at 3.0 MiB, 3.0 MiB over the baseline of 0 B (floor 1.0 MiB): +3.0 *"]
    )
    project.update().stdout.fnmatch_lines(["  grown: test_a: 0 B -> 3.0 MiB"])


def test_git_is_told_once_how_to_merge(project, sized):
    sized.update()
    attributes = sized.path / "__torchmem__" / ".gitattributes"
    assert attributes.read_text() == "*.json merge=union\n"
    attributes.write_text("mine\n")
    sized.baseline().unlink()
    sized.update()
    assert attributes.read_text() == "mine\n"
