"""Baseline files on disk: readable diffs, nothing lost, one message when something is wrong."""

import json
import os
import subprocess
from dataclasses import replace

import pytest

from pytest_torchmem.store.baseline_file import EntryError, read_file
from pytest_torchmem.store.baseline_rows import origin_line
from pytest_torchmem.store.baselines import FileChanges, portable_path, write_file
from pytest_torchmem.store.files import LOCK
from pytest_torchmem.values.baseline import BaselineEntry, Numbers, complete, environment_name
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.units import MiB

CPU = complete({"device": "cpu", "torch": "2.13"})


def entry(total):
    amounts = CategoryBytes(activation=total)
    return BaselineEntry(total, amounts, amounts)


def write(path, entries, removed=()):
    write_file(path, CPU, FileChanges(entries, frozenset(removed)))


def keys_in(path):
    return sorted(read_file(path, CPU).lines)


def test_a_file_is_sorted_and_each_line_says_what_it_is_of(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_b": entry(2), "test_a": entry(1)})
    assert path.read_text() == (
        '{"format": 4,\n'
        '"environment": {\n'
        '"allocator": "",\n'
        '"capability": "",\n'
        '"device": "cpu",\n'
        '"libraries": "",\n'
        '"runtime": "",\n'
        '"torch": "2.13"\n'
        "},\n"
        '"work": ["total", "activation", "temporary", "input", "autograd_detail", "workspace"],\n'
        '"state": ["retained", "parameter", "gradient", "optimizer_state", "buffer", "unknown"],\n'
        '"entries": [\n'
        '["test_a", "1 B: activation 1 B"],\n'
        '["test_a", "work", 1, 1, 0, 0, 0, 0],\n'
        '["test_a", "state", 0, 0, 0, 0, 0, 0],\n'
        '["test_b", "2 B: activation 2 B"],\n'
        '["test_b", "work", 2, 2, 0, 0, 0, 0],\n'
        '["test_b", "state", 0, 0, 0, 0, 0, 0],\n'
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


@pytest.mark.parametrize("reformatted", [False, True])
def test_a_head_that_names_other_numbers_is_refused(tmp_path, reformatted):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    text = path.read_text().replace('"temporary", "input"', '"input", "temporary"', 1)
    path.write_text(json.dumps(json.loads(text), indent=4) if reformatted else text)
    with pytest.raises(BaselineError, match="its head names other columns for 'work'"):
        read_file(path, CPU)


def test_a_long_or_odd_name_stands_whole_in_each_row(tmp_path):
    path = tmp_path / "a.json"
    keys = [
        f"TestNet::test_forward_and_backward[{'x' * 300}]",
        f"TestNet::test_forward_and_backward[{'x' * 299}]",
        'test_odd["\\\n\x00\udcff' + "\U0001f600" * 20 + "]",
    ]
    write(path, dict.fromkeys(keys, entry(MiB)))
    stored = read_file(path, CPU)
    assert sorted(stored.lines) == sorted(keys)
    assert all(stored.entry(key, path) == entry(MiB) for key in keys)
    assert all(path.read_text(encoding="utf-8").count(f'["{key}", ') == 3 for key in keys[:2])
    write(path, {}, removed=keys[1:])
    assert keys_in(path) == keys[:1]


def test_a_sentence_that_does_not_say_what_the_numbers_say_is_damage(tmp_path):
    """Or a pull request could show people one size and compare with another."""
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(10 * MiB)})
    path.write_text(path.read_text().replace('"work", 10485760', '"work", 99485760'))
    with pytest.raises(EntryError, match=r"it says '10.0 MiB: .*', and its numbers are '94.9 MiB"):
        read_file(path, CPU).entry("test_a", path)


def with_origins():
    contributors = tuple(
        Contributor(Category.ACTIVATION, size, 1, "aten::mm", "net", Source("a.py", 3, "f"), phase)
        for size, phase in ((5, Phase.FORWARD), (4, Phase.BACKWARD))
    )
    amounts = CategoryBytes(activation=9)
    return BaselineEntry(
        9, amounts, amounts, contributors, CategoryBytes(gradient=4), contributors[1:], contributors
    )


def test_an_origin_is_a_contributor_without_its_labels_and_what_is_empty():
    full = replace(with_origins().live[0], labels=("step",), order=1, claimed="why")
    bare = Contributor(Category.UNKNOWN, 0, 1, "", "", None, Phase.PREEXISTING)
    amounts = CategoryBytes(activation=5)
    line = origin_line("a", BaselineEntry(5, amounts, amounts, at_peak_live=(full, bare)))
    written = json.loads(line)[2]["at_peak_live"]
    assert written[0] == {k: v for k, v in full.to_json().items() if k not in ("labels", "claimed")}
    assert written[1].keys() == {"category", "bytes", "count", "phase"}
    plain = replace(full, labels=(), claimed="")
    assert [Contributor.from_json(one) for one in written] == [plain, bare]


def test_the_file_beside_it_says_what_the_numbers_were_made_of(tmp_path):
    path = tmp_path / "a.json"
    whole = with_origins()
    write(path, {"test_a": whole})
    assert read_file(path, CPU).entry("test_a", path) == whole
    write_file(path, CPU, FileChanges(renamed={"test_a": "test_b"}))
    assert read_file(path, CPU).entry("test_b", path) == whole
    write(path, {}, removed=["test_b"])
    assert not path.with_suffix(".origins").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("[9, 9,", "[9, 8,"),
        lambda text: text.replace('"activation": 9', '"activation": 8'),
        lambda text: text.replace('"gradient": 4', '"gradient": 40'),
        lambda text: text.replace('"format": 1', '"format": 99'),
        lambda text: text + "\udcff",
        lambda _: "",
        lambda text: text.replace('"bytes": 5', '"bytes": "5"'),
        lambda text: text.replace('"live"', '"alive"'),
        lambda text: text.replace("}]", "}"),
    ],
)
def test_origins_that_cannot_be_used_cost_no_verdict(tmp_path, damage):
    path = tmp_path / "a.json"
    write(path, {"test_a": with_origins()})
    beside = path.with_suffix(".origins")
    text = damage(beside.read_text())
    assert text != beside.read_text()
    beside.write_bytes(text.encode("utf-8", "surrogateescape"))
    left = read_file(path, CPU).entry("test_a", path)
    assert (left.total, left.peaks.activation, left.retained.total) == (9, 9, 4)
    nothing_known = CategoryBytes(unknown=9)
    assert (left.at_peak, left.live, left.at_peak_live) == (nothing_known, (), ())


def test_origins_whose_parts_are_in_another_order_are_read(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": with_origins()})
    head, line, _ = path.with_suffix(".origins").read_text().split("\n")
    key, numbers, parts = json.loads(line)
    parts["at_peak"] = parts.pop("at_peak")
    path.with_suffix(".origins").write_text(f"{head}\n{json.dumps([key, numbers, parts])}\n")
    assert read_file(path, CPU).entry("test_a", path) == with_origins()


def test_an_entry_that_is_compared_by_its_numbers_decodes_no_contributor(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, {"test_a": with_origins()})

    def decoded(_):
        raise AssertionError("a contributor was decoded")

    monkeypatch.setattr(Contributor, "from_json", decoded)
    stored = read_file(path, CPU).reference("test_a", path)
    assert stored.numbers == Numbers.of(with_origins())
    with pytest.raises(AssertionError, match="was decoded"):
        stored.entry  # noqa: B018


def test_of_the_origins_of_two_branches_those_of_the_stored_numbers_count(tmp_path):
    path = tmp_path / "a.json"
    whole = with_origins()
    write(path, {"test_a": entry(8)})
    other = path.with_suffix(".origins").read_text().splitlines()[1]
    write(path, {"test_a": whole})
    with path.with_suffix(".origins").open("a") as file:
        file.write(f"{other}\n")
    assert read_file(path, CPU).entry("test_a", path) == whole
    write(path, {"test_b": entry(1)})
    assert other not in path.with_suffix(".origins").read_text()


def test_removing_the_last_entry_removes_the_file(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1), "test_b": entry(2)})
    write(path, {}, removed=["test_a"])
    assert keys_in(path) == ["test_b"]
    write(path, {}, removed=["test_b"])
    assert not path.exists()


def test_an_entry_that_is_there_twice_names_both_numbers(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(10 * MiB), "test_b": entry(1)})
    text = path.read_text()
    (line,) = (line for line in text.splitlines() if line.startswith('["test_a", "work"'))
    other = line.replace("10485760", "20971520")
    path.write_text(text.replace(line, f"{line}\n{other}"))
    stored = read_file(path, CPU)
    with pytest.raises(EntryError, match=r"as 10.0 MiB and as 20.0 MiB. Two branches"):
        stored.entry("test_a", path)
    assert stored.entry("test_b", path) == entry(1)
    write(path, {"test_b": entry(3)})
    assert other in path.read_text()
    write(path, {"test_a": entry(5)})
    assert read_file(path, CPU).entry("test_a", path) == entry(5)


def test_writing_keeps_what_someone_else_wrote_meanwhile(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    write(path, {"test_b": entry(2)})
    assert keys_in(path) == ["test_a", "test_b"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    before = path.read_bytes()
    origins = path.with_suffix(".origins")
    before_origins = origins.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(type(path), "replace", full)
    with pytest.raises(BaselineError, match="No space left on device"):
        write(path, {"test_a": entry(2)})
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {path.name, origins.name, LOCK}
    assert origins.read_bytes() == before_origins


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is no JSON: Expecting value (line 1, column 1)"),
        ("[]", "it is not a baseline file"),
        ('{"entries": 1, "environment": %s, "format": 4}', "it is not a baseline file"),
        (
            '{"entries": [["a", "work", 1]], "environment": {}, "format": 4}',
            "measured on another environment",
        ),
        ('{"entries": [["a", "work", 1]], "environment": %s, "format": 4}', "last lines"),
        ('{"entries": [["a", "total", 1], ["end"]], "environment": %s, "format": 4}', "not a row"),
        ('{"entries": [["a"], ["end"]], "environment": %s, "format": 4}', "not a row"),
        ('{"entries": [["a", "b", 1, 2], ["end"]], "environment": %s, "format": 4}', "not a row"),
        ('{"entries": [["a", "id", 1], ["end"]], "environment": %s, "format": 4}', "not a row"),
        ("\ufeff{}", "byte order mark"),
        ('{"entries": {}, "environment": %s}', "it does not say its format"),
        ('{"entries": [], "format": 4, "environment": 3}', "it does not say where it was measured"),
        ('{"entries": {}, "format": 3}', "was written by another version: record it again"),
        ('{"entries": [], "format": 99}', "was written by another version: record it again"),
        ('{"entries": {}, "format": [1]}', "its format is [1], and must be a number"),
        ('{"entries": {}, "format": "4"}', "its format is '4', and must be a number"),
        ('{"entries": [["a", "work", 1.5]], "format": 4}', "1.5 is not a whole number"),
        ('{"entries": [{"a": 1, "a": 2}], "format": 4}', "'a' occurs twice"),
        (f'{{"entries": {{}}, "format": {"1" * 5000}}}', "it has a number of 5000 digits"),
        (
            '{"entries": [], "environment": {"device": "gpu"}, "format": 4}',
            "measured on another environment",
        ),
        ("\udcff", "it is no text in UTF-8 (byte 0)"),
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


WORK = '["test_a", "work", 1048576, 1048576, 0, 0, 0, 0],\n'
DAMAGE = {
    "a row is missing": (WORK, "", "'work'"),
    "a row is short": (WORK, WORK.replace(", 0]", "]"), "'work'"),
    "it says another size": ('["test_a", "1.0', '["test_a", "9.0', "9.0 MiB: activation"),
    "a number is no number": (
        WORK,
        WORK.replace('"work", 1048576', '"work", "1"'),
        "a whole number",
    ),
    "a number is too large for any machine": (
        WORK,
        WORK.replace("1048576", "1" * 400, 1),
        "larger",
    ),
    "a row is no JSON": (WORK, WORK.replace('"work",', '"work"'), "delimiter"),
    "two rows are on a line": (WORK, WORK[:-1] + ' ["test_b", "odd"],\n', "two rows"),
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
        [f"the baseline __torchmem__/*'test_a' is damaged (*{told}*). *-update-baseline, which*"]
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
    assert "unchanged. Mend that and update again" in lines[0]  # a full disk has writable folders
    assert lines[0].startswith("the baseline __torchmem__/")
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


def test_another_environment_is_told_by_the_parts_that_differ(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(1)})
    with pytest.raises(BaselineError) as refused:
        read_file(path, complete({"device": "cpu", "torch": "2.14", "allocator": "max:1"}))
    assert (
        "another environment: allocator as usual, torch 2.13, and this run has allocator max:1, "
        "torch 2.14; move the file away"
    ) in str(refused.value)


@pytest.mark.parametrize(
    ("was", "is_now", "told"),
    [
        (', "work", 7,', ', "work", "7",', "expected a whole number of bytes, found '7'"),
        (', "work", 7, 7, 0, 0, 0, 0],', ', "work", [7]],', "its row 'work' is missing or not"),
    ],
)
def test_damage_is_told_in_words(tmp_path, was, is_now, told):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(7)})
    text = path.read_text()
    path.write_text(text.replace(was, is_now))
    assert path.read_text() != text
    with pytest.raises(EntryError) as refused:
        read_file(path, CPU).entry("test_a", path)
    assert f"'test_a' is damaged ({told}" in str(refused.value)


def test_a_merge_that_kept_two_versions_may_be_a_neighbour_s(tmp_path):
    path = tmp_path / "a.json"
    write(path, {"test_a": entry(7)})
    mine = path.read_text()
    write(path, {"test_a": entry(9)})
    rows = [line for line in mine.splitlines() if '"work"' in line and line.startswith('["test_a"')]
    path.write_text(path.read_text().replace('["end"]', f'{rows[0]}\n["end"]'))
    with pytest.raises(EntryError, match="or one changed it and the other an entry beside it"):
        read_file(path, CPU).entry("test_a", path)


@pytest.mark.parametrize("style", [(), ("--diff3",)])
def test_both_sides_of_a_merge_that_is_not_done_are_read(tmp_path, style):
    sides = {
        "ours": {"test_a": entry(1), "test_b": entry(2), "test_c": entry(4)},
        "base": {"test_a": entry(1), "test_b": entry(9)},
        "theirs": {"test_a": entry(1), "test_b": entry(3), "test_d": entry(5)},
    }
    for side, entries in sides.items():
        write(tmp_path / f"{side}.json", entries)
    files = [str(tmp_path / f"{side}.json") for side in sides]
    merged = subprocess.run(
        ["git", "merge-file", "-p", *style, *files], capture_output=True, text=True, check=False
    ).stdout
    assert "<<<<<<<" in merged
    path = tmp_path / "merged.json"
    path.write_text(merged)
    read = read_file(path, CPU)
    totals = {key: read.numbers(key, path).total for key in ("test_a", "test_c", "test_d")}
    assert totals == {"test_a": 1, "test_c": 4, "test_d": 5}
    with pytest.raises(EntryError, match=r"'test_b' is there twice, as 2 B and as 3 B"):
        read.numbers("test_b", path)
    write(path, {"test_b": entry(3)})
    assert "<<<<<<<" not in path.read_text()
    assert read_file(path, CPU).lines.keys() == {"test_a", "test_b", "test_c", "test_d"}
