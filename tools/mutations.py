"""Random mutations of the code, and which of them no test notices.

    python tools/mutations.py                            # 200 of the package
    python tools/mutations.py --count 20 --seed 7 pytest_torchmem/store
    python tools/mutations.py --map lines.json           # keep the map of lines to tests
    python tools/mutations.py --map lines.json --after 40     # and go on with the same tree

A copy of the tree is changed, one place at a time: a comparison, a constant, ``and``, a ``not``, an
operator, a statement, a return. Then the tests run that execute the changed line, the fastest
first, until one fails. A mutation survives when none does: then a test is missing, or the change
makes no difference, which `tools/mutations.md` notes with the reason.

Which tests execute which line is found once, with coverage.py and the tests that are not slow. What
a fixture executes counts for every test of its file. Needs ``pip install coverage``, and a system
that forks: a process that has imported torch forks one for each mutation.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
ROOMS: Final = ("pytest_torchmem",)
# Those of a simulated GPU and of a browser take longer than all of these.
TESTS: Final = (
    *("tests/analysis", "tests/cli", "tests/measuring", "tests/plugin"),
    *("tests/record", "tests/report/text", "tests/store", "tests/values"),
    *("tests/test_building.py", "tests/test_contexts.py", "tests/test_outputs_agree.py"),
)
_SWAPPED: Final[dict[type[ast.AST], type[ast.AST]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}

# Absolute: tests change the folder that they run in.
_SECONDS_FILE: Final = Path("seconds.jsonl").absolute()
_DROPPED: Final = (ast.AugAssign, ast.Continue, ast.Break, ast.Raise)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change: the text between two places of a file becomes another one."""

    path: str
    line: int
    begin: int
    end: int
    old: str
    new: str
    in_function: bool

    def applied(self, source: bytes) -> bytes:
        return source[: self.begin] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.path}:{self.line}: `{old}` -> `{new}`"


@dataclass(frozen=True, slots=True)
class Tests:
    """Which tests execute a line, and how long each takes.

    Attributes:
        by_line: By ``path:line`` the ids of tests, or files of tests for what fixtures execute.
        seconds: By the id of a test.
    """

    by_line: dict[str, list[str]]
    seconds: dict[str, float]

    def of(self, mutation: Mutation, limit_s: float) -> list[str]:
        """The tests to run for a mutation, the fastest first, until they have taken so long."""
        if mutation.in_function:
            names = set(self.by_line.get(f"{mutation.path}:{mutation.line}", ()))
        else:  # runs when the module is imported: every test of the module may notice
            lines = (n for n in self.by_line if n.rpartition(":")[0] == mutation.path)
            names = {name for line in lines for name in self.by_line[line]}
        found = {test for test in self.seconds if {test, test.partition("::")[0]} & names}
        chosen, spent = [], 0.0
        for test in sorted(found, key=self.seconds.__getitem__):
            chosen.append(test)
            spent += self.seconds[test]
            if spent > limit_s:
                break
        return chosen


# --- mutations


def mutations_of(path: str, source: bytes) -> list[Mutation]:
    """Return every mutation of a file that we know how to make."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node, new, in_function in _changes(ast.parse(source), in_function=False):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        old = source[begin:end].decode()
        found.append(Mutation(path, node.lineno, begin, end, old, new, in_function))
    return found


def _changes(node: ast.AST, in_function: bool) -> Iterator[tuple[Any, str, bool]]:
    """Yield nodes, what becomes of each, and whether it is in a function."""
    if isinstance(node, (ast.stmt, ast.expr)):
        for new in _texts(node):
            yield node, new, in_function
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for name, value in ast.iter_fields(node):
        # Annotations, decorators, defaults of types and `zip(strict=...)` say nothing that runs.
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue
            if isinstance(child, ast.AnnAssign) and "TypeAlias" in ast.unparse(child.annotation):
                continue
            if isinstance(child, ast.AST):
                # Defaults of parameters run with what surrounds the function.
                yield from _changes(child, in_function or (is_function and name != "args"))


def _texts(node: ast.stmt | ast.expr) -> Iterator[str]:
    """Yield what may stand in place of a node."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            swapped = [*node.ops]
            swapped[place] = _SWAPPED[type(operator)]()  # type: ignore[call-overload]
            yield f"({ast.unparse(ast.Compare(node.left, swapped, node.comparators))})"
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(_SWAPPED[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED and not _has_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1)
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None"
    elif isinstance(node, _DROPPED) or _is_call(node):
        yield "pass"


def _is_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.YieldFrom))


def _has_text(node: ast.AST) -> bool:
    return any(
        isinstance(n, (ast.JoinedStr, ast.Constant)) and not _is_int(n) for n in ast.walk(node)
    )


def _is_int(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def draw(tree: Path, places: Sequence[str], count: int, seed: int) -> list[Mutation]:
    """Return so many mutations, each line at most once."""
    found = []
    for place in places:
        files = sorted((tree / place).rglob("*.py")) if (tree / place).is_dir() else [tree / place]
        for file in files:
            found += mutations_of(file.relative_to(tree).as_posix(), file.read_bytes())
    random.Random(seed).shuffle(found)
    by_line = {(m.path, m.line): m for m in reversed(found)}
    return [m for m in found if by_line[m.path, m.line] is m][:count]


# --- which tests execute which line


def map_lines(tree: Path, tests: Sequence[str]) -> Tests:
    """Run the tests that are not slow under coverage.py."""
    (tree / ".coveragerc").write_text(
        "[run]\nsource = pytest_torchmem\ndata_file = .coverage\n", encoding="utf-8"
    )
    command = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-p", Path(__file__).stem]
    paths = [str(tree), str(Path(__file__).parent)]
    environment = _environment(tree) | {"PYTHONPATH": os.pathsep.join(paths)}
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-m", "not slow"]
    subprocess.run([*command, *options, *tests], cwd=tree, env=environment, check=False)
    return _read_map(tree)


def _read_map(tree: Path) -> Tests:
    import coverage

    data = coverage.CoverageData(str(tree / ".coverage"))
    data.read()
    by_line: dict[str, list[str]] = defaultdict(list)
    for file in data.measured_files():
        path = Path(file).resolve().relative_to(tree.resolve()).as_posix()
        for line, contexts in data.contexts_by_lineno(file).items():
            by_line[f"{path}:{line}"] += filter(None, contexts)
    lines = (tree / "seconds.jsonl").read_text(encoding="utf-8").splitlines()
    return Tests(dict(by_line), dict(map(json.loads, lines)))


def pytest_runtest_protocol(item: Any) -> None:
    """As a plugin of the run under coverage: what follows belongs to the file of the test."""
    _switch(item.nodeid.partition("::")[0])


def pytest_runtest_call(item: Any) -> None:
    _switch(item.nodeid)


def pytest_runtest_teardown(item: Any) -> None:
    _switch(item.nodeid.partition("::")[0])


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" and report.passed:
        with _SECONDS_FILE.open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, round(report.duration, 3)]) + "\n")


def _switch(context: str) -> None:
    import coverage

    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(context)


# --- runs


def _environment(tree: Path) -> dict[str, str]:
    ours = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **ours}


def is_noticed(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    """Run tests in a process forked off this one; one that does not end in time has noticed."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(_run_tests(tree, tests))
        finally:  # a plugin that fails: what is to be undone is the parent's
            os._exit(1)
    until = time.monotonic() + 30 + 10 * seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status != 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _run_tests(tree: Path, tests: Sequence[str]) -> int:
    os.setsid()
    os.chdir(tree)
    os.environ.update(_environment(tree))
    sys.path.insert(0, str(tree))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    import pytest

    return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests])


def run(
    tree: Path, mutations: Sequence[Mutation], tests: Tests, limit_s: float
) -> dict[str, list[Mutation]]:
    """Return the mutations by what became of them."""
    import hypothesis  # noqa: F401
    import numpy as np  # noqa: F401
    import torch  # noqa: F401

    found: dict[str, list[Mutation]] = {"killed": [], "survived": [], "not run": []}
    for number, mutation in enumerate(mutations, start=1):
        chosen = tests.of(mutation, limit_s)
        fate = "not run"
        if chosen:
            file = tree / mutation.path
            source = file.read_bytes()
            file.write_bytes(mutation.applied(source))
            try:
                noticed = is_noticed(tree, chosen, sum(map(tests.seconds.__getitem__, chosen)))
            finally:
                file.write_bytes(source)
                # Bytecode of the mutation may look like the original's: one size, one second.
                shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
            fate = "killed" if noticed else "survived"
        found[fate].append(mutation)
        print(f"{number} {fate} ({len(chosen)} tests) {mutation}", flush=True)
    return found


def copy_of_tree(folder: Path) -> Path:
    """Copy what git knows: nobody's files are changed."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="*", default=list(ROOMS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--after", type=int, default=0, help="leave out the first so many")
    parser.add_argument("--seconds", type=float, default=40, help="of tests for each (default: 40)")
    parser.add_argument("--tests", action="append", help="files and folders (default: quick ones)")
    parser.add_argument("--map", type=Path, help="where to keep the map of lines to tests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of_tree(Path(folder))
        if options.map and options.map.exists():
            tests = Tests(**json.loads(options.map.read_text(encoding="utf-8")))
        else:
            tests = map_lines(tree, options.tests or TESTS)
        if options.map:
            kept = {"by_line": tests.by_line, "seconds": tests.seconds}
            options.map.write_text(json.dumps(kept), encoding="utf-8")
        mutations = draw(tree, options.places, options.count, options.seed)[options.after :]
        found = run(tree, mutations, tests, options.seconds)
    counts = ", ".join(f"{len(members)} {fate}" for fate, members in found.items())
    print(f"seed {options.seed}: {counts}")
    for fate in ("survived", "not run"):
        print(f"\n{fate}:", *found[fate], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
