"""The estimate of a graph: a result, what a GPU would make of it, its memory node by node.

The nodes are taken in their own order, or in any other that a scheduler tries. The rules are those
of ``MemoryTracker`` in ``torch/_inductor/fx_passes/memory_estimator.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np

from pytest_torchmem.analysis.caching_allocator.requests import Requests
from pytest_torchmem.analysis.estimated import static
from pytest_torchmem.analysis.estimated.static import Releasable
from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.values.contributors import Source
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.json_values import OTHERWISE
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticRun


@dataclass(frozen=True, slots=True)
class Estimate(Result, GpuQuestions):
    """An estimated result that can also be asked what a GPU would make of it.

    Attributes:
        run: What the estimate was made from. It does not go through JSON, and two estimates are
            equal without it.
    """

    run: StaticRun = field(kw_only=True, repr=False, compare=False, metadata=OTHERWISE)

    @classmethod
    def of(cls, run: StaticRun, name: str = "") -> Estimate:
        result = static.estimate_result(run, name)
        values = {f.name: getattr(result, f.name) for f in fields(result)}
        return cls(**values, run=run)

    def nodes(self) -> tuple[NodeBytes, ...]:
        """The bytes on the estimate's device during and after each operator, in order."""
        return bytes_by_node(self.run)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free on the estimate's device, in order."""
        return requests_of_run(self.run)


def requests_of_run(run: StaticRun) -> Requests:
    """Return the requests of an estimate: what was there before comes first."""
    events = static.allocation_events(run)
    events = events[events[:, 1] != 0]
    return Requests.from_columns(events[:, 1] > 0, np.abs(events[:, 1]), events[:, 0])


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """The bytes in use while a node runs and after it.

    Attributes:
        name: The node's name in its graph.
        operator: In the profiler's style, ``aten::mm``.
        source: The user's line; None where none is known.
        during_bytes: With all that it makes, and nothing released yet.
        after_bytes: With everything released that it was the last to use.
    """

    name: str
    operator: str
    source: Source | None
    during_bytes: int
    after_bytes: int


def bytes_by_node(run: StaticRun) -> tuple[NodeBytes, ...]:
    """Return the bytes on the run's device for each operator, in order."""
    sizes = np.array(
        [s.size_bytes * (s.device == run.device) for s in run.graph.storages], np.int64
    )
    levels = run.lifetimes.levels(sizes, run.graph.row_count)
    columns = (run.graph.operators, levels[1::2].tolist(), levels[2::2].tolist())
    return tuple(
        NodeBytes(node.name, node.operator, node.source, during, after)
        for node, during, after in zip(*columns, strict=True)
    )


class Named(Protocol):
    """The part of a node of FX that is looked at here."""

    @property
    def name(self) -> str: ...


class ScheduledMemory:
    """The bytes in use while the nodes of a graph are scheduled one by one, in any order.

    A storage is released once every node that uses it was scheduled, if ``releasable`` says yes to
    the node that made it. A graph makes 4 bytes, of which two nodes need to know::

        zeros    during 4   after 4
        sum      during 8   after 8
        add      during 12  after 8     the last use of the zeros
    """

    def __init__(
        self,
        graph: StaticGraph,
        releasable: Releasable = static.not_primal,
        on_device: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._size_bytes = [s.size_bytes for s in graph.storages]
        self._is_counted = [on_device(s.device) for s in graph.storages]
        makes = [(node, s) for node in graph.nodes for s in node.makes]
        self._releasable = {s for node, s in makes if releasable(node)}
        self._unscheduled_uses = Counter(
            s for node in graph.nodes if node.kind is not NodeKind.INPUT for s in node.uses
        )
        given = (NodeKind.INPUT, NodeKind.ATTRIBUTE)
        self.scheduled: set[str] = set()
        self.live: set[int] = {s for node, s in makes if node.kind in given and self._is_counted[s]}
        self._current_bytes = sum(self._size_bytes[s] for s in self.live)
        self.peak_memory = self._current_bytes

    def get_current_memory_bytes(self) -> int:
        """Return the bytes in use after what was scheduled."""
        return self._current_bytes

    def schedule_node(self, given: Named) -> None:
        """Run a node next.

        Raises `EstimateError` for one that was scheduled, and for one that uses a storage that no
        node has made yet.
        """
        name = given.name
        node = self._nodes[name]
        if name in self.scheduled:
            raise EstimateError(f"node {name} was scheduled before; each runs once")
        self.scheduled.add(name)
        if node.kind is not NodeKind.INPUT:
            self._unscheduled_uses.subtract(node.uses)
        if node.kind is not NodeKind.OPERATOR:
            return
        new_storages = {s for s in node.makes if self._is_counted[s]} - self.live
        used = {s for s in node.uses if self._is_counted[s]}
        if not used <= self.live:
            raise EstimateError(
                f"node {name} uses a storage that no node has made yet, or that is released"
            )
        self.live |= new_storages
        self._current_bytes += sum(self._size_bytes[s] for s in new_storages)
        self.peak_memory = max(self.peak_memory, self._current_bytes)
        released = {s for s in used & self._releasable if not self._unscheduled_uses[s]}
        self.live -= released
        self._current_bytes -= sum(self._size_bytes[s] for s in released)
