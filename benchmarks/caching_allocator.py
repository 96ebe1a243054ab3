"""How long the simulated caching allocator takes for 10,000 requests; the goal is below 50 ms.

python benchmarks/caching_allocator.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time

from pytest_torchmem.analysis.caching_allocator import (
    AllocatorSettings,
    RequestLog,
    Requests,
    simulate,
)

EVENTS = 10_000
GOAL_MS = 50.0
MiB = 1024**2


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    cases = [
        ("training steps", training_steps(), ""),
        ("random, 100 live", random_sizes(100), ""),
        ("random, 2,000 live", random_sizes(2000), ""),
        ("two streams", two_streams(), ""),
        ("random, 100 live", random_sizes(100), "roundup_power2_divisions:4"),
        ("random, 100 live", random_sizes(100), "max_split_size_mb:32"),
        ("random, 100 live", random_sizes(100), "expandable_segments:True"),
    ]
    print(f"{EVENTS:,} requests, median of {repeats} runs, Python {platform.python_version()}\n")
    print(f"| requests | settings | ms by the clock | ms of processor | below {GOAL_MS:.0f} ms |")
    print("|---|---|--:|--:|---|")
    for name, requests, conf in cases:
        wall, processor = median_ms(requests, conf, repeats)
        verdict = "yes" if wall < GOAL_MS else "no"
        print(f"| {name} | {conf or 'defaults'} | {wall:.1f} | {processor:.1f} | {verdict} |")


if __name__ == "__main__":
    main()
