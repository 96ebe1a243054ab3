"""Baselines at scale: reading, comparing and writing 10,000 entries.

    python benchmarks/baselines.py [--entries N] [--write FILE.md]

The entries are as large as those of a small transformer: 12 contributors to the peak and 5 to what
is retained. They are in files of 50, as a project with 200 test modules would have them. Each step
is timed alone, by the processor's time; the best of five rounds counts, since other work on the
machine only adds.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.judge.verdict import judge_baseline
from pytest_torchmem.store.baselines import BaselineStore, FileChanges, write_file
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change, Reference, complete
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import MiB

ENTRIES: Final = 10_000
PER_FILE: Final = 50
ROUNDS: Final = 5
BUDGET_S: Final = 2.0
CPU: Final = complete({"device": "cpu", "torch": "2.13"})
ALLOWANCE: Final = Allowance(0.02, MiB)


def contributors(count: int, scale: int) -> tuple[Contributor, ...]:
    kinds = (Category.ACTIVATION, Category.PARAMETER, Category.GRADIENT, Category.TEMPORARY)
    return tuple(
        Contributor(
            kinds[n % len(kinds)],
            (count - n) * scale,
            12,
            f"aten::op_{n}",
            f"GPT.blocks.*.mlp.{n}",
            Source("src/project/model.py", 40 + n, "forward"),
            Phase.FORWARD,
        )
        for n in range(count)
    )


def measured(number: int, factor: int = 100) -> Result:
    """Return what test ``number`` needs; ``factor`` is in percent of what was stored."""
    live = contributors(12, (number % 97 + 1) * 4096 * factor)
    kept = contributors(5, (number % 97 + 1) * 512 * factor)
    peaks, retained = by_category(live), by_category(kept)
    return Result(
        "",
        "cpu",
        False,
        Peak(peaks.total, 0, peaks, peaks, live, live),
        Retained(retained.total, retained, kept),
    )


def by_category(live: tuple[Contributor, ...]) -> CategoryBytes:
    amounts = dict.fromkeys(Category, 0)
    for contributor in live:
        amounts[contributor.category] += contributor.size_bytes
    return CategoryBytes.of(amounts)


def modules(root: Path, count: int) -> dict[Path, dict[str, int]]:
    """Return the tests of each module: a number for each key."""
    files: dict[Path, dict[str, int]] = {}
    for number in range(count):
        file = root / f"test_module_{number // PER_FILE}.py"
        files.setdefault(file, {})[f"TestModel::test_step[{number}-bf16]"] = number
    return files


def write(root: Path, results: dict[Path, dict[str, Result]]) -> None:
    store = BaselineStore(root, None)
    for module, entries in results.items():
        changes = {key: BaselineEntry.of(result) for key, result in entries.items()}
        write_file(store.path(module, CPU), CPU, FileChanges(changes))


def read(root: Path, results: dict[Path, dict[str, Result]]) -> dict[Path, dict[str, Reference]]:
    store = BaselineStore(root, None)
    found: dict[Path, dict[str, Reference]] = {}
    for module, entries in results.items():
        for key in entries:
            reference = store.reference(module, CPU, key)
            assert reference is not None
            found.setdefault(module, {})[key] = reference
    return found


def compare(
    results: dict[Path, dict[str, Result]], stored: dict[Path, dict[str, Reference]]
) -> int:
    """Return how many have grown."""
    return sum(
        judge_baseline(result, stored[module][key], ALLOWANCE).change is Change.GROWN
        for module, entries in results.items()
        for key, result in entries.items()
    )


def best(action: Callable[[], object]) -> float:
    """Return the seconds of processor time that an action takes."""
    rounds = []
    for _ in range(ROUNDS):
        start_s = time.process_time()
        action()
        rounds.append(time.process_time() - start_s)
    return min(rounds)


def report(count: int) -> str:
    """Return a table. Raises AssertionError where a step does not do what it should."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        files = modules(root, count)
        first = {f: {k: measured(n) for k, n in keys.items()} for f, keys in files.items()}
        # In the next run, every tenth test needs half as much again.
        later = {
            f: {k: measured(n, 150 if n % 10 == 0 else 100) for k, n in keys.items()}
            for f, keys in files.items()
        }
        steps = {"write, all new": best(lambda: write(root, first))}
        steps["read"] = best(lambda: read(root, first))
        stored = read(root, first)
        assert all(len(stored[f]) == len(keys) for f, keys in files.items())
        steps["compare, a tenth grown"] = best(lambda: compare(later, stored))
        assert compare(later, stored) == -(-count // 10)
        grown = {
            f: {k: r for k, r in entries.items() if files[f][k] % 10 == 0}
            for f, entries in later.items()
        }
        write_back = best(lambda: write(root, grown))
        size_bytes = sum(path.stat().st_size for path in root.rglob("*.json"))
    total = steps["read"] + steps["compare, a tenth grown"] + steps["write, all new"]
    rows = [f"| {name} | {seconds:.2f} s |" for name, seconds in steps.items()]
    return "\n".join(
        [
            f"# {count:,} baseline entries in {len(files)} files, {size_bytes / MiB:.0f} MiB",
            "",
            f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
            f"{date.today()}, best of {ROUNDS} rounds; no torch in it. "
            "Made by `python benchmarks/baselines.py`.",
            "",
            "| step | processor time |",
            "|---|--:|",
            *rows,
            f"| read, compare and write together (budget {BUDGET_S:.0f} s) | {total:.2f} s |",
            f"| write back the tenth that grew | {write_back:.2f} s |",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text = report(arguments.entries)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
