"""How long each of torch's functions takes, beside its counterpart here, on the same input.

    python -m benchmarks torch_sources [--repeat 5] [--output FILE.md]

Each number is processor time, the median over ``--repeat`` rounds in one process; within a round
torch and we take turns. Where a function takes what another one made (``SizeMap`` of an
``OpTree``), the latter is made before. docs/coming-from-torch.md has the names.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tabulate import tabulate
from torch._inductor.fx_passes import memory_estimator as torchs_estimator
from torch.profiler import _memory_profiler as torchs_profiler

from benchmarks.analysis_speed import events_in, recorded
from pytest_torchmem import analyze
from pytest_torchmem.torch_names import memory_estimator, memory_profiler
from tests.fx_graphs import PARTITIONS, Repaired, trace
from tests.torch_names.pairs import pair_of

CHAIN = 300


@dataclass(frozen=True)
class Comparison:
    """A function of torch and its counterpart.

    Attributes:
        name: What torch calls it.
        torchs, ours: What is timed.
        prepare: Run before each, not timed; what it returns is the argument of what is timed.
    """

    name: str
    torchs: Callable[[Any], object]
    ours: Callable[[Any], object]
    prepare_torchs: Callable[[], object] = lambda: None
    prepare_ours: Callable[[], object] = lambda: None


def of_profiles(finished: Any, folder: Path) -> Iterator[Comparison]:
    """``torch.profiler._memory_profiler``."""
    theirs, ours = torchs_profiler, memory_profiler
    result = finished.profiler.kineto_results
    our_profile = ours.MemoryProfile(finished)
    their_tree, their_profile = theirs.OpTree(result), theirs.MemoryProfile(result)

    yield Comparison(
        "SizeMap", theirs.SizeMap, ours.SizeMap, lambda: their_tree, lambda: ours.OpTree(finished)
    )
    yield Comparison(
        "DataFlowGraph with its nodes",
        lambda tree: theirs.DataFlowGraph(tree).flow_nodes,
        lambda tree: ours.DataFlowGraph(tree).flow_nodes,
        lambda: their_tree,
        lambda: ours.OpTree(finished),
    )
    yield Comparison(
        "DataFlowGraph.validate",
        lambda _: their_profile._data_flow_graph.validate(),
        lambda _: our_profile.data_flow_graph.validate(),
    )
    yield Comparison(
        "MemoryProfile with its categories",
        lambda _: theirs.MemoryProfile(result)._category_snapshot(),
        lambda _: ours.MemoryProfile(finished).category_snapshot(),
    )
    yield Comparison(
        "MemoryProfile.timeline",
        lambda profile: profile.timeline,
        lambda profile: profile.timeline,
        lambda: their_profile,
        lambda: ours.MemoryProfile(finished),
    )
    yield Comparison(
        "MemoryProfileTimeline.export_memory_timeline",
        lambda profile: theirs.MemoryProfileTimeline(profile).export_memory_timeline(
            str(folder / "t.json"), "cpu"
        ),
        lambda profile: ours.MemoryProfileTimeline(profile).export_memory_timeline(
            folder / "o.json", "cpu"
        ),
        lambda: their_profile,
        lambda: ours.MemoryProfile(finished),
    )
    yield Comparison(
        "profile.export_memory_timeline, whole",
        lambda _: finished.export_memory_timeline(str(folder / "t.json"), "cpu"),
        lambda _: analyze(finished, "cpu").export(folder / "o.json", labels="torch"),
    )


def of_graphs() -> Iterator[Comparison]:
    """``torch._inductor.fx_passes.memory_estimator``."""
    theirs, ours = torchs_estimator, memory_estimator

    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            x = torch.relu(x @ w) + x
        return x

    graph = trace(chain, (16, 16), (16, 16)).graph
    nodes = list(graph.nodes)
    forward, backward = pair_of("recurrent", PARTITIONS[0])

    def releasable(node: Any) -> bool:
        return node.op == "call_function"

    def scheduled(tracker: Any) -> int:
        for node in filter(releasable, nodes):
            tracker.schedule_node(node)
        return int(tracker.get_current_memory_bytes())

    def asked(tracker: Any) -> None:
        for node in nodes:
            tracker.get_fresh_allocations(node)
            tracker.get_storage_uses(node)
            tracker.get_storages_last_used(node)

    yield Comparison(
        f"build_memory_profile, {len(nodes)} nodes",
        lambda _: theirs.build_memory_profile(graph, releasable),
        lambda _: ours.build_memory_profile(graph, releasable),
    )
    yield Comparison(
        "GraphAliasTracker, every node",
        lambda _: asked(theirs.GraphAliasTracker(nodes)),
        lambda _: asked(ours.GraphAliasTracker(nodes)),
    )
    yield Comparison(
        "MemoryTracker, every node",
        lambda _: scheduled(theirs.MemoryTracker(graph)),
        lambda _: scheduled(ours.MemoryTracker(graph)),
    )
    yield Comparison(
        "MemoryTracker.schedule_node, every node",
        scheduled,
        scheduled,
        lambda: theirs.MemoryTracker(graph),
        lambda: ours.MemoryTracker(graph),
    )
    yield Comparison(
        "get_fwd_bwd_interactions",
        lambda _: theirs.get_fwd_bwd_interactions(Repaired(forward.graph), backward.graph),
        lambda _: ours.get_fwd_bwd_interactions(forward.graph, backward.graph),
    )
    yield Comparison(
        "get_peak_memory (torch: its parts, as the whole raises)",
        lambda _: [
            theirs.build_memory_profile(forward.graph, releasable),
            theirs.get_fwd_bwd_interactions(Repaired(forward.graph), backward.graph),
            theirs.build_memory_profile(backward.graph, releasable),
        ],
        lambda _: ours.get_peak_memory(forward.graph, backward.graph),
    )


def timed(comparison: Comparison, repeat: int) -> tuple[float, float]:
    """Median seconds of torch's and of ours."""
    seconds: tuple[list[float], list[float]] = ([], [])
    sides = (
        (comparison.torchs, comparison.prepare_torchs),
        (comparison.ours, comparison.prepare_ours),
    )
    for _ in range(repeat):
        for (function, prepare), found in zip(sides, seconds, strict=True):
            argument = prepare()
            gc.collect()
            begin = time.process_time()
            function(argument)
            found.append(time.process_time() - begin)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def table_of(comparisons: Iterator[Comparison], repeat: int) -> str:
    rows = []
    for comparison in comparisons:
        theirs, ours = timed(comparison, repeat)
        rows.append(
            (comparison.name, f"{theirs * 1e3:.2f}", f"{ours * 1e3:.2f}", f"{theirs / ours:.1f}x")
        )
    return tabulate(rows, ("torch's name", "torch ms", "ours ms", "faster"), tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    finished = recorded(1, layers=4)
    with TemporaryDirectory() as folder:
        profiles = table_of(of_profiles(finished, Path(folder)), arguments.repeat)
    graphs = table_of(of_graphs(), arguments.repeat)
    text = (
        "# Speed of each function, beside torch's own\n\n"
        f"torch {torch.__version__}, CPU, {date.today()}; processor time, medians of "
        f"{arguments.repeat} rounds.\n"
        f"Command: `python -m benchmarks torch_sources --repeat {arguments.repeat}`\n\n"
        f"## torch.profiler._memory_profiler\n\n{events_in(finished):,} events.\n\n{profiles}\n\n"
        f"## torch._inductor.fx_passes.memory_estimator\n\n{graphs}\n"
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)
