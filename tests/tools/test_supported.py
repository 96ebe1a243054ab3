"""The table of what was run: made of pytest's own closing lines, and of the workflow's matrix."""

import re
from pathlib import Path

import pytest

from tools.supported import HEAD, PAGE, RELEASES, Releases, told_outcomes, with_rows

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
OLD, NEW = Releases("2.10.0", "3.11.7", "8.0.2", "1.24.4"), Releases("2.9.1", "3.11", "9", "2")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("....\n4 passed in 0.12s\n", "4 passed"),
        (
            "== 2 failed, 5 passed in 61.0s (0:01:01) ==\n",
            "5 passed, 2 failed",
        ),
        ("1 passed in 0.1s\n..\n7 passed, 1 error in 2.00s\n", "7 passed, 1 error"),
        ("no tests ran in 0.01s\n", ""),
        ("ERROR: file or directory not found\n", ""),
    ],
)
def test_counts_come_from_the_closing_line(printed: str, told: str) -> None:
    assert told_outcomes(printed) == told


def test_a_row_that_is_run_again_is_replaced_and_others_stay() -> None:
    page = f"before\n\n{HEAD}\nafter\n"
    once = with_rows(page, {OLD: "1 passed | Monday"})
    twice = with_rows(with_rows(once, {NEW: "2 passed | Monday"}), {OLD: "3 passed | Tuesday"})
    assert twice == (
        f"before\n\n{HEAD}"
        "| 2.9.1 | 3.11 | 9 | 2 | 2 passed | Monday |\n"
        "| 2.10.0 | 3.11.7 | 8.0.2 | 1.24.4 | 3 passed | Tuesday |\n"
        "\nafter\n"
    )


def test_the_page_has_the_table() -> None:
    page = PAGE.read_text("utf-8")
    assert with_rows(page, {}) == page


def test_the_workflow_runs_the_same_rows() -> None:
    cells = r'torch: "(.+?)", python: "(.+?)", pytest: "(.+?)", numpy: "(.+?)"'
    rows = [Releases(*found) for found in re.findall(cells, WORKFLOW.read_text("utf-8"))]
    # The job of everything runs the release that development uses.
    assert rows == [row for row in RELEASES if row.torch != "2.13"]


def jobs(workflow: str) -> dict[str, str]:
    parts = re.split(r"^  ([\w-]+):\n", workflow.partition("\njobs:\n")[2], flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_a_fork_runs_on_our_own_machine_only_when_its_label_is_put_on() -> None:
    own = [job for job in jobs(WORKFLOW.read_text("utf-8")).values() if "self-hosted" in job]
    assert len(own) == 1
    condition = "if: github.event.action == 'labeled' && github.event.label.name == 'gpu'\n"
    assert all(condition in job for job in own)


def test_actions_are_pinned_by_commit() -> None:
    # The action of this repository is the commit's own.
    used = set(re.findall(r"uses: (.*)", WORKFLOW.read_text("utf-8"))) - {"./"}
    assert used
    assert [one for one in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one)] == []
