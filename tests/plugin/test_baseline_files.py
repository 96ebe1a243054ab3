"""Baseline files on disk: readable diffs, nothing lost, one message when something is wrong."""

import json
import os

import pytest

from pytest_torchmem.analysis.baseline import BaselineEntry
from pytest_torchmem.analysis.results import CategoryBytes
from pytest_torchmem.errors import BaselineError
from pytest_torchmem.plugin import baselines
from pytest_torchmem.plugin.baselines import environment_name, portable_path, read_file, write_file

CPU = {"device": "cpu", "capability": "", "torch": "2.13", "allocator": ""}


def entry(total):
    amounts = CategoryBytes(activation=total)
    return BaselineEntry(total, amounts, amounts)


def test_a_file_is_sorted_and_one_fact_per_line(tmp_path):
    path = tmp_path / "a.json"
    write_file(path, CPU, {"test_b": entry(2), "test_a": entry(1)})
    assert path.read_text() == (
        "{\n"
        '  "entries": {\n'
        '    "test_a": {\n'
        '      "at_peak": {"activation": 1},\n'
        '      "live": [],\n'
        '      "peaks": {"activation": 1},\n'
        '      "retained": {},\n'
        '      "retained_live": [],\n'
        '      "total": 1\n'
        "    },\n"
        '    "test_b": {\n'
        '      "at_peak": {"activation": 2},\n'
        '      "live": [],\n'
        '      "peaks": {"activation": 2},\n'
        '      "retained": {},\n'
        '      "retained_live": [],\n'
        '      "total": 2\n'
        "    }\n"
        "  },\n"
        '  "environment": {\n'
        '    "allocator": "",\n'
        '    "capability": "",\n'
        '    "device": "cpu",\n'
        '    "torch": "2.13"\n'
        "  },\n"
        '  "format": 1\n'
        "}\n"
    )


def test_writing_keeps_what_someone_else_wrote_meanwhile(tmp_path):
    path = tmp_path / "a.json"
    write_file(path, CPU, {"test_a": entry(1)})
    write_file(path, CPU, {"test_b": entry(2)})
    assert sorted(read_file(path, CPU)) == ["test_a", "test_b"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_file(path, CPU, {"test_a": entry(1)})
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(BaselineError, match="No space left on device"):
        write_file(path, CPU, {"test_a": entry(2)})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("[]", "it is not a baseline file"),
        ('{"entries": [], "format": 1}', "it is not a baseline file"),
        ("{\n<<<<<<< ours\n}", "merge conflict markers"),
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
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BaselineError) as error:
        read_file(path, CPU)
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    before = path.read_bytes()
    with pytest.raises(BaselineError):
        write_file(path, CPU, {"test_a": entry(1)})
    assert path.read_bytes() == before


def test_every_format_number_is_explained():
    assert baselines.FORMAT in baselines.FORMATS
    assert sorted(baselines.FORMATS) == list(range(1, baselines.FORMAT + 1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cpu-torch2.13"),
        ({"device": "NVIDIA H200", "capability": "9.0"}, "nvidia-h200-sm90-torch2.13"),
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


def test_a_damaged_entry_fails_its_own_test_only(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update().assert_outcomes(passed=2)
    data = json.loads(project.baseline().read_text())
    del data["entries"]["test_a"]["total"]
    project.baseline().write_text(json.dumps(data))
    result = project.run()
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the entry 'test_a' is damaged ('total')*"])


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
