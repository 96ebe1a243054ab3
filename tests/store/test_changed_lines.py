"""What has changed since a baseline was stored is known from git, or from code that was kept."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_torchmem.store.changed_lines import ChangedLines, KeptCode, StoredEntry
from pytest_torchmem.values.contributors import Source

BASELINE = "tests/__torchmem__/cpu/test_net.json"
BEFORE = "def f(x):\n    y = x + 1\n    return y\n"
AFTER = "def f(x):\n    z = x.float()\n    y = x + 2\n    return y\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A repository whose baseline was committed with the first version of its only module."""
    git(tmp_path, "init", "-q")
    put(tmp_path, "src/net.py", BEFORE)
    put(tmp_path, BASELINE, "{}")
    commit(tmp_path)
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@x.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "change")


def stored(baseline: Path) -> StoredEntry:
    """The file, as if it were the only entry in it."""
    return StoredEntry(baseline, baseline.read_text() if baseline.exists() else "")


def changed(folder: Path) -> list[int]:
    lines = ChangedLines(folder)
    return [
        line
        for line in range(1, 5)
        if lines.changed_at(stored(folder / BASELINE), Source("src/net.py", line, "f"))
    ]


def test_nothing_has_changed_at_first(folder: Path) -> None:
    assert changed(folder) == []


def test_lines_of_the_working_tree_have_changed(folder: Path) -> None:
    put(folder, "src/net.py", AFTER)
    assert changed(folder) == [2, 3]


@pytest.mark.parametrize(
    "text",
    [
        BEFORE.replace("y = x + 1", "y = x + 1  # one more"),
        BEFORE.replace("y = x + 1", "y = (x  +  1)"),
        BEFORE.replace("y = x + 1", "y = (\n        x + 1\n    )"),
        BEFORE.replace("def f(x):", 'def f(x):\n    """Return one more."""'),
    ],
    ids=["comment", "spaces", "wrapped", "docstring"],
)
def test_what_does_the_same_has_not_changed(folder: Path, text: str) -> None:
    put(folder, "src/net.py", text)
    assert changed(folder) == []
    # One line of a hunk that does something else is enough.
    put(folder, "src/net.py", text.replace("return y", "return y * 2"))
    assert changed(folder) != []


def test_lines_of_a_function_that_came_have_changed(folder: Path) -> None:
    put(folder, "src/net.py", f"def g(x):\n    return x\n\n\n{BEFORE}")
    assert changed(folder) == [1, 2, 3, 4]


def test_lines_of_later_commits_have_changed_too(folder: Path) -> None:
    put(folder, "src/net.py", AFTER)
    commit(folder)
    assert changed(folder) == [2, 3]


def now_at(folder: Path) -> list[int]:
    lines, baseline = ChangedLines(folder), folder / BASELINE
    return [lines.now_at(stored(baseline), Source("src/net.py", n, "f")).line for n in range(4)]


def test_lines_are_found_again_where_an_edit_moved_them(folder: Path) -> None:
    assert now_at(folder) == [0, 1, 2, 3]
    put(folder, "src/net.py", BEFORE.replace("    y", "    y = x + 1\n    y"))
    assert now_at(folder) == [0, 1, 3, 4]
    put(folder, "src/net.py", "import torch\n" + AFTER)
    assert now_at(folder) == [0, 2, 3, 5]
    put(folder, "src/net.py", BEFORE.replace("    y = x + 1\n", ""))
    assert now_at(folder) == [0, 1, 2, 2]


def test_lines_of_a_baseline_that_was_stored_since_stay_where_they_are(folder: Path) -> None:
    put(folder, "src/net.py", "import torch\n" + BEFORE)
    put(folder, BASELINE, "{} ")
    assert now_at(folder) == [0, 1, 2, 3]


def test_all_lines_of_a_new_file_have_changed_before_git_is_told_of_it_and_after(
    folder: Path,
) -> None:
    put(folder, "src/layers.py", BEFORE)
    new = Source("src/layers.py", 2, "f")
    assert ChangedLines(folder).changed_at(stored(folder / BASELINE), new)
    git(folder, "add", "src/layers.py")
    assert ChangedLines(folder).changed_at(stored(folder / BASELINE), new)


def test_lines_of_files_that_git_ignores_or_has_elsewhere_have_not_changed(folder: Path) -> None:
    put(folder, ".gitignore", "venv\n")
    put(folder, "venv/torch.py", BEFORE)
    elsewhere = folder.parent / "elsewhere.py"
    elsewhere.write_text(BEFORE)
    for file in ("venv/torch.py", str(elsewhere), "../elsewhere.py", "gone.py", ""):
        assert not ChangedLines(folder).changed_at(stored(folder / BASELINE), Source(file, 2, "f"))


def test_a_new_baseline_is_of_the_code_that_it_was_committed_with(folder: Path) -> None:
    put(folder, "src/net.py", AFTER)
    put(folder, BASELINE, "{} ")
    commit(folder)
    assert changed(folder) == []


def test_a_baseline_that_is_not_committed_is_held_against_the_newest_commit(folder: Path) -> None:
    git(folder, "rm", "-q", "--cached", BASELINE)
    git(folder, "commit", "-q", "-m", "without")
    put(folder, "src/net.py", AFTER)
    lines = ChangedLines(folder)
    other = folder / "tests/__torchmem__/cpu/test_other.json"
    assert lines.changed_at(stored(other), Source("src/net.py", 2, "f"))


def test_a_project_below_the_repository_names_files_from_its_own_root(folder: Path) -> None:
    put(folder, "src/net.py", AFTER)
    lines = ChangedLines(folder / "src")
    assert lines.changed_at(stored(folder / BASELINE), Source("net.py", 2, "f"))


def places(folder: Path) -> list[str]:
    return [str(place) for place in ChangedLines(folder).places(stored(folder / BASELINE))]


def test_each_change_of_code_has_a_place(folder: Path) -> None:
    put(folder, "src/net.py", AFTER)
    assert places(folder) == ["net.py:2"]


def test_lines_that_are_gone_have_the_place_of_the_next_one_and_have_not_changed(
    folder: Path,
) -> None:
    put(folder, "src/net.py", BEFORE.replace("    y = x + 1\n", ""))
    assert places(folder) == ["net.py:2 (lines before it are gone)"]
    assert changed(folder) == []


def test_comments_and_files_that_came_or_went_are_no_places(folder: Path) -> None:
    put(folder, "src/old.py", BEFORE)
    put(folder, BASELINE, "{} ")
    commit(folder)
    put(folder, "src/net.py", f"# one\n\n{BEFORE}")
    put(folder, "src/new.py", BEFORE)
    (folder / "src/old.py").unlink()
    git(folder, "add", "-A")
    assert places(folder) == []


def test_of_python_what_does_something_else_has_places(folder: Path) -> None:
    rest = "".join(f"    x = x + {number}\n" for number in range(20))
    put(folder, "src/net.py", f"{BEFORE}\n\ndef test_f():\n    assert f(1) == 2\n")
    put(folder, "src/more.py", f"def g(x):\n    'once'\n{rest}    return x\n")
    commit(folder)
    put(folder, BASELINE, "{ }")
    commit(folder)
    more = f"LIMIT = 2\n\n\ndef g(x):\n    'twice'\n{rest}    return (x)\n"
    put(folder, "src/net.py", f"{BEFORE}\n\ndef test_g():\n    assert f(2) == 3\n")
    put(folder, "src/more.py", more)
    assert places(folder) == []
    git(folder, "mv", "src/more.py", "src/most.py")
    done = more.replace("'twice'\n", "'thrice'\n    x = x.float()\n")
    put(folder, "src/most.py", done)
    assert places(folder) == ["most.py:6"]


def test_a_file_with_an_umlaut_is_known_by_its_name(folder: Path) -> None:
    put(folder, "src/größe.py", BEFORE)
    put(folder, BASELINE, "{} ")
    commit(folder)
    put(folder, "src/größe.py", AFTER)
    assert places(folder) == ["größe.py:2"]
    lines = ChangedLines(folder)
    assert lines.changed_at(stored(folder / BASELINE), Source("src/größe.py", 2, "f"))


def test_without_a_repository_nothing_has_changed(tmp_path: Path) -> None:
    put(tmp_path, "src/net.py", AFTER)
    assert changed(tmp_path) == []


def test_without_git_nothing_has_changed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "src/net.py", AFTER)
    monkeypatch.setenv("PATH", "")
    assert changed(folder) == []


def places_after_edit(folder: Path, name: str, code: str, now: str = "b = 2") -> list[str]:
    """Return the places after the second line of a file of settings changed, beside some code."""
    put(folder, name, "[a]\nb = 1\n")
    put(folder, "src/read.py", code)
    put(folder, BASELINE, "{} ")
    commit(folder)
    put(folder, name, f"[a]\n{now}\n")
    return places(folder)


@pytest.mark.parametrize(
    "code", ['load("small.toml")\n', "load('conf/small')\n", 'load("small", suffix=".toml")\n']
)
def test_settings_that_code_names_have_places(folder: Path, code: str) -> None:
    assert places_after_edit(folder, "conf/small.toml", code) == ["small.toml:2"]


@pytest.mark.parametrize("code", ["small = 1\n", 'load("smaller.toml")\n', 'load("asmall")\n'])
def test_settings_that_no_code_names_have_none(folder: Path, code: str) -> None:
    assert places_after_edit(folder, "conf/small.toml", code) == []


@pytest.mark.parametrize("name", [".ci/small.toml", ".small.toml", "conf/__torchmem__/small.json"])
def test_settings_of_tools_and_baselines_have_none(folder: Path, name: str) -> None:
    file = Path(name).name
    assert places_after_edit(folder, name, f'load("{file}")\n') == []


def test_settings_are_not_read_as_python(folder: Path) -> None:
    """In Python this only says something, and in a file of settings it may be a value."""
    code, now = 'load("small.toml")\n', "b = 1  # two"
    assert places_after_edit(folder, "conf/small.toml", code, now) == ["small.toml:2"]


def test_settings_with_an_odd_name_have_places(folder: Path) -> None:
    assert places_after_edit(folder, "größe [1].ini", 'load("größe [1].ini")\n') == [
        "größe [1].ini:2"
    ]


def test_settings_above_the_root_of_the_tests_are_not_looked_at(folder: Path) -> None:
    places_after_edit(folder, "conf/small.toml", 'load("small.toml")\n')
    assert ChangedLines(folder / "src").places(stored(folder / BASELINE)) == ()


@pytest.fixture
def kept(tmp_path: Path) -> ChangedLines:
    """A project without a repository, whose code was kept when its baseline was written."""
    project = tmp_path / "project"
    put(project, "src/net.py", BEFORE)
    put(project, "conf/small.toml", "[a]\nb = 1\n")
    put(project, "src/read.py", 'load("small.toml")\n')
    put(project, "venv/pyvenv.cfg", "")
    put(project, "venv/lib/net.py", BEFORE)
    put(project, ".hidden/net.py", BEFORE)
    put(project, "data.json", "1" * (1 << 19))
    put(project, BASELINE, "{}")
    lines = remembering(project)
    lines.keep([stored(project / BASELINE).text])
    return lines


def remembering(project: Path) -> ChangedLines:
    (project.parent / "cache").mkdir(exist_ok=True)
    return ChangedLines(project, KeptCode(project, lambda: project.parent / "cache"))


def test_without_a_repository_lines_are_held_against_code_that_was_kept(
    kept: ChangedLines, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    put(project, "src/net.py", AFTER)
    put(project, "conf/small.toml", "[a]\nb = 2\n")
    put(project, "src/new.py", BEFORE)
    for lines, is_known in ((remembering(project), True), (ChangedLines(project), False)):
        changes = [
            line
            for line in range(1, 5)
            if lines.changed_at(stored(project / BASELINE), Source("src/net.py", line, "f"))
        ]
        assert changes == ([2, 3] if is_known else [])
        new = Source("src/new.py", 1, "f")
        assert bool(lines.changed_at(stored(project / BASELINE), new)) is is_known
        places = [str(place) for place in lines.places(stored(project / BASELINE))]
        assert places == (["small.toml:2", "net.py:2"] if is_known else [])
    moved = remembering(project).now_at(stored(project / BASELINE), Source("src/net.py", 3, "f"))
    assert moved.line == 4


def test_code_is_kept_for_a_baseline_with_the_content_that_was_written(
    kept: ChangedLines, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    put(project, "src/net.py", AFTER)
    put(project, BASELINE, "{} ")
    assert remembering(project).places(stored(project / BASELINE)) == ()
    put(project, "elsewhere.json", "{}")
    assert remembering(project).places(stored(project / "elsewhere.json"))


def test_an_update_of_one_entry_leaves_another_with_the_code_that_it_was_measured_with(
    kept: ChangedLines, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    one, other = (StoredEntry(project / BASELINE, text) for text in ("one", "other"))
    kept.keep([one.text, other.text])
    put(project, "src/net.py", AFTER)
    remembering(project).keep([one.text])
    lines = remembering(project)
    assert [str(place) for place in lines.places(other)] == ["net.py:2"]
    assert lines.places(one) == ()


def test_a_clone_without_the_history_of_a_baseline_is_told_as_that(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    put(folder, "src/net.py", AFTER)
    commit(folder)
    shallow, whole = (tmp_path_factory.mktemp("clone") / name for name in ("shallow", "whole"))
    for clone, depth in ((shallow, ["--depth=1"]), (whole, [])):
        git(folder, "clone", "-q", *depth, folder.as_uri(), str(clone))
    entry = stored(shallow / BASELINE)
    assert ChangedLines(shallow).is_cut_off(entry)
    assert ChangedLines(shallow).places(entry) == ()
    entry = stored(whole / BASELINE)
    assert not ChangedLines(whole).is_cut_off(entry)
    assert [str(place) for place in ChangedLines(whole).places(entry)] == ["net.py:2"]


def test_code_is_kept_without_data_tools_and_packages(kept: ChangedLines, tmp_path: Path) -> None:
    (note,) = (path for path in (tmp_path / "cache").iterdir() if path.is_file())
    listed = (f"--git-dir={tmp_path / 'cache/code'}", "ls-tree", "-r", "--name-only")
    files = subprocess.run(
        ["git", *listed, note.read_text()], check=True, capture_output=True, text=True
    )
    assert files.stdout.split() == ["conf/small.toml", "src/net.py", "src/read.py"]


def test_lines_of_a_file_with_a_new_name_have_changed_where_they_were_edited(
    kept: ChangedLines, tmp_path: Path
) -> None:
    project = tmp_path / "project"
    put(project, "src/net.py", "import torch\n\n\n" + BEFORE * 9)
    put(project, BASELINE, "{} ")
    kept.keep([stored(project / BASELINE).text])
    put(project, "src/model.py", "import torch\n\n" + BEFORE * 8 + AFTER)
    (project / "src/net.py").unlink()
    lines, baseline = remembering(project), project / BASELINE
    entry = stored(baseline)
    lines_changed = [n for n in range(1, 40) if lines.changed_at(entry, at("src/model.py", n))]
    assert lines_changed == [28, 29]
    assert lines.now_at(stored(baseline), at("src/net.py", 30)) == at("src/model.py", 30)
    assert lines.now_at(stored(baseline), at("src/net.py", 5)) == at("src/model.py", 4)
    assert [str(place) for place in lines.places(stored(baseline))] == ["model.py:28"]


def test_git_knows_new_names_of_files_that_it_was_told_of(folder: Path) -> None:
    put(folder, "src/net.py", BEFORE * 9)
    put(folder, BASELINE, "{} ")
    commit(folder)
    git(folder, "mv", "src/net.py", "src/model.py")
    assert not ChangedLines(folder).places(stored(folder / BASELINE))
    put(folder, "src/model.py", BEFORE * 8 + AFTER)
    lines, baseline = ChangedLines(folder), folder / BASELINE
    assert [str(place) for place in lines.places(stored(baseline))] == ["model.py:26"]
    assert lines.now_at(stored(baseline), at("src/net.py", 2)) == at("src/model.py", 2)


def at(file: str, line: int) -> Source:
    return Source(file, line, "f")


def test_code_is_kept_beside_the_repository_that_a_hook_of_git_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = (folder / ".git" / "index").read_bytes()
    monkeypatch.setenv("GIT_DIR", str(folder / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(folder / ".git" / "index"))
    put(folder, "src/new.py", BEFORE)
    lines = ChangedLines(folder, KeptCode(folder, lambda: folder / ".git"))
    lines.keep([stored(folder / BASELINE).text])
    assert (folder / ".git" / "index").read_bytes() == index
    put(folder, "src/new.py", AFTER)
    assert [str(place) for place in lines.places(stored(folder / BASELINE))] == ["new.py:2"]


def test_where_code_cannot_be_kept_nothing_is(folder: Path) -> None:
    lines = ChangedLines(folder, KeptCode(folder, lambda: folder / "src/net.py"))
    lines.keep([stored(folder / BASELINE).text])
    put(folder, "src/net.py", AFTER)
    assert lines.changed_at(stored(folder / BASELINE), Source("src/net.py", 2, "f"))
