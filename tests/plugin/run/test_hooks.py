"""Hooks of ours: other plugins are told what was measured, once, where results are gathered."""

from __future__ import annotations

import json
from importlib.util import find_spec

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
    guide, _ = blocks(DOCS / "guides" / "hooks.md", "python")
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


# It cannot be imported again once pytester has forgotten it.
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="it runs torch")

GENERATION = """
    import pytest
    import torch
    from kv_cache import KVCache

    @pytest.mark.memory_budget(buffer="1KiB")
    def test_generation(torchmem):
        with torchmem.measure("generation") as generation:
            cache = KVCache()
            for _ in range(4):
                cache.append(torch.ones(1, 1024))
        assert generation.retained.buffer == 4 * 4096
"""

KV_CACHE = """
    import torch

    class KVCache:
        def __init__(self):
            self.keys = torch.empty(0, 1024)

        def append(self, keys):
            self.keys = torch.cat([self.keys, keys])
"""


@pytest.mark.slow
@needs_torch
def test_the_guides_pass_labels_a_cache_and_the_failure_tells_its_reason(torch_pytester):
    _, guide = blocks(DOCS / "guides" / "hooks.md", "python")
    torch_pytester.makeconftest(guide)
    torch_pytester.makepyfile(test_it=GENERATION, kv_cache=KV_CACHE)
    result = torch_pytester.runpytest_inprocess("-otorchmem_device=cpu", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*buffer peaked at 28.0 KiB, *(the KV cache) from aten::cat*"])


@pytest.mark.slow
@needs_torch
def test_a_pass_that_raises_is_named_at_the_end_and_no_test_fails(torch_pytester):
    torch_pytester.makeconftest(
        "def lost(storages): raise KeyError('layer')\n"
        "def pytest_torchmem_category_passes(config): return [lost]\n"
    )
    torch_pytester.makepyfile(
        "import pytest, torch\n@pytest.mark.memory_budget('1MiB')\ndef test_it(): torch.ones(100)\n"
    )
    result = torch_pytester.runpytest_inprocess("-otorchmem_device=cpu", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["not labelled as asked: *::test_it: the category pass lost raised KeyError: 'layer'; *"]
    )
