"""--torchmem-update-baseline: accept what was measured, and show what changed."""

import subprocess

import pytest


def test_a_new_entry_is_stored_and_compared_with_from_then_on(sized):
    result = sized.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_a *  new",
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
    sized.run().stdout.fnmatch_lines(["test_it.py::test_a *same as baseline", "memory: 1 ok"])


def test_growth_is_accepted_and_the_test_passes(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "200")
    sized.run().assert_outcomes(failed=1)
    result = sized.update()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  grown: test_a: 100.0 MiB -> 200.0 MiB"])
    sized.run().assert_outcomes(passed=1)


OTHER = """
import os

KEPT = int(os.environ.get("KEPT", "0")) * MiB

@pytest.mark.memory_baseline
def test_a():
    use(100 * MiB, "input")
    if KEPT:
        use(KEPT, "parameter", retained=True)
    else:
        use(9 * MiB, "gradient")
"""


def test_a_change_is_told_by_the_number_that_changed(project, monkeypatch):
    project.write(OTHER)
    project.update()
    monkeypatch.setenv("KEPT", "9")
    project.run("--torchmem-report=run.md").stdout.fnmatch_lines(
        ["test_it.py::test_a *109.0 MiB *grown, retained +9.0 MiB"]
    )
    assert "grown, retained +9.0 MiB |" in (project.path / "run.md").read_text()
    shown = project.update("--torchmem-dry-run").stdout
    shown.fnmatch_lines(["grown * test_a *retained *0 B *9.0 MiB *__torchmem__*"])
    project.update().stdout.fnmatch_lines(["  grown: test_a: retained 0 B -> 9.0 MiB"])


def test_shrinking_passes_and_is_stored_by_an_update(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "50")
    result = sized.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["test_it.py::test_a *shrunk, -50.0 MiB (-50 %)"])
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
    offer = "if this change is wanted, accept it: "
    command = next(line for line in result.outlines if line.startswith(offer)).removeprefix(offer)
    assert command == "pytest test_it.py::test_a --torchmem-update-baseline"
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
    line = "  unused: test_b: no test uses it; kept"
    removes = "--torchmem-update-baseline --torchmem-accept=unused removes what is unused"
    project.update().stdout.fnmatch_lines([line, removes])
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
            "memory peaked at 109.0 MiB, +9.0 MiB (+9 %) over the baseline of 100.0 MiB: "
            "+9.0 MiB of temporary from aten::sum at fake_measure.py:12 in net",
            "also: temporary peaked at 9.0 MiB, +9.0 MiB over the baseline of 0 B (same cause)",
            "grown against the baseline (tolerance 2 %), in all *, all at that line",
        ]
    )


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
    project.run("-otorchmem_require_baseline=true").stdout.fnmatch_lines([told])
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
    monkeypatch.setenv("SIZE", "3")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["memory peaked at 3.0 MiB, +3.0 MiB over the baseline of 0 B: +3.0 *"]
    )
    project.update().stdout.fnmatch_lines(["  grown: test_a: 0 B -> 3.0 MiB"])


def test_git_is_told_once_how_to_merge(project, sized):
    sized.update()
    attributes = sized.path / "__torchmem__" / ".gitattributes"
    assert attributes.read_text() == (
        "*.json merge=union\n*.origins merge=union -diff linguist-generated\n"
    )
    attributes.write_text("mine\n")
    sized.baseline().unlink()
    sized.update()
    assert attributes.read_text() == "mine\n"


def test_entries_that_stay_say_again_what_they_are_made_of(sized):
    sized.update()
    text, origins = sized.baseline().read_text(), sized.baseline().with_suffix(".origins")
    before = origins.read_text()
    assert "aten::mm" in before
    origins.unlink()
    sized.run()
    assert not origins.exists()
    told = sized.update()
    told.stdout.fnmatch_lines(["1 entry as before, now with their causes (*test_it.json)"])
    assert (sized.baseline().read_text(), origins.read_text()) == (text, before)
    sized.update().stdout.no_fnmatch_line("*as before*")


def test_a_failure_says_that_the_causes_are_not_known(sized, monkeypatch):
    sized.update()
    sized.baseline().with_suffix(".origins").unlink()
    monkeypatch.setenv("SIZE", "200")
    told = sized.run()
    told.assert_outcomes(failed=1)
    told.stdout.fnmatch_lines(
        [
            "memory peaked at 200.0 MiB, *: largest 200.0 MiB *; the cause is not known: the "
            ".origins file beside the baseline lacks this entry, and an update writes it"
        ]
    )
    sized.update()
    monkeypatch.setenv("SIZE", "300")
    assert "is not known" not in sized.run().stdout.str()


def test_an_update_ends_with_what_git_has_to_be_told(sized):
    needed = "git does not know all of them yet: git add __torchmem__"
    sized.update().stdout.no_fnmatch_line("*git add*")  # no repository
    for arguments in (("init", "-q"), ("add", "__torchmem__/.gitignore")):
        subprocess.run(["git", *arguments], cwd=sized.path, check=True)
    sized.baseline().unlink()
    sized.update().stdout.fnmatch_lines([needed])
    subprocess.run(["git", "add", "__torchmem__"], cwd=sized.path, check=True)
    sized.baseline().unlink()
    sized.update().stdout.no_fnmatch_line("*git add*")
