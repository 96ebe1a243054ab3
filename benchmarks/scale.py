"""At scale: 10,000 entries of baselines, and 10,000 requests to the simulated caching allocator.

    python -m benchmarks scale [--output FILE.md]

The entries are as large as those of a small transformer: 12 contributors to the peak and 5 to what
is retained. They are in files of 50, as a project with 200 test modules would have them. Each step
is timed alone, by the processor's time; the best of five rounds counts, since other work on the
machine only adds. The goal for the allocator is below 50 ms.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Final

from pytest_torchmem.allocator import (
    AllocatorSettings,
    RequestLog,
    Requests,
    simulate,
)
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


def baselines(count: int) -> str:
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
            "Made by `python -m benchmarks scale`.",
            "",
            "| step | processor time |",
            "|---|--:|",
            *rows,
            f"| read, compare and write together (budget {BUDGET_S:.0f} s) | {total:.2f} s |",
            f"| write back the tenth that grew | {write_back:.2f} s |",
            "",
        ]
    )


EVENTS = 10_000
GOAL_MS = 50.0


def random_sizes(live: int) -> Requests:
    """Allocations of 8 bytes to 32 MiB, freed in no order, with about ``live`` alive at once."""
    chance = random.Random(live)
    is_alloc, size, key = [], [], []
    alive: list[int] = []
    for number in range(EVENTS):
        if alive and chance.random() < (0.45 if len(alive) < live else 0.55):
            position = chance.randrange(len(alive))
            alive[position], alive[-1] = alive[-1], alive[position]
            is_alloc.append(False)
            key.append(alive.pop())
            size.append(0)
        else:
            is_alloc.append(True)
            key.append(number)
            size.append(int(2 ** chance.uniform(3, 25)))
            alive.append(number)
    return Requests.from_columns(is_alloc, size, key)


def training_steps() -> Requests:
    """Steps that keep an activation per operator, free them in reverse, and update in between."""
    chance = random.Random(0)
    activations = [chance.choice([3 * MiB, 12 * MiB, MiB // 2, 4096]) for _ in range(300)]
    log = RequestLog()
    number = 0
    while len(log.rows) < EVENTS:
        first = number
        for size in activations:
            log.alloc(number, size)
            log.alloc(-1 - number, size // 3 + 1)
            log.free(-1 - number)
            number += 1
        for back in reversed(range(first, number)):
            log.alloc(-1 - back, activations[back - first])
            log.free(back)
            log.free(-1 - back)
    log.rows = log.rows[:EVENTS]
    return log.requests()


def two_streams() -> Requests:
    """Two streams that use a tenth of each other's memory."""
    chance = random.Random(2)
    log, alive = RequestLog(), []
    for number in range(EVENTS):
        kind = chance.random()
        if kind < 0.1 and alive:
            log.record_stream(chance.choice(alive), chance.randrange(2))
        elif kind < 0.55 and alive:
            log.free(alive.pop(chance.randrange(len(alive))))
        else:
            log.alloc(number, int(2 ** chance.uniform(3, 25)), chance.randrange(2))
            alive.append(number)
    return log.requests()


def median_ms(requests: Requests, conf: str, repeats: int) -> tuple[float, float]:
    """The median run in milliseconds, by the clock and in processor time, after an uncounted run.

    The two differ by what else the machine does.
    """
    settings = AllocatorSettings.parse(conf)
    simulate(requests, settings)
    wall, processor = [], []
    for _ in range(repeats):
        begin, processor_begin = time.perf_counter(), time.process_time()
        simulate(requests, settings)
        wall.append((time.perf_counter() - begin) * 1e3)
        processor.append((time.process_time() - processor_begin) * 1e3)
    return statistics.median(wall), statistics.median(processor)


def requests(repeats: int) -> str:
    """Return a table of the allocator's times."""
    cases = [
        ("training steps", training_steps(), ""),
        ("random, 100 live", random_sizes(100), ""),
        ("random, 2,000 live", random_sizes(2000), ""),
        ("two streams", two_streams(), ""),
        ("random, 100 live", random_sizes(100), "roundup_power2_divisions:4"),
        ("random, 100 live", random_sizes(100), "max_split_size_mb:32"),
        ("random, 100 live", random_sizes(100), "expandable_segments:True"),
    ]
    lines = [
        f"## {EVENTS:,} requests to the simulated caching allocator",
        "",
        f"{date.today()}, median of {repeats} runs.",
        "",
        f"| requests | settings | ms by the clock | ms of processor | below {GOAL_MS:.0f} ms |",
        "|---|---|--:|--:|---|",
    ]
    for name, asked, conf in cases:
        wall, processor = median_ms(asked, conf, repeats)
        verdict = "yes" if wall < GOAL_MS else "no"
        lines.append(
            f"| {name} | {conf or 'defaults'} | {wall:.1f} | {processor:.1f} | {verdict} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    text = f"{baselines(options.entries)}\n{requests(options.repeat)}"
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
