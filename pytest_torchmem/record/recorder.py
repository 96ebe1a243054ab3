"""Notes what a body does, restores what was there, and hands back a trace."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter_ns
from typing import ClassVar, Final

import numpy as np
import torch

from pytest_torchmem.contexts import ORIGINALS, Around, pause_gc, resume_gc
from pytest_torchmem.record.compiled.compiled_graphs import CompiledSources
from pytest_torchmem.record.devices import (
    CounterReader,
    holds_more,
    note_held,
    settle,
    synchronize,
    workspace_bytes,
)
from pytest_torchmem.record.environment import library_paths
from pytest_torchmem.record.observers import observer_for, slower_because
from pytest_torchmem.record.owners.live_objects import settle_collector
from pytest_torchmem.record.owners.ownership import OwnershipLog, OwnershipWatch
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.compiled_code import (
    CompilationWatch,
    CompiledRegions,
    CompilerImport,
    note_graphs,
)
from pytest_torchmem.record.patches.gloo import GlooWatch
from pytest_torchmem.record.patches.quiet import quiet
from pytest_torchmem.record.recorded_tables import Rows
from pytest_torchmem.record.torch_api import autograd, compiler
from pytest_torchmem.record.torch_api.compiler import untraced
from pytest_torchmem.values.trace import COMPILED_LINE, MARK, MarkKind, Ownership, Trace

# Marks of these kinds need no place among the events: the clock orders them well enough.
_OFF_TREE: Final = frozenset({MarkKind.MODULE_SEEN})


class Recorder:
    """Records one body.

    `start`, then `mark` and `trace` as often as wanted, then `stop`. Both `trace` and `stop` return
    everything since `start`; recording goes on after `trace`. ``empties_cache``: see
    `CounterReader`.
    """

    #: The one that records now.
    now: ClassVar[Recorder | None] = None

    def __init__(
        self,
        device: torch.device,
        say: Callable[[str], None] = lambda _: None,
        *,
        empties_cache: bool = False,
    ) -> None:
        self._device = device
        self._own_ns = 0
        self._observer = observer_for(device, say)
        self._empties_cache = empties_cache
        self._counters = CounterReader(device, empties_cache=empties_cache)
        self._log = OwnershipLog(self._observer.strings, self._observer.device_names)
        self._watch = OwnershipWatch(self._log, self.mark, self._observer.sees_end)
        self._marks = Rows(MARK)
        self._compilations = CompilationWatch(self._learn_graphs)
        self._imports = CompilerImport(self._listen_to_compiler)
        self._regions = CompiledRegions(self._hooks_out, self._hooks_in)
        # Following what is owned is put off for a while by `paused`, and hooks that dynamo would
        # see while compiled code runs.
        self._following, self._hooks = Installed(), Installed()
        self._patches, self._listening = Installed(), Installed()

    def start(self) -> None:
        """Settle the device and begin."""
        try:
            self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        begin_ns = perf_counter_ns()
        ORIGINALS.note()
        self._observer.prepare()
        settle(self._device)
        settle_collector(lambda: self._empties_cache or holds_more(self._device))
        with _collector_as_after_a_collection():
            settle(self._device)
            note_held(self._device)
            self._watch.install(self._following)
            GlooWatch().install(self._patches)
            self._imports.install(self._patches)
            self._listen_to_compiler()
            self._hooks_in()
            self._watch.scan(self._clock_mark(MarkKind.START))
            self._learn_graphs()
            self._counters.start()
            self._own_ns += perf_counter_ns() - begin_ns
            self._observer.begin()
        atexit.register(self.cancel)
        Recorder.now = self

    @cached_property
    def _sources(self) -> CompiledSources:
        return CompiledSources(self._observer.strings)

    def _learn_graphs(self) -> None:
        """Note what the living graphs of a compiler know; without a compiler there are none."""
        if compiler.is_imported():
            self._sources.learn()
            note_graphs(self._listening, self._note_graph)

    def _listen_to_compiler(self) -> None:
        """Notice what the compiler does, once it is there."""
        if not self._listening.names:
            self._compilations.install(self._listening)
            self._regions.install(self._listening)

    @quiet
    def _hooks_in(self) -> None:
        if self._following.names and not self._hooks.names:
            self._watch.install_hooks(self._hooks)

    @quiet
    def _hooks_out(self) -> None:
        self._watch.note_compiled()
        self._hooks.remove()

    @quiet
    def _note_graph(self, inputs: Sequence[object]) -> None:
        """Note what compiled code is called with."""
        self._watch.note_call([i for i in inputs if isinstance(i, torch.Tensor)], ())

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of the numbers must know."""
        reason = slower_because()
        if not reason:
            return ()
        return (
            "torch's profiler measures here, many times slower than our recorder, and too much "
            f"within transforms of torch.func: {reason}",
        )

    @untraced
    def mark(self, kind: MarkKind, text: str = "") -> int:
        """Note a moment; returns its number."""
        number = self._clock_mark(kind, text)
        if kind not in _OFF_TREE:
            self._observer.mark(number)
        return number

    def now_ns(self) -> int:
        """Return the time on the recording's clock."""
        return self._observer.now_ns()

    def _clock_mark(self, kind: MarkKind, text: str = "") -> int:
        row = (kind, self._observer.now_ns(), -1, self._observer.strings.number(text))
        self._marks.append(row)
        return len(self._marks) - 1

    @untraced
    def sample_graphs(self, mark: int) -> None:
        """Log at ``mark`` what autograd graphs that are alive now keep for backward."""
        self._watch.sample(mark)
        self._watch.sample_graphs(mark)

    @untraced
    def trace(self) -> Trace:
        """Return what was recorded so far, and go on."""
        with ORIGINALS.back():
            self._observer.pause()
            try:
                return self._assemble()
            finally:
                self._observer.go_on()

    @untraced
    def stop(self) -> Trace:
        """End the recording, restore everything, and return all that was recorded."""
        try:
            synchronize(self._device)
            autograd.await_engine(self._device)
            stop = self.mark(MarkKind.STOP)
            self._observer.end()
            self._counters.stop()
            self._watch.sample_end(stop)
        finally:
            self._restore()
        try:
            with ORIGINALS.back():
                return self._assemble()
        finally:
            self._observer.let_go()

    def paused(self) -> Around[None]:
        """Leave what happens in the block out of the recording."""

        def begin() -> None:
            self._hooks.remove()
            self._following.remove()
            self._observer.pause()

        def end(_: None) -> None:
            self._watch.install(self._following)
            self._hooks_in()
            self._observer.go_on()

        return Around(begin, end)

    def cancel(self) -> None:
        """End the recording and restore everything, without looking at what was recorded."""
        self._restore()
        self._observer.let_go()

    def _restore(self) -> None:
        try:
            self._take_out()
        except BaseException:  # a signal's handler may raise between two of the steps
            self._take_out()
            raise

    def _take_out(self) -> None:
        self._observer.end()
        Recorder.now = None
        atexit.unregister(self.cancel)
        self._listening.remove()
        self._hooks.remove()
        self._patches.remove()
        self._following.remove()
        self._watch.forget_storages()

    def _assemble(self) -> Trace:
        begin_ns = perf_counter_ns()
        marks, edges = self._marks.table(), self._log.edges.table()
        owners = self._log.owners.table()
        at_start = (owners["kind"] == Ownership.LIVE) & (owners["mark"] == 0)
        at_start &= owners["device"] == self._observer.device_names.number("cpu")
        tables = self._observer.read(marks, owners["ptr"][at_start])
        device_names = self._observer.device_names.values()
        self._own_ns += perf_counter_ns() - begin_ns
        return Trace(
            events=tables.events,
            tensors=tables.tensors,
            allocations=tables.allocations,
            module_calls=tables.module_calls,
            details=tables.details,
            marks=marks,
            owners=owners,
            module_edges=edges,
            compiled_lines=(
                self._sources.read(tables.events, edges)
                if compiler.is_imported()
                else np.empty(0, COMPILED_LINE)
            ),
            strings=self._observer.strings.values(),
            devices=device_names,
            meta={
                "torch": torch.__version__,
                "device": str(self._device),
                "library_paths": library_paths(),
                "counters": self._counters.peaks,
                "counters_before": self._counters.before,
                "own_cost_ns": self._own_ns,
                "live_at_start_known": True,
                "workspace_bytes": workspace_bytes(self._device),
            },
        )


def _collector_as_after_a_collection() -> Around[bool]:
    """Leave Python's collector as if the block had made no objects.

    It runs when so and so many objects were made, and frees the tensors that cycles hold. The table
    of what is alive has a row for each tensor that others left behind: without care, their number
    would decide when a body's own cycles are freed.
    """
    return Around(pause_gc, _collect_young)


@quiet
def _collect_young(was_enabled: bool) -> None:
    gc.collect(0)
    resume_gc(was_enabled)
