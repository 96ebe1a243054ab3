"""Counts the package: sizes, docstrings, imports, what one test runs.

python tools/house.py             # a Markdown table, the goals beside the counts
python tools/house.py --files     # and the files of ours that one failing test runs
python tools/house.py --check     # fail where a room is larger than its budget
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Final

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "pytest_torchmem"
LONG_LINES = 40

#: Lines of Python in a room, or of another language where one is named: about what there is. A room
#: that grows loses as much elsewhere, or a page of docs/decisions says why the number is raised.
LINES: Final = {
    "analysis": 11_025,
    "building": 150,
    "cli": 1_640,
    "contexts": 200,
    "measuring": 1_875,
    "plugin": 4_450,
    "record": 8_600,
    "record (C++)": 950,
    "report": 2_550,
    "report (JavaScript)": 1_600,
    "simulate": 1_650,
    "simulate (C++)": 10_125,
    "store": 2_550,
    "the top level": 200,
    "torch_names": 900,
    "values": 3_375,
}
#: What is put into torch and Python while a body runs, and what of torch has no public name.
NAMES: Final = {"replaced names": 18, "private names of torch": 70}
SUFFIXES: Final = {".py": "", ".cpp": " (C++)", ".h": " (C++)", ".js": " (JavaScript)"}

# It breaks its limits and its baseline, on the CPU.
TEST = """
import os
import pytest
import torch

SIZE = int(os.environ["SIZE"])
LIMITS = {"total": "64KiB", "retained": 0} if SIZE > 1 else {"total": "1GiB"}
CACHE = []

@pytest.mark.memory_baseline
@pytest.mark.memory_budget(**LIMITS)
def test_step():
    net = torch.nn.Linear(64, 64)
    net(torch.ones(SIZE << 14, 64)).sum().backward()
    CACHE.append(torch.ones(SIZE << 20))
"""

Trees = Mapping[Path, ast.Module]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def line_count(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def documented(trees: Trees, public_only: bool) -> float:
    """Return the share of functions, classes and modules that have a docstring."""
    found = []
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, Function | ast.ClassDef | ast.Module):
                continue
            if public_only and getattr(node, "name", "").startswith("_"):
                continue
            found.append(ast.get_docstring(node) is not None)
    return sum(found) / len(found)


def uses_of_any(trees: Trees) -> int:
    named = (n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, ast.Name))
    return sum(node.id == "Any" for node in named)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports, also what only a type checker reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules_in_circles(trees: Trees) -> set[str]:
    """Return the modules of a package that import themselves, by way of others.

    The package's own module is left out: it names what is public, and nobody goes through it.
    """
    own = PACKAGE / "__init__.py"
    return in_circles({module_name(path): tree for path, tree in trees.items() if path != own})


def in_circles(names: Mapping[str, ast.Module]) -> set[str]:
    """Return the modules that import themselves, by way of others, of modules by their names."""
    edges = {name: {i for i in imported(tree) if i in names} for name, tree in names.items()}

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(edges[name] - {name})
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += edges[one]
        return seen

    return {name for name in names if name in reached(name)}


def class_names_twice(trees: Trees) -> set[str]:
    """Return the names of several classes, those aside that are torch's."""
    ours = (tree for file, tree in trees.items() if file.parent.name != "torch_names")
    nodes = (node for tree in ours for node in ast.walk(tree))
    counts = Counter(n.name.lstrip("_") for n in nodes if isinstance(n, ast.ClassDef))
    return {name for name, count in counts.items() if count > 1}


def largest_folder(trees: Trees) -> tuple[int, str]:
    """Return how many files the largest folder has beside its docstring, and its name."""
    counts = Counter(path.parent for path in trees if path.name != "__init__.py")
    folder, count = counts.most_common(1)[0]
    return count, folder.relative_to(ROOT).as_posix()


def run_by_a_failing_test() -> set[tuple[str, str, int]]:
    """Return the functions of ours that one failing marked test runs: file, name, line."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_it.py").write_text(TEST, encoding="utf-8")
        (Path(folder) / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        traced_pytest(folder, "1", "--torchmem-update-baseline")
        printed = traced_pytest(folder, "4")
    found = (line.split("\t")[1:] for line in printed.splitlines() if line.startswith("ran\t"))
    return {(file, name, int(line)) for file, name, line in found}


def traced_pytest(folder: str, size: str, *arguments: str) -> str:
    command = (sys.executable, __file__, "--traced", folder, *arguments)
    environment = {**os.environ, "SIZE": size, "PYTHONPATH": str(ROOT)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    wanted = "1 passed" if arguments else "1 failed"
    assert wanted in ran.stdout, ran.stdout + ran.stderr
    return ran.stdout


def run_traced(arguments: list[str]) -> None:
    """Run pytest, and print each function of ours that it called."""
    import pytest

    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        caller = frame.f_back
        # The bodies of modules and classes run at import, whoever needs them, with what they call.
        if caller is None or caller.f_code.co_flags & inspect.CO_OPTIMIZED:
            seen.add(frame.f_code)

    threading.settrace(note)
    sys.settrace(note)
    options = ("-p", "pytest_torchmem.plugin.hooks", "-p", "no:cacheprovider", "-q")
    pytest.main([*options, *arguments])
    sys.settrace(None)
    for code in seen:
        if code.co_filename.startswith(str(PACKAGE)) and code.co_flags & inspect.CO_OPTIMIZED:
            print("ran", code.co_filename, code.co_name, code.co_firstlineno, sep="\t")


def lines_by_room() -> Counter[str]:
    """Count the lines of each room, by language."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*"):
        if path.suffix not in SUFFIXES:
            continue
        inner = path.relative_to(PACKAGE).parts
        is_room = len(inner) > 1 or path.stem in LINES
        room = Path(inner[0]).stem if is_room else "the top level"
        found[room + SUFFIXES[path.suffix]] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def names_of_torch() -> dict[str, int]:
    """Count what `NAMES` limits."""
    from pytest_torchmem.record import patches, torch_api

    subjects = (m.name for m in pkgutil.iter_modules(torch_api.__path__))
    modules = (importlib.import_module(f"{torch_api.__name__}.{name}") for name in subjects)
    private = {name for module in modules for name in getattr(module, "CHECKED", ())}
    return {"replaced names": len(patches.PATCHES), "private names of torch": len(private)}


def over_budget(found: Mapping[str, int], budget: Mapping[str, int], unit: str) -> list[str]:
    """Return a sentence for each count that is above its budget, or has none."""
    return [
        f"{name}: {count:,}{unit}, and the budget is {budget.get(name, 0):,}. Delete as much, or "
        "raise the number in tools/house.py with a page in docs/decisions that says why"
        for name, count in sorted(found.items())
        if count > budget.get(name, 0)
    ]


def counts(trees: Trees, ran: set[tuple[str, str, int]]) -> Iterator[tuple[str, str, str]]:
    """Yield what is counted, how much it is, and the goal; ``""`` where there is none."""
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in trees]
    lengths = [line_count(node) for tree in trees.values() for node in functions(tree)]
    kilo_lines = sum(lines) / 1000
    folder_count, folder = largest_folder(trees)
    torchs = {"torch_api", "torch_names"}
    outside = {p: t for p, t in trees.items() if torchs.isdisjoint(p.parts)}
    yield "files", f"{len(trees)}", ""
    yield "lines", f"{sum(lines):,}", "31,000"
    yield "lines of a module, median and largest", f"{median(lines):.0f}, {max(lines)}", "about 400"
    yield "lines of a function, median and largest", f"{median(lengths):.0f}, {max(lengths)}", ""
    too_long = sum(length > LONG_LINES for length in lengths)
    yield f"functions of more than {LONG_LINES} lines", f"{too_long}", "few"
    yield "with a docstring", f"{documented(trees, False):.0%}", ""
    yield "with a docstring, of the public ones", f"{documented(trees, True):.0%}", ""
    yield "`Any` in 1,000 lines", f"{uses_of_any(trees) / kilo_lines:.1f}", ""
    yield (
        "`Any` outside `record/torch_api` and `torch_names`",
        f"{uses_of_any(outside)}",
        "under 100",
    )
    yield "modules in circles of imports", f"{len(modules_in_circles(trees))}", "0"
    yield "class names used twice", f"{len(class_names_twice(trees))}", "0"
    yield "files in the largest folder", f"{folder_count} (`{folder}`)", "12"
    yield "files that one failing marked test runs", f"{len({f for f, *_ in ran})}", "60"
    # Before Python 3.12 a comprehension is a function of its own.
    names = [name for _, name, _ in ran if not name.startswith("<")]
    yield "functions that it runs; of these with a name", f"{len(ran)}; {len(names)}", "900"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list what the failing test runs")
    parser.add_argument("--traced", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="fail where a budget is exceeded")
    options = parser.parse_args()
    if options.traced is not None:
        run_traced(options.traced)
        return
    if options.check:
        sentences = over_budget(lines_by_room(), LINES, " lines")
        sys.exit("\n".join(sentences + over_budget(names_of_torch(), NAMES, "")) or None)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    ran = run_by_a_failing_test()
    print("| count | today | goal |\n|---|--:|--:|")
    for name, today, goal in counts(trees, ran):
        print(f"| {name} | {today} | {goal} |")
    if options.files:
        per_file = Counter(file for file, *_ in ran)
        for file, count in sorted(per_file.items()):
            print(f"{count:4} {Path(file).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
