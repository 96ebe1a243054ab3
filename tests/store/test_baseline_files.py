"""Baseline files on disk: readable diffs, nothing lost, one message when something is wrong."""

import json
import os

import pytest

from pytest_torchmem.analysis.judge.environments import complete, environment_name
from pytest_torchmem.store.baseline_file import (
    FORMAT,
    FORMATS,
    EntryError,
    FileChanges,
    read_file,
    write_file,
)
from pytest_torchmem.store.baselines import portable_path
from pytest_torchmem.store.files import LOCK
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.units import MiB

CPU = complete({"device": "cpu", "torch": "2.13"})


def entry(total):
    amounts = CategoryBytes(activation=total)
    return BaselineEntry(total, amounts, amounts)


def write(path, entries, removed=()):
    write_file(path, CPU, FileChanges(entries, frozenset(removed)))


def keys(path):
    return sorted(read_file(path, CPU).lines)


def test_a_file_is_sorted_and_each_line_says_what_it_is_of(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_b": entry(2), "test_a": entry(1)})
    assert path.read_text() == (
        '{"format": 2,\n'
        '"environment": {"allocator": "", "capability": "", "device": "cpu", "libraries": "", '
        '"runtime": "", "torch": "2.13"},\n'
        '"entries": [\n'
        '["test_a", "total", 1],\n'
        '["test_a", "at_peak", {"activation": 1}],\n'
        '["test_a", "peaks", {"activation": 1}],\n'
        '["test_a", "retained", {}],\n'
        '["test_b", "total", 2],\n'
        '["test_b", "at_peak", {"activation": 2}],\n'
        '["test_b", "peaks", {"activation": 2}],\n'
        '["test_b", "retained", {}],\n'
        '["end"]\n'
        "]}\n"
    )


def test_adding_an_entry_changes_no_line_of_another(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_b": entry(2)})
    before = path.read_text().splitlines()
    write(path, {"test_a": entry(1), "test_c": entry(3)})
    after = path.read_text().splitlines()
    assert [line for line in after if '"test_a"' not in line and '"test_c"' not in line] == before


def test_a_reformatted_file_is_read_and_written_as_before(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1), "test_b": entry(2)})
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before), indent=4))
    write(path, {"test_a": entry(1)})
    assert path.read_text() == before


def test_a_file_of_format_1_is_read_and_its_entries_stay(tmp_path):
    path = tmp_path / "a.json"
    old = {k: v for k, v in CPU.items() if k not in ("runtime", "libraries")}
    entries = {"test_a": entry(1).to_json()}
    path.write_text(json.dumps({"entries": entries, "environment": old, "format": 1}))
    assert read_file(path, CPU).entry("test_a", path) == entry(1)
    write(path, {"test_b": entry(2)})
    assert read_file(path, CPU).entry("test_a", path) == entry(1)
    assert json.loads(path.read_text())["format"] == 2


def test_removing_the_last_entry_removes_the_file(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1), "test_b": entry(2)})
    write(path, {}, removed=["test_a"])
    assert keys(path) == ["test_b"]
    write(path, {}, removed=["test_b"])
    assert not path.exists()


def test_an_entry_that_is_there_twice_names_both_numbers(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(10 * MiB), "test_b": entry(1)})
    text = path.read_text()
    other = '["test_a", "total", 20971520],\n["test_b", "total"'
    path.write_text(text.replace('["test_b", "total"', other, 1))
    stored = read_file(path, CPU)
    with pytest.raises(EntryError, match=r"as 10.0 MiB and as 20.0 MiB. Two branches"):
        stored.entry("test_a", path)
    assert stored.entry("test_b", path) == entry(1)
    write(path, {"test_b": entry(3)})
    assert path.read_text().count('"total", 20971520') == 1
    write(path, {"test_a": entry(5)})
    assert read_file(path, CPU).entry("test_a", path) == entry(5)


def test_parts_that_do_not_add_up_are_damage(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(10)})
    path.write_text(path.read_text().replace('"total", 10', '"total", 11'))
    with pytest.raises(BaselineError, match="its parts are 10 B together, its total is 11 B"):
        read_file(path, CPU).entry("test_a", path)


def test_writing_keeps_what_someone_else_wrote_meanwhile(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    write(path, {"test_b": entry(2)})
    assert keys(path) == ["test_a", "test_b"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(BaselineError, match="No space left on device"):
        write(path, {"test_a": entry(2)})
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {path.name, LOCK}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a baseline file"),
        ('{"entries": 1, "format": 1}', "it is not a baseline file"),
        ("{\n<<<<<<< ours\n}", "merge conflict markers"),
        ('{"entries": [["a", "total", 1]], "environment": {}, "format": 2}', "was measured on"),
        ('{"entries": [["a", "total", 1]], "environment": %s, "format": 2}', "last lines"),
        ('{"entries": [["a", "sum", 1], ["end"]], "environment": %s, "format": 2}', "not a row"),
        ('{"entries": [["a"], ["end"]], "environment": %s, "format": 2}', "not a row"),
        ('{"entries": {}, "format": 99}', "has format 99"),
        ('{"entries": {}, "format": [1]}', "has format [1]"),
        ('{"entries": {"a": {"total": 1.5}}, "format": 1}', "1.5 is not a whole number"),
        ('{"entries": {"a": {}, "a": {}}, "format": 1}', "'a' occurs twice"),
        ('{"entries": {}, "environment": {"device": "gpu"}, "format": 1}', "was measured on"),
        ("\udcff", "codec can't decode"),
    ],
)
def test_a_file_that_cannot_be_read_says_why_and_is_never_written_to(tmp_path, text, reason):
    path = tmp_path / "a.json"
    text = text.replace("%s", json.dumps(CPU))
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BaselineError) as error:
        read_file(path, CPU)
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    before = path.read_bytes()
    with pytest.raises(BaselineError):
        write(path, {"test_a": entry(1)})
    assert path.read_bytes() == before


def test_every_format_number_is_explained():
    assert sorted(FORMATS) == list(range(1, FORMAT + 1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cpu-torch2.13"),
        ({"device": "NVIDIA H200", "capability": "9.0"}, "nvidia-h200-sm90-torch2.13"),
        (
            {"device": "NVIDIA H200", "capability": "sm90", "runtime": "cuda12"},
            "nvidia-h200-sm90-cuda12-torch2.13",
        ),
        ({"libraries": "CUBLAS_WORKSPACE_CONFIG=:16:8"}, "cpu-torch2.13-libsa7ab4c0c"),
        ({"capability": "arm64"}, "cpu-arm64-torch2.13"),
        ({"allocator": "expandable_segments:True"}, "cpu-torch2.13-alloc508ccad3"),
        ({"device": "../x"}, "x-torch2.13"),
    ],
)
def test_an_environment_makes_a_plain_folder_name(changes, name):
    assert environment_name({**CPU, **changes}) == name


def test_a_source_is_named_the_same_on_every_machine(tmp_path):
    assert portable_path(str(tmp_path / "src/net.py"), tmp_path) == "src/net.py"
    installed = "/usr/lib/python3/site-packages/transformers/models/gpt2.py"
    assert portable_path(installed, tmp_path) == "transformers/models/gpt2.py"
    assert portable_path("/opt/elsewhere/lib/net.py", tmp_path) == "lib/net.py"
    assert portable_path("<string>", tmp_path) == "<string>"


def test_a_corrupt_file_fails_the_tests_that_use_it_and_no_other(project):
    body = "@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n"
    project.write(body)
    project.write(body, "test_other")
    project.update().assert_outcomes(passed=2)
    project.baseline().write_text("{")
    for arguments in ((), ("--torchmem-update-baseline",)):
        result = project.run(*arguments)
        result.assert_outcomes(passed=1, failed=1)
        result.stdout.fnmatch_lines(
            ["the baseline *test_it.json cannot be read: *[[]bad-baseline]"]
        )
        assert project.baseline().read_text() == "{"


DAMAGE = {
    "a number is missing": ('["test_a", "total", 1048576],\n', "", "'total'"),
    "it does not add up": ('["test_a", "total", 1048576]', '["test_a", "total", 9]', "1048576 B"),
    "a row is no JSON": (
        '["test_a", "total", 1048576]',
        '["test_a", "total" 1048576]',
        "delimiter",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_fails_its_own_test_only_and_an_update_replaces_it(project, damage):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update().assert_outcomes(passed=2)
    whole = project.baseline().read_text()
    before, after, told = DAMAGE[damage]
    assert before in whole
    project.baseline().write_text(whole.replace(before, after))
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [f"*the entry 'test_a' is damaged (*{told}*). *--torchmem-update-baseline, which*"]
    )
    project.run("--torchmem-update-baseline", "--torchmem-accept=grown").assert_outcomes(
        passed=1, failed=1
    )
    place = "replaces an entry that was damaged or that a merge left twice"
    dry = project.update("--torchmem-dry-run")
    dry.stdout.fnmatch_lines([f"new *test_a ({place})*"])
    result = project.update()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([f"  new: test_a: 1.0 MiB; {place}", "*1 entry in 1 file*"])
    assert project.baseline().read_text() == whole


def test_a_damaged_contributor_is_replaced_too(project, monkeypatch):
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    project.update()
    whole = project.baseline().read_text()
    assert '"live", {"bytes": 1048576' in whole
    project.baseline().write_text(whole.replace('"live", {"bytes"', '"live", {"byte"'))
    project.update().stdout.fnmatch_lines(["  new: test_a: 1.0 MiB; replaces an entry that *"])
    assert project.baseline().read_text() == whole


def test_a_failing_body_keeps_its_own_error_over_a_corrupt_file(project):
    project.write(
        "@pytest.mark.memory_baseline\ndef test_a():\n    use(MiB)\n    assert 0, 'mine'\n"
    )
    project.baseline().parent.mkdir(parents=True)
    project.baseline().write_text("{")
    result = project.run()
    result.stdout.fnmatch_lines(["*AssertionError: mine*"])
    result.stdout.no_fnmatch_line("*bad-baseline*")


def test_a_folder_that_cannot_be_written_is_said_once_and_fails_the_run(sized):
    (sized.path / "__torchmem__").write_text("a file where the folder would be")
    result = sized.update()
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    lines = [line for line in result.outlines if "cannot be" in line]
    assert len(lines) == 1
    assert lines[0].endswith("[bad-baseline]")


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator can write anywhere")
def test_a_read_only_folder_loses_nothing(sized, monkeypatch):
    sized.update()
    before = sized.baseline().read_bytes()
    sized.baseline().parent.chmod(0o555)
    monkeypatch.setenv("SIZE", "200")
    result = sized.update()
    sized.baseline().parent.chmod(0o755)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot be written (Permission denied)*"])
    assert sized.baseline().read_bytes() == before


def test_one_folder_that_cannot_be_written_does_not_stop_the_others(project):
    body = "@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n"
    project.write(body, "one/test_it")
    project.write(body, "two/test_that")
    (project.path / "one/__torchmem__").write_text("")
    result = project.update("--rootdir=.")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (project.path / "two/__torchmem__/cpu-torch2.99/test_that.json").exists()
