"""What torch's own evaluation says of made-up profiles, recorded with a release that has it.

    python tests/analysis/events/recorded_metrics.py        # needs torch 2.13 or earlier

A profile is a tree of events, and the launches and kernels of a GPU that runs them one by one.
Torch's ``BasicEvaluation`` left in 2.14, so that its answers are kept in a file.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).parents[2] / "data" / "event_metrics.json"
NEVER = 2**63 - 1


@dataclass
class Profile:
    """Events as (name, start, end, parent), and a GPU's as (name, on the GPU, correlation, ...)."""

    events: list[tuple[str, int, int, int]] = field(default_factory=list)
    device: list[tuple[str, bool, int, int, int]] = field(default_factory=list)


def made_up(seed: int) -> Profile:
    """A loop that launches kernels, now ahead of the GPU and now behind it.

    The Python frames around it never return: their end is the largest number there is.
    """
    rng = random.Random(seed)
    profile = Profile()
    now, idle_from, around = 1_656_454_173_436_288_169, 0, -1
    for depth in range(3):
        profile.events.append((f"train.py({depth}): main", now, NEVER, around))
        around, now = depth, now + rng.randrange(1, 2000)
    for step in range(rng.randrange(4, 12)):
        begin, outer = now, len(profile.events)
        profile.events.append((f"train.py(7): step_{step}", begin, 0, around))
        quick = rng.random() < 0.5
        for number in range(rng.randrange(1, 12)):
            op, start = len(profile.events), now
            launched = now + rng.randrange(1, 100)
            ran = max(idle_from, launched + rng.randrange(50, 200))
            idle_from = ran + rng.randrange(100, 4000 if quick else 400)
            now = launched + rng.randrange(50, 150 if quick else 3000)
            profile.events.append((f"aten::op_{number % 3}", start, now, outer))
            profile.events.append(("aten::inner", launched - 1, launched + 20, op))
            profile.device.append(("cudaLaunchKernel", False, op, launched, launched + 20))
            profile.device.append(("gemm", True, op, ran, idle_from))
            now += rng.randrange(1, 50)
        if rng.random() < 0.5:
            now = max(now, idle_from) + rng.randrange(1, 100)
            profile.device.append(("Memcpy HtoD", True, 0, now - 20, now))
        profile.events[outer] = (*profile.events[outer][:2], now, around)
        now += rng.randrange(1, 50)
    return profile


def without_gpu() -> Profile:
    profile = made_up(0)
    profile.device.clear()
    return profile


# In this one torch loses an interval in which the queue runs dry, behind some that it counts twice.
LOST = 3
SEEDS = [seed for seed in range(12) if seed != LOST]
PROFILES = {**{f"made up {seed}": made_up(seed) for seed in SEEDS}, "no GPU": without_gpu()}


def stand_in(profile: Profile) -> Any:
    """The profile as torch's own evaluation takes one."""
    from torch.profiler import DeviceType

    nodes = [
        SimpleNamespace(
            name=name,
            id=number,
            start_time_ns=start,
            end_time_ns=end,
            duration_time_ns=end - start,
            children=[],
            parent=None,
        )
        for number, (name, start, end, _) in enumerate(profile.events)
    ]
    for node, (_, _, _, parent) in zip(nodes, profile.events, strict=True):
        if parent >= 0:
            node.parent = nodes[parent]
            nodes[parent].children.append(node)
    flat = [_KinetoEvent(*row) for row in profile.device]
    for event in flat:
        event.device_type = lambda on=event.on_gpu: DeviceType.CUDA if on else DeviceType.CPU
    roots = [node for node in nodes if node.parent is None]
    return SimpleNamespace(
        kineto_results=SimpleNamespace(experimental_event_tree=lambda: roots, events=lambda: flat)
    )


class _KinetoEvent:
    """Torch's evaluation takes the name as it is, and keeps events in a dictionary."""

    device_type: Any

    def __init__(self, name: str, on_gpu: bool, correlation: int, start: int, end: int) -> None:
        self.name, self.on_gpu = name, on_gpu
        self.linked_correlation_id = lambda: correlation
        self.start_ns = lambda: start
        self.duration_ns = lambda: end - start


def evaluated(profile: Profile) -> dict[str, list[int]]:
    """What torch says: a number for each event, and the ten events that it would optimize."""
    from torch.profiler._utils import (  # type: ignore[attr-defined,unused-ignore]
        BasicEvaluation,
        traverse_bfs,
    )

    mock = stand_in(profile)
    evaluation = BasicEvaluation(mock)
    metrics = {key.event.id: value for key, value in evaluation.metrics.items()}
    rows = [metrics[number] for number in range(len(profile.events))]
    return {
        "self_time_ns": [row.self_time_ns for row in rows],
        "idle_ns": [row.idle_time_ns for row in rows],
        "queue_depth": [row.queue_depth for row in rows],
        "ranked": [key.event.id for key in evaluation.rank_events(10)],
        "breadth_first": [
            e.id for e in traverse_bfs(mock.kineto_results.experimental_event_tree())
        ],
    }


def main() -> None:
    import torch

    told = {name: evaluated(profile) for name, profile in PROFILES.items()}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(values)}" for name, values in told.items())
    FILE.write_text(f'{{"torch": "{torch.__version__}", "profiles": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    sys.exit(main())
