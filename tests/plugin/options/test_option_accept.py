"""--torchmem-accept: which changes an update stores."""

import pytest


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
    ("accepted", "after"),
    [
        ("", {"grows": 20, "shrinks": 5, "goes": 7, "comes": 8}),
        ("new", {**BEFORE, "comes": 8}),
        ("new,shrunk", {**BEFORE, "shrinks": 5, "comes": 8}),
        ("grown", {**BEFORE, "grows": 20}),
        ("unused", {"grows": 10, "shrinks": 10}),
        ("unused,new,grown,shrunk", {"grows": 20, "shrinks": 5, "comes": 8}),
    ],
)
def test_only_the_named_changes_are_stored(project, accepted, after):
    four(project)
    words = [f"--torchmem-accept={accepted}"] if accepted else []
    result = project.run("--torchmem-update-baseline", *words, "test_it.py")
    assert totals(project) == after
    failed = 0 if not accepted or "grown" in accepted else 1
    result.assert_outcomes(passed=3 - failed, failed=failed)


def test_what_is_removed_is_said(project):
    four(project)
    result = project.run("--torchmem-update-baseline", "--torchmem-accept=unused")
    result.stdout.fnmatch_lines(
        ["  unused: test_goes: no test uses it; removed", "baseline updated: 1 entry *"]
    )


@pytest.mark.slow
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
    project.run("--torchmem-update-baseline", "--torchmem-accept=unused", *arguments)
    # All tests have the mark, so -m takes nothing out; but it could.
    assert totals(project) == BEFORE


@pytest.mark.slow
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
    project.run_apart("--torchmem-update-baseline", "--torchmem-accept=unused")
    assert totals(project) == BEFORE


def test_tests_that_a_conftest_takes_out_quietly_are_noticed(project):
    four(project)
    conftest = project.path / "conftest.py"
    conftest.write_text(
        conftest.read_text() + "\ndef pytest_collection_modifyitems(items): del items[-1]\n"
    )
    project.run("--torchmem-update-baseline", "--torchmem-accept=unused")
    assert totals(project) == BEFORE


def test_a_run_that_collects_no_doctests_keeps_their_entries(project):
    project.write(
        '''
        def doubled():
            """
            >>> torchmem = getfixture("torchmem")
            >>> with torchmem.measure("part") as part: use(2 * MiB)
            >>> torchmem.check(part)
            """

        @pytest.mark.memory_baseline
        def test_a(): use(MiB)
        '''
    )
    project.update("--doctest-modules", "test_it.py").assert_outcomes(passed=2)
    before = project.baseline().read_bytes()
    assert sorted(project.entries()) == ["test_a", "test_it.doubled::part"]
    project.update("--torchmem-accept=unused")
    assert project.baseline().read_bytes() == before


def test_the_same_name_in_another_module_does_not_keep_an_entry(project):
    four(project)
    project.write("@pytest.mark.memory_baseline\ndef test_goes(): use(7 * MiB)\n", "test_other")
    project.run("--torchmem-update-baseline", "--torchmem-accept=unused")
    assert "goes" not in totals(project)


def test_a_test_that_is_measured_elsewhere_keeps_its_entry_here(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update()
    elsewhere = "@pytest.mark.memory_budget(device='cuda')\n"
    project.write(elsewhere + body.format("a") + body.format("b"))
    project.run("--torchmem-update-baseline", "--torchmem-accept=unused")
    assert sorted(project.entries()) == ["test_a", "test_b"]


@pytest.mark.parametrize("word", ["nwe", "", "new,", "NEW grown"])
def test_a_word_that_nobody_knows_is_refused(sized, word):
    result = sized.update(f"--torchmem-accept={word}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    unknown = word.split(",")[-1].lower()
    told = f"'{unknown}' is not one of new, grown, shrunk, unused *bad-argument?"
    result.stderr.fnmatch_lines([f"ERROR: --torchmem-accept: {told}"])


def test_without_an_update_it_is_refused(sized):
    result = sized.run("--torchmem-accept=new")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*-accept does nothing without --torchmem-update-baseline; *"])


def test_words_after_an_update_are_told_how_to_write_them(sized, monkeypatch):
    words = "--torchmem-update-baseline=new,grown"
    told = "write --torchmem-update-baseline --torchmem-accept=new,grown *bad-argument?"

    def refused(where, *arguments):
        result = sized.run_apart(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --torchmem-update-baseline{where}: *{told}"])

    refused("", words)
    monkeypatch.setenv("PYTEST_ADDOPTS", words)
    refused(" in PYTEST_ADDOPTS")
    monkeypatch.delenv("PYTEST_ADDOPTS")
    sized.pytester.makeini(f"[pytest]\naddopts = -q {words}")
    refused(" in addopts of tox.ini")


@pytest.mark.slow
def test_a_module_with_classes_is_run_whole_like_any_other(project):
    both = "@pytest.mark.memory_baseline\nclass TestNet:\n    def test_stays(self): use(MiB)\n"
    project.write(both + "    def test_goes(self): use(MiB)\n")
    project.update()
    project.write(both)
    project.update("--torchmem-accept=unused")
    assert list(project.entries()) == ["TestNet::test_stays"]


def test_an_update_that_changes_nothing_else_still_says_what_is_unused(project):
    stays = "@pytest.mark.memory_baseline\ndef test_stays(): use(MiB)\n"
    project.write(stays + stays.replace("stays", "goes"))
    project.update()
    project.write(stays)
    project.update().stdout.fnmatch_lines(["*unused: test_goes: no test uses it; kept"])
