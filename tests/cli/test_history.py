"""torchmem history: who accepted which number when, read from git."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from pytest_torchmem.store.baselines import FileChanges, write_file
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.units import MiB
from tests.cli.files import CPU

PLACE = "tests/__torchmem__/cpu-torch2.13"


def git(folder, *arguments):
    who = ("-c", "user.name=Ada & b", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def accept(folder, sizes, message, name="test_net", removed=()):
    entries = {
        key: BaselineEntry(
            size * MiB, CategoryBytes(activation=size * MiB), CategoryBytes(activation=size * MiB)
        )
        for key, size in sizes.items()
    }
    path = folder / PLACE / f"{name}.json"
    write_file(path, CPU, FileChanges(entries, frozenset(removed)))
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def merge_both(folder, side, main):
    """Two branches accept numbers after a first one, and git keeps the lines of both."""
    git(folder, "init", "-q", "-b", "main")
    accept(folder, {"test_a": 10}, "first")
    git(folder, "checkout", "-q", "-b", "side")
    accept(folder, side, "side")
    git(folder, "checkout", "-q", "main")
    accept(folder, main, "main")
    (folder / ".gitattributes").write_text("*.json merge=union\n*.origins merge=union\n")
    git(folder, "merge", "-q", "side", "-m", "both")


@pytest.fixture
def told(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    accept(tmp_path, {"test_a": 100, "test_b": 5}, "first <script>")
    accept(tmp_path, {"test_a": 130}, "a wider net")
    git(tmp_path, "mv", f"{PLACE}/test_net.json", f"{PLACE}/test_moved.json")
    git(tmp_path, "commit", "-q", "-m", "moved")
    accept(tmp_path, {"test_a": 65}, "half of it", "test_moved", removed=["test_b"])
    return tmp_path


def test_the_latest_changes_of_all_tests_come_first(command, told):
    code, out, _ = command("history", "-C", told)
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    name = "tests/test_{}.py::{} cpu-torch2.13"
    told_lines = [
        ("removed -", name.format("moved", "test_b"), "half of it"),
        ("-50 % 65.0 MiB", name.format("moved", "test_a"), "half of it"),
        ("+30 % 130.0 MiB", name.format("moved", "test_a"), "a wider net"),
        ("new 5.0 MiB", name.format("moved", "test_b"), "first <script>"),
        ("new 100.0 MiB", name.format("moved", "test_a"), "first <script>"),
    ]
    assert len(lines) == 1 + len(told_lines)
    for line, (change, test, subject) in zip(lines[1:], told_lines, strict=True):
        assert f"Ada & b {change} {test} " in line
        assert line.endswith(subject)


def test_a_change_of_another_number_than_the_peak_is_told_by_it(command, tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    accept(tmp_path, {"test_a": 100}, "first")
    amounts = CategoryBytes(activation=100 * MiB)
    kept = BaselineEntry(
        100 * MiB + 4, amounts, amounts, retained=CategoryBytes(activation=9 * MiB)
    )
    write_file(tmp_path / PLACE / "test_net.json", CPU, FileChanges({"test_a": kept}))
    git(tmp_path, "commit", "-q", "-a", "-m", "keeps it")
    _, out, _ = command("history", "-C", tmp_path)
    assert re.search(r"retained \+9\.0 MiB +100\.0 MiB .* keeps it", out)


def test_a_commit_has_its_short_name(command, told):
    out = command("history", "test_moved.py::test_a", "-C", told)[1]
    (name,) = re.findall(r" ([0-9a-f]+) +half of it", out)
    assert len(name) == 9
    git(told, "cat-file", "commit", name)


def test_a_test_has_a_bar_for_each_size_that_was_accepted(command, told):
    _, out, _ = command("history", "test_moved.py::test_a", "-C", told)
    bars = [max(line.count("#"), line.count("\u2588")) for line in out.splitlines()[2:]]
    assert bars == [23, 30, 15]
    assert out.splitlines()[0] == "tests/test_moved.py::test_a on cpu-torch2.13"


def test_the_page_is_one_file_that_runs_nothing(command, told):
    page = told / "history.html"
    assert command("history", "-C", told, "-o", page)[0] == 0
    text = page.read_text()
    assert "first &lt;script&gt;" in text
    assert "Ada &amp; b" in text
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)  # type: ignore[assignment]
    parser.feed(text)
    # A dot for each size of test_a; test_b has one, which needs no plot.
    assert tags.count("circle") == 3
    assert tags.count("svg") == 1
    assert not {"script", "link", "img"} & set(tags)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("nothing",), "has 'nothing' in its name"), (("-o", "x.png"), "is written as .html")],
)
def test_what_cannot_be_shown_says_so(command, told, arguments, reason):
    code, _, err = command("history", "-C", told, *arguments)
    assert code == 2
    assert reason in err


def test_without_a_repository_or_a_baseline_it_says_so(command, tmp_path):
    assert "git cannot read the history" in command("history", "-C", tmp_path)[2]
    git(tmp_path, "init", "-q")
    assert command("history", "-C", tmp_path)[0] == 2
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "nothing")
    assert "git knows no baseline" in command("history", "-C", tmp_path)[2]


def test_branches_do_not_undo_each_other(command, tmp_path):
    merge_both(tmp_path, side={"test_side": 5}, main={"test_z": 5})
    accept(tmp_path, {"test_a": 20}, "later")
    lines = [" ".join(line.split()) for line in command("history", "-C", tmp_path)[1].splitlines()]
    told = [line.partition("Ada & b ")[2].partition(" cpu")[0] for line in lines[1:]]
    name = "tests/test_net.py::test_"
    assert told[0] == f"+100 % 20.0 MiB {name}a"
    assert sorted(told[1:]) == [
        f"new 10.0 MiB {name}a",
        f"new 5.0 MiB {name}side",
        f"new 5.0 MiB {name}z",
    ]


def test_an_entry_that_a_merge_left_twice_was_what_was_accepted_last(command, tmp_path):
    merge_both(tmp_path, side={"test_a": 20}, main={"test_a": 30})
    accept(tmp_path, {"test_a": 60}, "measured again")
    assert "60.0 MiB" in command("history", "-C", tmp_path)[1].splitlines()[1]
    assert "new" not in command("history", "-C", tmp_path)[1].splitlines()[1]


def test_the_page_begins_with_the_test_that_changed_by_most_and_has_dates(command, tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    accept(tmp_path, {"test_a": 100, "test_b": 10, "test_c": 50}, "first")
    accept(tmp_path, {"test_a": 130, "test_b": 20, "test_c": 20}, "second")
    page = tmp_path / "history.html"
    assert command("history", "-C", tmp_path, "-o", page)[0] == 0
    text = page.read_text()
    assert re.findall(r"<h2>tests/test_net.py::(\w+)", text) == ["test_b", "test_c", "test_a"]
    days = re.findall(
        r'<text x="\d+" y="\d+"(?: text-anchor="end")?>(\d{4}-\d\d-\d\d)</text>', text
    )
    assert len(days) == 2 * 3
    assert "<a " not in text


def test_a_release_of_torch_is_marked_in_the_plot_of_its_test(command, tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    accept(tmp_path, {"test_a": 100}, "first")
    accept(tmp_path, {"test_a": 130}, "second")
    newer = tmp_path / PLACE.replace("2.13", "2.14")
    newer.mkdir()
    shutil.copy(tmp_path / PLACE / "test_net.json", newer)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "torch 2.14")
    page = tmp_path / "history.html"
    assert command("history", "-C", tmp_path, "-o", page)[0] == 0
    text = page.read_text()
    assert re.findall(r"<h2>tests/test_net.py::test_a <small>on (\S+)</small>", text) == ["cpu"]
    marks = re.findall(r'<text x="([\d.]+)" y="10">torch ([\d.]+)</text>', text)
    assert [release for _, release in marks] == ["2.13", "2.14"]
    assert float(marks[0][0]) < float(marks[1][0])
    assert len(re.findall(r'<path d="M[^"M]+"/>', text)) == 2  # a line for each


@pytest.mark.parametrize(
    "remote",
    [
        "https://github.com/ada/net.git",
        "https://token@github.com/ada/net",
        "git@github.com:ada/net.git",
        "ssh://git@github.com/ada/net.git",
    ],
)
def test_a_commit_of_the_page_leads_to_the_code_host(command, told, remote):
    git(told, "remote", "add", "origin", remote)
    page = told / "history.html"
    assert command("history", "-C", told, "-o", page)[0] == 0
    links = re.findall(
        r'<a href="https://github.com/ada/net/commit/(\w+)">(\w+)</a>', page.read_text()
    )
    assert len(links) == 5
    assert all(target == name for target, name in links)
    assert "token" not in page.read_text()


@pytest.mark.parametrize("remote", ["/srv/net.git", "javascript:alert(1)", 'https://x"><b>/net'])
def test_a_remote_that_is_no_code_host_is_no_link(command, told, remote):
    git(told, "remote", "add", "origin", remote)
    page = told / "history.html"
    assert command("history", "-C", told, "-o", page)[0] == 0
    assert "<a " not in page.read_text()
