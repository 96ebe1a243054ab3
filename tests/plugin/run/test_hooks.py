"""Hooks of ours: other plugins are told what was measured, once, where results are gathered."""

from __future__ import annotations

import json

import pytest

from tests.documents import DOCS, blocks

BODIES = """
    @pytest.mark.memory_budget("1MiB")
    def test_large():
        use(4 * MiB)

    @pytest.mark.memory_budget("1MiB")
    def test_small(torchmem):
        with torchmem.measure("part") as part:
            use(3)
        torchmem.check(part)

    def test_unmeasured():
        pass
"""


@pytest.fixture
def tracked(project):
    """A project with the guide's conftest, and what its tracker was sent."""
    (guide,) = blocks(DOCS / "guides" / "hooks.md", "python")
    conftest = project.path / "conftest.py"
    before = conftest.read_text() if conftest.exists() else ""
    conftest.write_text(guide + "\n" + before, encoding="utf-8")
    project.write(BODIES)

    def sent():
        lines = (project.path / "memory.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    return sent


def test_each_result_is_sent_with_its_failure(project, tracked):
    project.run()
    large, body, part = tracked()
    assert (large["test"], large["peak_bytes"]) == ("test_it.py::test_large", 4 << 20)
    assert large["failure"].startswith("memory peaked at 4.0 MiB")
    assert [(r["region"], r["failure"]) for r in (body, part)] == [("", ""), ("part", "")]


def test_the_hook_of_reports_is_called_for_each_that_was_written(project, tracked):
    result = project.run("--torchmem-report=out", "--torchmem-report=run.json", "-s")
    index = project.path / "out" / "index.html"
    result.stdout.fnmatch_lines([f"*to be uploaded: {index}", "*to be uploaded: *run.json"])


def test_under_xdist_the_controller_alone_tells(project, tracked):
    pytest.importorskip("xdist")
    project.run_apart("-n", "2", "-p", "xdist")
    assert sorted(r["test"].partition("::")[2] for r in tracked()) == [
        "test_large",
        "test_small",
        "test_small",
    ]
