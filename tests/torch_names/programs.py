"""Small programs whose memory profiles torch's own suite looks at, and both engines' words on them.

An `Engine` tells what it makes of a finished profile in plain values, so that torch's and ours can
be compared. Tensors are numbered as they are first told.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.torch_names import memory_profiler as ours

Lines = list[str]


def profiled(body: Callable[[], object], shapes: bool = True, memory: bool = True) -> Any:
    """Run a body under torch's profiler.

    It has two threads: a sum that is split between threads takes a buffer as large as their number.
    No garbage of other tests is freed meanwhile.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            gc_paused(),
            torch.profiler.profile(
                record_shapes=shapes, profile_memory=memory, with_stack=True
            ) as finished,
        ):
            body()
    finally:
        torch.set_num_threads(threads)
    return finished


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x):
        return x * self.scale


# --- programs: each makes its tensors, and returns what is run under the profiler -----------------


def annotated():
    x, y = torch.ones(1), torch.ones(1)

    def body():
        # A name with a namespace may be an operator, and one without never is.
        with torch.profiler.record_function("Space::note"), torch.profiler.record_function("note"):
            x.zero_()
            y.zero_()
            return torch.ones_like(x), torch.zeros_like(y)

    return body


def outside_of_operators():
    gc.collect()  # so that the body's own collection frees nothing of another test's
    x = torch.ones(1)

    def body():
        x.mul(2)
        gc.collect()

    return body


def out_of_place():
    x, y = torch.ones(25), torch.ones(25, requires_grad=True)

    def body():
        z = x.mul(y)
        return z.view_as(z)

    return body


def out_of_place_without_grad():
    x, y = torch.ones(25), torch.ones(25, requires_grad=True)

    def body():
        with torch.no_grad():
            z = x.mul(y)
            return z.view_as(z)

    return body


def in_place():
    x, y = torch.ones(25), torch.ones(25, requires_grad=True)
    return lambda: x.mul_(y)


def in_place_without_grad():
    x, y = torch.ones(25), torch.ones(25, requires_grad=True)

    def body():
        with torch.no_grad():
            x.mul_(y)

    return body


def simple_backward():
    x, w = torch.ones(1), torch.ones(1, requires_grad=True)
    return lambda: (x * w).sin().backward()


def written_out():
    def body():
        x = torch.ones(25)
        y = x.mul(2).add_(2)
        return x, y, torch.sin(y, out=torch.empty_like(y))

    return body


def stacked(steps: int = 0, with_grad: bool = True):
    x = torch.ones(25)
    w0, w1 = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)

    def forward():
        return x.mul(w0).relu().mul(w1).relu().sum()

    def body():
        if with_grad:
            forward().backward()
        else:
            with torch.no_grad():
                forward()

    for _ in range(steps):
        body()
    return body


def stacked_forward():
    return stacked(with_grad=False)


def stacked_again():
    return stacked(steps=1)


def two_weights(backward: bool = False, step: bool = False):
    w0, w1 = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([w0, w1], lr=0.1)

    def body():
        x, targets = torch.ones(2, 2), torch.ones(2, 4)
        y = torch.cat([x * w0, x * w1], dim=1)
        if backward:
            functional.binary_cross_entropy_with_logits(y, targets).backward()
        if step:
            optimizer.step()
            optimizer.zero_grad()

    return body


def weights_forward():
    return two_weights()


def weights_backward():
    return two_weights(backward=True)


def weights_step():
    return two_weights(backward=True, step=True)


def layer_forward():
    model = nn.Linear(2, 4)
    return lambda: model(torch.ones(2, 2))


def layer_backward():
    model = nn.Linear(2, 1)
    return lambda: model(torch.ones(2, 2)).sum().backward()


def layer_step():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body():
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def _layers():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4, bias=False), nn.Softmax(dim=1))


def sequential_forward():
    model = _layers()
    return lambda: model(torch.ones(2, 2))


def sequential_backward():
    model = _layers()

    def body():
        x, targets = torch.ones(2, 2), torch.ones(2, 4)
        torch.sum((model(x) - targets) ** 2).mean().backward()

    return body


def training_step():
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512, bias=False), nn.Softmax(dim=1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=False)

    def body():
        x, targets = torch.ones(1024, 64), torch.ones(1024, 512)
        functional.mse_loss(model(x), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def made_of_scalars():
    def body():
        x = torch.ones(1).mul(2).add_(2)
        return torch.sin(x, out=torch.empty_like(x))

    return body


def multiplied_backward():
    x, w = torch.ones(1), torch.ones(1, requires_grad=True)
    return lambda: torch.mul(x, w).backward()


PROGRAMS = (
    *(annotated, outside_of_operators, out_of_place, out_of_place_without_grad, in_place),
    *(in_place_without_grad, simple_backward, written_out, stacked_forward, stacked, stacked_again),
    *(weights_forward, weights_backward, weights_step, layer_forward, layer_backward, layer_step),
    *(sequential_forward, sequential_backward, training_step),
    *(made_of_scalars, multiplied_backward),
)


# --- what an engine makes of them -----------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """The same questions to two engines.

    Attributes:
        name: Who answers.
        profile: The memory profile of a finished profile.
        nodes: The nodes of the data-flow graph: (name, edges by key).
        operators: The operators in depth-first order: (name, overloads, mutable inputs).
        category: The name of the category of a version of a key.
        snapshot: The category of each version of each key.
    """

    name: str
    profile: Callable[[Any], Any]
    nodes: Callable[[Any], Iterator[Any]]
    operators: Callable[[Any], Iterator[tuple[str, Lines, tuple[bool | None, ...]]]]
    category: Callable[[Any, Any, int], str]
    snapshot: Callable[[Any], dict[Any, Any]]


def _named(category: Any) -> str:
    return category.name if category else "-"


def _engine(name: str, module: Any, profile: Callable[[Any], Any]) -> Engine:
    """An engine that a module with torch's names is the interface of."""

    def operators(made: Any) -> Iterator[tuple[str, Lines, tuple[bool | None, ...]]]:
        for event in made._op_tree.dfs():
            if event.tag.name == "TorchOp":
                fields = event.extra_fields
                schemas = [
                    f"{s.name}.{s.overload_name}" if s.overload_name else s.name
                    for s in module.SchemaMatcher.match_schemas(fields)
                ]
                yield event.name, schemas, module.SchemaMatcher.inputs_are_mutable(fields)

    return Engine(
        name,
        profile,
        lambda made: ((n._event.name, n) for n in made._data_flow_graph.flow_nodes),
        operators,
        lambda made, key, version: _named(made._categories.get(key, version)),
        lambda made: made._category_snapshot(),
    )


OURS = _engine("ours", ours, ours.MemoryProfile)


def torchs() -> Engine:
    """torch's own engine, where this release has it."""
    from torch.profiler import _memory_profiler as theirs

    return _engine("torch's", theirs, lambda finished: finished._memory_profile())


class Numbers(dict[int, int]):
    """Numbers allocation ids as they are first told."""

    def __missing__(self, allocation_id: int) -> int:
        number = self[allocation_id] = len(self)
        return number

    def of(self, key: Any) -> str:
        return f"T{self[key.storage.allocation_id]}" if hasattr(key, "storage") else "-"


def told_flow(engine: Engine, profile: Any) -> Lines:
    """A line for each node: versions with their categories; a star where one is freed."""
    numbers, lines = Numbers(), []

    def text(key: Any, version: int, freed: bool = False) -> str:
        star = "*" if freed else ""
        category = engine.category(profile, key, version)
        return f"{numbers.of(key)}(v{version}{star} {category})"

    for name, node in engine.nodes(profile):
        taken = [text(k, v, node._edges[k].is_deletion) for k, (_, v) in node.inputs.items()]
        made = [text(k, v) for k, v in node.outputs.items()]
        inside = [text(k, 0) for k in node.intermediates]
        line = f"{name}: {', '.join(taken)} -> {', '.join(made)}"
        lines.append(f"{line} within {', '.join(inside)}" if inside else line)
    return lines


def told_schemas(engine: Engine, profile: Any) -> Lines:
    """A line for each operator: the overloads that fit, and which inputs it may write to."""
    letters = {True: "w", False: "r", None: "?"}
    return [
        f"{name}: {', '.join(schemas) or 'no schema'} ({''.join(letters[m] for m in mutable)})"
        for name, schemas, mutable in engine.operators(profile)
    ]


def told_timeline(engine: Engine, profile: Any, at_least_bytes: int = 0) -> Lines:
    """A line for each action: its category, before and after where it makes a version.

    Actions of one moment have no order of their own.
    """
    numbers, lines = Numbers(), []
    entries = [e for e in profile.timeline if e[3] >= at_least_bytes]
    entries.sort(key=lambda e: (e[0], e[1].value, getattr(e[2][0], "id", -1), e[2][1]))
    for _, action, (key, version), size in entries:
        category = engine.category(profile, key, version) if hasattr(key, "id") else "-"
        if action.name == "INCREMENT_VERSION" and hasattr(key, "id"):
            category += f" > {engine.category(profile, key, version + 1)}"
        lines.append(f"{action.name} {numbers.of(key)}(v{version}) {size} {category}")
    return lines


def told(engine: Engine, finished: Any) -> dict[str, Lines]:
    """Everything that an engine makes of a profile."""
    profile = engine.profile(finished)
    return {
        "flow": told_flow(engine, profile),
        "schemas": told_schemas(engine, profile),
        "timeline": told_timeline(engine, profile),
    }
