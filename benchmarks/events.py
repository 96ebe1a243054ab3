"""How long each function over events takes, beside torch's own on the same finished profile.

    python -m benchmarks events [--repeat 5] [--output FILE.md]

Each number is processor time, the median over ``--repeat`` rounds in one process; within a round
torch and we take turns. *first* begins at the finished profile, which torch parses and we read;
*again* is a further question to the same events. What both say is compared first.
"""

from __future__ import annotations

import argparse
import gc
import io
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.profiler import ProfilerActivity, profile

from benchmarks.analysis_speed import GPT, events_in
from pytest_torchmem import analyze
from pytest_torchmem.analysis.events.averages import find_total, stacks_by_time
from pytest_torchmem.analysis.events.calls import list_calls
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.measuring.profile import write_stacks

ADDRESS = re.compile(r"[ _]at[ _]0x[0-9a-f]+")
FOLDER = Path(tempfile.mkdtemp())
PATH = str(FOLDER / "theirs.json")


def recorded(steps: int, stacks: bool) -> Any:
    """A finished profile of ``steps`` training steps of a small GPT."""
    from torch._C._profiler import _ExperimentalConfig

    torch.manual_seed(0)
    model = GPT(12)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    tokens = torch.randint(0, 100, (2, 16))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        with_stack=stacks,
        # Without it torch's export of stacks is empty.
        experimental_config=_ExperimentalConfig(verbose=stacks),
    ) as finished:
        for _ in range(steps):
            step()
    return finished


def parsed(finished: Any) -> Any:
    """torch's events of a profile, parsed anew."""
    finished.profiler._function_events = None
    finished.profiler._needs_processing = True
    finished.profiler._ensure_function_events()
    return finished.profiler._function_events


def evaluation(finished: Any) -> Any:
    from torch.profiler._utils import BasicEvaluation  # type: ignore[attr-defined,unused-ignore]

    return BasicEvaluation(finished.profiler)


def dfs(finished: Any) -> int:
    from torch.profiler._utils import traverse_dfs

    roots = finished.profiler.kineto_results.experimental_event_tree()
    return sum(event.duration_time_ns >= 0 for event in traverse_dfs(roots))


def bfs(finished: Any) -> int:
    from torch.profiler._utils import traverse_bfs

    roots = finished.profiler.kineto_results.experimental_event_tree()
    return sum(event.duration_time_ns >= 0 for event in traverse_bfs(roots))


def optimizable(finished: Any) -> str:
    with redirect_stdout(io.StringIO()) as text:
        evaluation(finished).get_optimizable_events(3)
    return text.getvalue()


def torchs_stacks(finished: Any) -> Counter[str]:
    parsed(finished).export_stacks(str(FOLDER / "theirs"), "self_cpu_time_total")
    lines = (FOLDER / "theirs").read_text().splitlines()
    return Counter(ADDRESS.sub("", line.rpartition(" ")[0]) for line in lines)


def our_stacks(finished: Any, weight: Any) -> set[str]:
    analyze(finished, "cpu").export(FOLDER / "ours", "stacks", weight=weight)
    lines = (FOLDER / "ours").read_text().splitlines()
    return {line.rpartition(" ")[0].rpartition(";")[0] for line in lines}


def torchs_averages(events: Any) -> dict[str, tuple[int, int, int]]:
    found: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    memory: Counter[str] = Counter()
    for row in events.key_averages():
        name = ADDRESS.sub("", row.key)
        found[name] += round(row.self_cpu_time_total * 1000)
        calls[name] += row.count
        memory[name] += row.self_cpu_memory_usage
    return {name: (calls[name], found[name], memory[name]) for name in found}


def our_averages(finished: Any) -> dict[str, tuple[int, int, int]]:
    rows = Events.of(finished).averages()
    return {row.name: (row.calls, row.self_time_ns, row.self_cpu_bytes) for row in rows}


@dataclass(frozen=True)
class Pair:
    """torch's function and ours, each after what it takes: events that torch parsed, and ours.

    Where torch's takes the profile itself, ``parses`` is False.
    """

    name: str
    torchs: Callable[[Any], object]
    ours: Callable[[Events], object]
    parses: bool = True


PAIRS = (
    Pair("BasicEvaluation", evaluation, lambda e: Events(e.tree).metrics, False),
    Pair("get_optimizable_events", optimizable, lambda e: Events(e.tree).optimizable(3), False),
    Pair("traverse_dfs", dfs, lambda e: sum(1 for _ in Events(e.tree).depth_first()), False),
    Pair("traverse_bfs", bfs, lambda e: sum(1 for _ in Events(e.tree).breadth_first()), False),
    Pair("key_averages", lambda p: p.key_averages(), lambda e: e.averages()),
    Pair(
        "key_averages by shape",
        lambda p: p.key_averages(group_by_input_shapes=True),
        lambda e: e.averages(by_inputs=True),
    ),
    Pair(
        "key_averages by stack",
        lambda p: p.key_averages(group_by_stack_n=5),
        lambda e: e.averages(by_stack=5),
    ),
    Pair(
        "table",
        lambda p: p.key_averages().table("self_cpu_memory_usage", row_limit=20),
        lambda e: e.table("self_cpu_bytes", 20),
    ),
    Pair("total_average", lambda p: p.total_average(), lambda e: find_total(e.averages())),
    Pair("events()", list, lambda e: list_calls(e.tree)),
    Pair(
        "top-level memory events",
        lambda p: [event for event in p if event.name == "[memory]"],
        lambda e: [event for event in Events(e.tree).memory if event.top_level],
    ),
    Pair(
        "labels and steps",
        lambda p: [event for event in p if event.is_user_annotation],
        lambda e: Events(e.tree).labels,
    ),
    Pair(
        "export_stacks, by time",
        lambda p: p.export_stacks(str(FOLDER / "theirs"), "self_cpu_time_total"),
        lambda e: write_stacks(FOLDER / "ours", stacks_by_time(e.calls)),
    ),
)


def check(finished: Any, stacks: bool) -> None:
    """Both say the same."""
    events = Events.of(finished)
    assert torchs_averages(parsed(finished)) == our_averages(finished)
    try:
        theirs = evaluation(finished).metrics
    except ImportError:
        return
    ours = sorted((e.start_ns, e.self_time_ns, e.duration_ns) for e in events.depth_first())
    assert ours == sorted(
        (key.event.start_time_ns, m.self_time_ns, m.duration_time_ns) for key, m in theirs.items()
    )
    if stacks:
        assert set(torchs_stacks(finished)) <= our_stacks(finished, "time")


def timed(run: Callable[[Any], object], taken: Any) -> tuple[float, object]:
    gc.collect()
    begin = time.process_time()
    result = run(taken)
    return time.process_time() - begin, result


def measured(steps: int, stacks: bool, repeat: int) -> list[list[object]]:
    finished = recorded(steps, stacks)
    check(finished, stacks)
    rounds: dict[str, list[tuple[float, float, float, float]]] = {}
    for _ in range(repeat):
        parsing, events = timed(parsed, finished)
        reading, read = timed(Events.of, finished)
        for pair in PAIRS:
            theirs, _ = timed(pair.torchs, events if pair.parses else finished)
            ours, _ = timed(pair.ours, Events(read.tree))
            row = (theirs + parsing * pair.parses, ours + reading, theirs, ours)
            rounds.setdefault(pair.name, []).append(row)
        written, _ = timed(lambda p: p.profiler.kineto_results.save(PATH), recorded(steps, stacks))
        ours, _ = timed(lambda p: analyze(p, "cpu").export(FOLDER / "ours.json", "trace"), finished)
        rounds.setdefault("export_chrome_trace", []).append((written, ours, written, ours))
    rows = []
    for name, values in rounds.items():
        first = statistics.median(row[0] / row[1] for row in values)
        again = statistics.median(row[2] / max(row[3], 1e-6) for row in values)
        cells = [f"{statistics.median(column):.4f}" for column in zip(*values, strict=True)]
        rows.append([name, *cells[:2], f"{first:.1f}x", *cells[2:], f"{again:.1f}x"])
    return [[f"{events_in(finished):,}", "yes" if stacks else "no", *row] for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [
        row
        for stacks in (False, True)
        for row in measured(arguments.steps, stacks, arguments.repeat)
    ]
    headers = [
        "events", "stacks", "torch's function", "first: torch s", "ours s", "faster",
        "again: torch s", "ours s", "faster",
    ]  # fmt: skip
    text = (
        "# Speed of the functions over events, beside torch's own\n\n"
        f"torch {torch.__version__}, CPU, {date.today()}; processor time, medians of "
        f"{arguments.repeat} rounds. *first*: from the finished profile on; *again*: a further "
        "question.\n"
        f"Command: `python -m benchmarks events --repeat {arguments.repeat} "
        f"--steps {arguments.steps}`\n\n"
        f"{tabulate(rows, headers, tablefmt='github')}\n"
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
