"""Small projects whose test bodies say what memory they use."""

from __future__ import annotations

import email.parser  # noqa: F401
import json
import textwrap
from pathlib import Path
from typing import Any

import _pytest.stepwise  # noqa: F401
import filelock  # noqa: F401
import pytest
import tabulate  # noqa: F401

# What a project imports, pytester forgets after its run: numpy cannot be loaded twice, and to load
# the others again would take an eighth of each run.
import pytest_torchmem.values.trace  # noqa: F401
from pytest_torchmem.store.baseline_rows import COLUMNS

FAKE = Path(__file__).with_name("fake_measure.py")


class Project:
    """A small project whose test bodies say what memory they use: ``use(3 * MiB)``."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.path = pytester.path
        self.ini()
        pytester.makeconftest("import fake_measure\n\nfake_measure.install()\n")
        pytester.makepyfile(fake_measure=FAKE.read_text(encoding="utf-8"))

    def ini(self, *lines: str) -> None:
        self.pytester.makeini("\n".join(["[pytest]", "addopts = -p no:cacheprovider", *lines]))

    def write(self, body: str, name: str = "test_it") -> None:
        header = "import pytest\nimport fake_measure\nfrom fake_measure import MiB, use\n\n"
        path = self.path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(header + textwrap.dedent(body), encoding="utf-8")

    def run(self, *arguments: str) -> pytest.RunResult:
        # The package is already imported here, which pytest's assertion rewriting warns about.
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        return self.pytester.runpytest_inprocess(*quiet, *arguments)

    def run_apart(self, *arguments: str) -> pytest.RunResult:
        """Run in a process of its own, for what cannot be done twice in one: xdist, imports."""
        return self.pytester.runpytest_subprocess(*arguments)

    def run_in_workers(self, workers: int, *arguments: str) -> pytest.RunResult:
        return self.run_apart("-p", "xdist", f"-n{workers}", *arguments)

    def update(self, *arguments: str) -> pytest.RunResult:
        return self.run("--torchmem-update-baseline", *arguments)

    def baseline(self, name: str = "test_it", environment: str = "cpu-torch2.99") -> Path:
        return self.path / "__torchmem__" / environment / f"{name}.json"

    def entries(self, name: str = "test_it") -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for row in json.loads(self.baseline(name).read_text())["entries"][:-1]:
            entry = entries.setdefault(row[0], {})
            if row[1] in COLUMNS:
                entry.update(zip(COLUMNS[row[1]], row[2:], strict=True))
        return entries


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)  # runs here may be runs there
    return Project(pytester)


@pytest.fixture(scope="session")
def compiler_is_imported() -> None:
    pytest.importorskip("torch._dynamo")


@pytest.fixture
def torch_pytester(compiler_is_imported: None, pytester: pytest.Pytester) -> pytest.Pytester:
    """Runs tests that use torch in this process.

    Pytester forgets what its runs import, and torch's compiler cannot be imported twice.
    """
    return pytester


SIZED = """
import os

SIZE = int(os.environ.get("SIZE", "100")) * MiB

@pytest.mark.memory_baseline
def test_a():
    use(SIZE, operator="aten::mm", module="net.fc")
"""


@pytest.fixture
def sized(project: Project) -> Project:
    """A project with one baseline test, ``test_it.py::test_a``; SIZE in the environment is its peak
    in MiB, 100 where it is not set. Nothing is stored yet."""
    project.write(SIZED)
    return project
