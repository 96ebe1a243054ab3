"""A user's file that names our types passes mypy in its strictest mode, and pyright where it is."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_torchmem
from tests.documents import DOCS

pytestmark = pytest.mark.slow

USERS = """
from collections.abc import Callable, Iterator, Sequence

import pytest

from pytest_torchmem import (
    Category,
    GiB,
    MiB,
    Profile,
    Ranks,
    Region,
    Result,
    Torchmem,
    TorchmemError,
    analyze,
    estimate,
    load,
    measure,
    save,
)
from pytest_torchmem.allocator import Fit, Snapshot
from pytest_torchmem.hooks import Explanation, StorageClaim
from pytest_torchmem.types import Contributor, Events, LimitError, Measure, Peak


def pytest_torchmem_measured(
    config: pytest.Config, nodeid: str, results: Sequence[Result], failure: str
) -> None:
    print(sum(result.peak.total + result.retained.net for result in results))


def cache(storages: Sequence[Explanation]) -> Iterator[StorageClaim]:
    for found in storages:
        yield StorageClaim(found, Category.BUFFER, "the KV cache")


def test_step(torchmem: Torchmem) -> None:
    with torchmem.measure("forward") as forward:
        pass
    assert activation_of(forward) <= 3 * MiB
    torchmem.check(forward, tolerance="2%")


def activation_of(region: Region) -> int:
    return region.peak.activation


@measure(total="2GiB", device="cpu")
def step(rows: int) -> float:
    return rows / 2


def results() -> Sequence[Result]:
    step(3)
    block: Measure = measure("block", growth=0)
    with block:
        for _ in block.steps(3, warmup=1):
            pass
    fit: Fit = block.fits("24GiB")
    print(activation_of(block), fit, block.growth)
    return step.results


def largest(peak: Peak) -> Contributor:
    return peak.live[0]


def read(path: str, finished: object) -> list[Contributor]:
    profile: Profile = analyze(finished, "cuda")
    profile.export("timeline.html", labels="torch")
    profile.export("stacks.txt", "stacks", weight="time")
    events: Events = profile.events
    print(events.table(limit=3), [event.name for event in events.ranked(2)])
    found = load(path)
    if isinstance(found, (Profile, Snapshot)):
        print(found.simulate().peak.reserved <= GiB)
        return []
    save("again.json", found.values())
    return [largest(result.peak) for result in found.values()]


def simulated(program: Callable[[int], None]) -> Result:
    return estimate(program, 8, gpu="A100")


def limits(paths: Sequence[str]) -> tuple[str, ...]:
    try:
        Ranks.load(paths).check("2GiB", spread="1MiB")
    except LimitError as error:
        return error.sentences
    except TorchmemError as error:
        return (error.slug,)
    return ()
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "test_user.py").write_text(USERS)
    (tmp_path / "test_wrong.py").write_text(USERS + "Region(1)\n")
    # No name above has a type of torch's, and to check all of torch takes half a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    return tmp_path


def test_a_users_file_is_checked_with_our_types(project):
    pytest.importorskip("mypy")
    files = ("test_user.py", "test_wrong.py")
    command = (sys.executable, "-m", "mypy", "--strict", "--cache-dir", project, *files)
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    *errors, closing = done.stdout.splitlines()
    assert {error.partition(":")[0] for error in errors} == {"test_wrong.py"}, done.stdout
    assert closing.endswith("in 1 file (checked 2 source files)")


def test_pyright_finds_nothing_in_it(project):
    pyright = shutil.which("pyright") or pytest.skip("pyright is not installed")
    command = (pyright, "--pythonpath", sys.executable, "test_user.py")
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_fourteen_names() -> None:
    names = set(pytest_torchmem.__all__) - {"__version__"}
    assert len(names) == 14
    assert all(getattr(pytest_torchmem, name) is not None for name in names)


PACKAGE = Path(pytest_torchmem.__file__).parent
ROOMS = ("", ".allocator", ".hooks", ".types")


def classes_of_ours() -> dict[str, ast.ClassDef]:
    """Every class of the package; a class has one name in all of it."""
    files = (path for path in PACKAGE.rglob("*.py") if path.parent.name != "torch_names")
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    return {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    }


def functions_of_ours() -> dict[str, ast.FunctionDef]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    found = (node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in found}


def given_by(node: ast.AST, members: set[str] | None) -> Iterator[tuple[str, str]]:
    """What a public function returns, and what public methods and attributes of a class are."""
    if isinstance(node, ast.FunctionDef):
        yield node.name, ast.unparse(node.returns) if node.returns else ""
        return
    assert isinstance(node, ast.ClassDef)
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef):
            name, text = inner.name, ast.unparse(inner.returns) if inner.returns else ""
        elif isinstance(inner, ast.AnnAssign):
            name, text = ast.unparse(inner.target), ast.unparse(inner.annotation)
        else:
            continue
        if not name.startswith("_") and (members is None or name in members):
            yield f"{node.name}.{name}", text


def documented(name: str) -> set[str] | None:
    """The members of a class that the page of the API names; None for all of them."""
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    found = re.search(rf"auto\w+:: pytest_torchmem\S*\.{name}\b.*\n((?:   .*\n)*)", page)
    listed = re.search(r":members: (.+)", found[1]) if found else None
    return set(listed[1].split(", ")) if listed else None


def test_every_type_that_a_public_name_gives_has_a_public_name() -> None:
    public = {
        name for room in ROOMS for name in importlib.import_module(f"pytest_torchmem{room}").__all__
    }
    classes, functions = classes_of_ours(), functions_of_ours()
    missing: dict[str, set[str]] = {}
    for name in public:
        node = classes.get(name) or functions.get(name)
        for where, text in given_by(node, documented(name)) if node else ():
            for word in re.findall(r"[A-Za-z]\w*", text):
                if word in classes and word not in public:
                    missing.setdefault(word, set()).add(where)
    assert {word: sorted(where) for word, where in missing.items()} == {}
