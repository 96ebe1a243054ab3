"""The action: one comment for a pull request, and what a workflow types reaches pip and pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Keeps comments in a file, and answers as `gh api` does for the calls of the action.
GH = r"""#!/usr/bin/env python3
import json, os, sys
from pathlib import Path

kept = Path(os.environ["COMMENTS"])
comments = json.loads(kept.read_text())
words = sys.argv[1:]
if os.environ.get("READ_ONLY") and "--method" in words:
    sys.exit("HTTP 403")
if "--jq" in words:
    mine = [c for c in comments if c["user"]["type"] == "Bot"]
    print(*(c["id"] for c in mine if c["body"].startswith(os.environ["MARKER"])), sep="\n")
    sys.exit()
body = Path(words[words.index("-F") + 1].removeprefix("body=@")).read_text()
if words[words.index("--method") + 1] == "PATCH":
    number = int(words[3].rpartition("/")[2])
    next(c for c in comments if c["id"] == number)["body"] = body
else:
    comments.append({"id": len(comments), "body": body, "user": {"type": "Bot"}})
kept.write_text(json.dumps(comments))
"""


@pytest.fixture
def action(tmp_path):
    """Run a step of the action with programs that note their arguments."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gh").write_text(GH)
    (programs / "gh").chmod(0o755)
    (tmp_path / "comments.json").write_text(
        json.dumps(
            [{"id": 0, "body": "<!-- pytest-torchmem: memory -->", "user": {"type": "User"}}]
        )
    )
    (tmp_path / "torchmem-report").mkdir()

    def run(step: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROOT / ".ci" / "action", step],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "COMMENTS": str(tmp_path / "comments.json"),
                "GITHUB_REPOSITORY": "a/b",
                "NUMBER": "7",
                **environment,
            },
            text=True,
            capture_output=True,
            check=False,
        )

    return run


def _bodies(folder: Path) -> list[str]:
    comments = json.loads((folder / "comments.json").read_text())
    return [comment["body"] for comment in comments if comment["user"]["type"] == "Bot"]


def test_a_pull_request_has_one_comment_of_each_name(action, tmp_path):
    summary = tmp_path / "torchmem-report" / "summary.md"
    for text in ("first", "second"):
        summary.write_text(f"<!-- pytest-torchmem -->\n### Memory: {text}\n")
        for name in ("memory", "nightly"):
            done = action("comment", NAME=name, PAGE="https://example.org/page")
            assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert _bodies(tmp_path) == [
        f"<!-- pytest-torchmem: {name} -->\n### Memory: second\n\n"
        "[The whole report](https://example.org/page)\n"
        for name in ("memory", "nightly")
    ]


def test_a_token_that_may_not_write_is_a_notice(action, tmp_path):
    (tmp_path / "torchmem-report" / "summary.md").write_text("<!-- pytest-torchmem -->\n")
    done = action("comment", NAME="memory", PAGE="", READ_ONLY="1")
    assert done.returncode == 0
    assert done.stdout.startswith("::notice::The comment could not be written")
    assert _bodies(tmp_path) == []


def test_without_a_report_there_is_no_comment(action, tmp_path):
    assert action("comment", NAME="memory", PAGE="").returncode == 0
    assert _bodies(tmp_path) == []


def test_pip_and_pytest_are_given_the_words_that_were_typed(action, tmp_path):
    python = tmp_path / "bin" / "python"
    python.write_text(
        '#!/bin/bash\n[[ $1 == -c ]] && exec python3 "$@"\n'
        'printf "%s|" "$@" >> noted\necho >> noted\n'
    )
    python.chmod(0o755)
    action("test", ARGUMENTS="-k 'a or b' $(touch hacked) tests").check_returncode()
    action("test", ARGUMENTS="").check_returncode()
    action("install", INDEX="https://i", TORCH="2.13.*", INSTALL="-e '.[x]'").check_returncode()
    action("install", INDEX="https://i", TORCH="", INSTALL="").check_returncode()
    ci = "-m|pytest|--torchmem-ci|--torchmem-report=torchmem-report|"
    ours = ROOT / ".ci" / ".."
    assert (tmp_path / "noted").read_text().splitlines() == [
        f"{ci}-k|a or b|$(touch|hacked)|tests|",
        ci,
        f"-m|pip|install|--extra-index-url|https://i|torch==2.13.*|{ours}|-e|.[x]|",
        f"-m|pip|install|--extra-index-url|https://i|torch|{ours}|",
    ]
    assert not (tmp_path / "hacked").exists()


def test_actions_are_pinned_to_commits():
    files = [ROOT / "action.yml", *(ROOT / ".github" / "workflows").glob("*.yml")]
    used = [line for file in files for line in re.findall(r"uses: (.+)", file.read_text())]
    assert len(used) > 10
    for use in used:
        assert use == "./" or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", use), use


def test_a_baseline_without_its_origins_is_refused(tmp_path):
    folder = tmp_path / "__torchmem__" / "cpu"
    folder.mkdir(parents=True)

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    def hook() -> tuple[int, str]:
        baseline = "__torchmem__/cpu/test_a.json"
        done = subprocess.run(
            [ROOT / ".ci" / "origins", baseline],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        )
        return done.returncode, done.stdout

    git("init", "--quiet")
    for ending in ("json", "origins"):
        (folder / f"test_a.{ending}").write_text("{}")
    git("add", "*.json")
    refused = (
        "__torchmem__/cpu/test_a.json: its .origins is not added: "
        "git add __torchmem__/cpu/test_a.origins\n"
    )
    assert hook() == (1, refused)
    git("add", ".")
    assert hook() == (0, "")
    (folder / "test_a.origins").write_text("{} changed")
    assert hook() == (1, refused)
    git("add", ".")
    assert hook() == (0, "")
