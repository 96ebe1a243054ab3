"""Starts the sources, stops them, restores what was there, and hands back a trace."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import cache, cached_property, partial
from time import perf_counter_ns, thread_time, time_ns
from typing import ClassVar, Final

import numpy as np
import torch

from pytest_torchmem.contexts import ORIGINALS, Around, numpy_in_place, pause_gc, resume_gc
from pytest_torchmem.record.collector_count import KeptCount
from pytest_torchmem.record.compiled.compiled_graphs import CompiledSources
from pytest_torchmem.record.devices import (
    AllocatorHistory,
    CounterReader,
    holds_memory,
    settle,
    synchronize,
    workspace_bytes,
)
from pytest_torchmem.record.owners.live_objects import SwapWatch, settle_collector
from pytest_torchmem.record.owners.ownership import OwnershipLog, OwnershipWatch
from pytest_torchmem.record.patches import Installed, open_ranges
from pytest_torchmem.record.patches.functorch import FunctorchWatch
from pytest_torchmem.record.patches.open_ranges import OpenRanges
from pytest_torchmem.record.patches.python_tracing import (
    CompilationWatch,
    CompiledRegions,
    ImportWatch,
    ParsingWatch,
    TracingPause,
    handlers_wait,
    note_graphs,
    quiet,
)
from pytest_torchmem.record.patches.threads import GlooWatch, ThreadWatch
from pytest_torchmem.record.recording_size import IMPORTS, RecordingSize
from pytest_torchmem.record.safe_points import SafePoints
from pytest_torchmem.record.torch_api import autograd, compiler, profiler
from pytest_torchmem.record.torch_api.compiler import untraced
from pytest_torchmem.record.tree.growing_tables import Rows, Tables, joined
from pytest_torchmem.record.tree.kineto import CUT, MARKED, TreeReader, place_marks
from pytest_torchmem.record.tree.lost_allocations import with_lost
from pytest_torchmem.record.tree.python_calls import library_paths
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.trace import (
    COMPILED_LINE,
    MARK,
    MarkKind,
    Trace,
)

# These need no place in the tree; the clock is good enough to order them.
_OFF_TREE = frozenset({MarkKind.MODULE_SEEN, MarkKind.CALL})
# Processor time after which a session is ended at the next mark: some 20,000 small operators.
_LONG_SESSION_S: Final = 0.25
# A session is cut after about so many events, some 1,000 small operators. How long that takes the
# last session tells; before the first one has ended, nothing does.
_EVENTS_BETWEEN_CUTS: Final = 12_500
_SOONEST_CUT_S: Final = 0.005
_FIRST_CUT_S: Final = 0.01
_LATEST_CUT_S: Final = 0.06
# After a moment that is not safe, we look for another one that much later.
_RETRY_S: Final = 0.005
# Numbers of users are those of what is alive at these marks.
_NUMBERS_END = frozenset({MarkKind.STEP, MarkKind.REGION_END})


class Recorder:
    """Records one body on the calling thread.

    `start`, then `mark` and `trace` as often as wanted, then `stop`. Both `trace` and `stop` return
    everything since `start`; profiling goes on after `trace`. Between two sessions, ``say`` gets
    what somebody must know while the body runs. ``empties_cache``: see `CounterReader`.
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
        self._size = RecordingSize(say)
        self._own_ns = 0
        self._counters = CounterReader(device, empties_cache=empties_cache)
        self._history = AllocatorHistory(device)
        self._reader = TreeReader()
        self._log = OwnershipLog(self._reader.strings, self._reader.device_names)
        self._ranges = OpenRanges()
        self._watch = OwnershipWatch(
            self._log, self.mark, partial(self._between_sessions, open_ranges.BACKWARD)
        )
        self._marks = Rows(MARK)
        self._segments: list[Tables] = []
        self._profiler: profiler.Profiler | None = None
        self._session_began_s = 0.0
        self._has_lost = False
        self._let_go_once = False
        self._points = SafePoints(self._cut)
        self._cut_after_s = _FIRST_CUT_S
        self._count = KeptCount()
        self._threads = ThreadWatch(device, self._history.keep_calls, self._lose_session)
        self._functorch = FunctorchWatch(
            self._watch.note_call, lambda: autograd.await_engine(self._device)
        )
        self._compilations = CompilationWatch(self._learn_graphs)
        self._imports = ImportWatch(self._listen_to_compiler)
        self._tracing = TracingPause()
        self._regions = CompiledRegions(self._hooks_out, self._hooks_in)
        # Following what is owned is put off for a while by `paused`, and hooks that dynamo would
        # see while compiled code runs.
        self._following, self._hooks = Installed(), Installed()
        self._patches, self._listening = Installed(), Installed()

    def start(self) -> None:
        """Settle the device and begin. Raises `RecordingError` if another profiler is active.

        A recording that nobody has stopped when the interpreter ends is cancelled: the profiler
        would go on to follow Python's calls while Python is taken down.
        """
        if profiler.profiler_is_active():
            raise RecordingError(
                "another torch profiler session is active around the test body, and only one can "
                "be; measure outside it"
            )
        try:
            with handlers_wait():
                self._start()
        except BaseException:
            self.cancel()
            raise

    def _start(self) -> None:
        begin_ns = perf_counter_ns()
        ORIGINALS.note()
        _listen_to_the_process()
        settle(self._device)
        settle_collector(collect=holds_memory(self._device))
        with _collector_as_after_a_collection():
            settle(self._device)
            self._count.install(self._patches)
            self._install()
            self._watch.scan(self._clock_mark(MarkKind.START))
            self._learn_graphs()
            self._counters.start()
            self._history.start()
            self._points.begin()
            self._own_ns += perf_counter_ns() - begin_ns
            self._resume()
        atexit.register(self._cancel_at_exit)
        Recorder.now = self

    def _follow(self) -> None:
        self._watch.install(self._following)
        self._threads.count_all(self._following)

    def _install(self) -> None:
        self._follow()
        swaps = SwapWatch(partial(self._between_sessions, open_ranges.CONVERSION))
        watches = (self._ranges, self._threads, self._functorch, swaps, self._points)
        for watch in (*watches, GlooWatch(), self._imports, ParsingWatch()):
            watch.install(self._patches)
        self._listen_to_compiler()
        self._hooks_in()

    @cached_property
    def _sources(self) -> CompiledSources:
        return CompiledSources(self._reader.strings)

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
            self._functorch.install_hooks(self._hooks)

    @quiet
    def _hooks_out(self) -> None:
        self._watch.note_compiled()
        self._hooks.remove()

    @quiet
    def _note_graph(self, inputs: Sequence[object]) -> None:
        """Note what compiled code is called with."""
        mark = self._watch.note_call([i for i in inputs if isinstance(i, torch.Tensor)], ())
        self._mark_in_tree(mark)

    def _mark_in_tree(self, number: int) -> None:
        with self._functorch.heard(), profiler.RecordFunction(f"{MARKED}{number}"):
            pass

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that a reader of the numbers must know."""
        return self._size.notes

    @untraced
    def mark(self, kind: MarkKind, text: str = "") -> int:
        """Note a moment; returns its number."""
        if kind in _NUMBERS_END:
            self._let_go()
        number = self._clock_mark(kind, text)
        if self._profiler is not None and kind not in _OFF_TREE:
            self._mark_in_tree(number)
        return number

    @untraced
    def sample_graphs(self, mark: int) -> None:
        """Log at ``mark`` what autograd graphs that are alive now keep for backward."""
        self._watch.sample(mark)
        self._watch.sample_graphs(mark)

    @untraced
    def trace(self) -> Trace:
        """Return what was recorded so far, and go on.

        Raises `RecordingError` where the recording cannot be interrupted.
        """
        self._ranges.require_none_open()
        with handlers_wait():
            self._pause()
            try:
                return self._assemble()
            finally:
                self._resume()

    @untraced
    def stop(self) -> Trace:
        """End the recording, restore everything, and return all that was recorded.

        Raises `RecordingError` where it could not go on after a session.
        """
        with handlers_wait():
            self._stop()
        return self._assemble(last=True)

    def _stop(self) -> None:
        session = self._profiler
        try:
            # Until the session ends all calls are ours: half of what a small test calls.
            self._tracing.suspend()
            synchronize(self._device)
            autograd.await_engine(self._device)
            if self._profiler is None or self._has_lost:
                raise RecordingError("the recording was interrupted and could not go on")
            if self._ranges.none_open():
                # Another one may see more freed.
                with self._count.kept():
                    ended = self._pause()
                    if self._may_keep():
                        self._resume()
                    del ended
                session = self._profiler
            stop = self.mark(MarkKind.STOP)
            self._ranges.close()
            self._pause()
            self._history.stop()
            self._counters.stop()
            self._watch.sample_end(stop)
        except BaseException:
            # One that goes on ends the process when that exits.
            session = self._profiler or session
            if session is not None and session.is_undisturbed():
                session.stop()
            raise
        finally:
            self._restore()

    def paused(self) -> Around[None]:
        """Leave what happens in the block out of the recording.

        Entering it raises `RecordingError` where the recording cannot be interrupted.
        """

        def begin() -> None:
            self._ranges.require_none_open()
            self._hooks.remove()
            self._following.remove()
            try:
                self._interrupt()
            except BaseException:
                follow()
                raise

        def follow() -> None:
            self._follow()
            self._hooks_in()

        def end(_: None) -> None:
            follow()
            self._go_on()

        return Around(begin, end)

    def _between_sessions(self, but: tuple[str, ...]) -> Around[bool]:
        """Have no profiler in the block, where that can be; says whether it could."""

        def begin() -> bool:
            can_be = self._profiler is not None and self._ranges.none_open(but)
            if can_be:
                self._interrupt()
            return can_be

        return Around(begin, lambda paused: self._go_on() if paused else None)

    def _interrupt(self) -> None:
        """End the session until `_go_on`; if a signal's handler raises, go on at once."""
        try:
            with handlers_wait():
                self._pause()
        except BaseException as error:
            if self._profiler is None and not isinstance(error, RecordingError):
                self._go_on()
            raise

    def _go_on(self) -> None:
        with handlers_wait():
            self._resume()

    def cancel(self) -> None:
        """End the recording and restore everything, without looking at what was recorded."""
        with handlers_wait(), ExitStack() as last:
            session, self._profiler = self._profiler, None
            last.callback(self._restore)
            self._ranges.close()
            if session is not None:
                last.enter_context(suppress(RecordingError))
                last.callback(session.stop)
            self._points.end()

    def _lose_session(self) -> None:
        if self._profiler is not None:
            self._profiler.is_replaced = True

    def _cancel_at_exit(self) -> None:
        # Another thread's session cannot be ended from here.
        if profiler.profiler_is_active():
            self.cancel()

    def leave_to_parent(self) -> None:
        """Record no more than allocations, in a process that was forked from the recording's.

        A data loader's worker would become slower and larger with each of its calls.
        """
        if self._profiler is not None:
            self._profiler.leave_to_parent()

    def follow_no_calls(self) -> None:
        """Record no calls of the calling thread any more; operators and allocations as ever."""
        if self._profiler is not None:
            self._profiler.follow_no_calls()

    def _restore(self) -> None:
        self._tracing.resume()
        Recorder.now = None
        atexit.unregister(self._cancel_at_exit)
        self._points.end()
        self._count.remove()
        self._listening.remove()
        self._hooks.remove()
        self._history.stop()
        self._patches.remove()
        self._following.remove()
        self._watch.forget_storages()

    @untraced
    def _resume(self) -> None:
        begin_ns = perf_counter_ns()
        self._listen_to_compiler()
        self._history.begin()
        session = profiler.Profiler(below_torch=self._ranges.around > 0)
        profiler.print_no_frees()
        with ORIGINALS.back():
            try:
                session.start()
                self._profiler = session
            except BaseException:
                # One that another thread sends may come after it has begun.
                if session.is_undisturbed():
                    self._profiler = session
                raise
        self._count_time()
        self._own_ns += perf_counter_ns() - begin_ns

    def _count_time(self) -> None:
        """Begin to count the time of a session."""
        self._session_began_s = thread_time()
        self._size.begin_session()
        self._points.after(self._cut_after_s)

    def _let_go(self) -> None:
        """Restart the profiler: the old session holds the last references to some tensors.

        Their frees are recorded only in a new session. A session refers weakly to the arguments of
        operators and modules. Most objects give their memory back all the same; compressed sparse
        tensors do not, nor do the wrappers of a module's parameters within a transform.

        A long session begins anew, too: its end takes 3 KiB for each of its events, which are given
        back then.
        """
        if self._profiler is None or not self._ranges.none_open():
            return
        long = thread_time() - self._session_began_s > _LONG_SESSION_S
        if not self._let_go_once or long or self._may_keep():
            self._let_go_once = True
            # What a collection frees between two sessions nobody would see.
            with self._count.kept(), handlers_wait():
                ended = self._pause()
                self._resume()
                del ended
            self._count_time()

    def _cut(self) -> None:
        """Go on in a new session, at a moment at which nobody can tell.

        The end of a session takes 3 KiB for each of its events, and gives them back.
        """
        session = self._profiler
        # A profiler of the body's has taken our session's place, and must not lose its recording.
        # At the end nothing is to be cut any more.
        if session is None or not session.is_undisturbed() or self._tracing.is_suspended:
            return
        with self._count.kept(), handlers_wait():
            # A call that comes late may come in the next session.
            too_early = thread_time() - self._session_began_s < self._cut_after_s
            if too_early or (reason := self._in_the_way(session)):
                if not too_early:
                    self._size.look(reason)
                self._show_cut()
                self._points.after(_RETRY_S)
                return
            self._show_cut()
            with self._ranges.closed(), numpy_in_place():
                ended = self._pause(is_cut=True)
                self._resume()
            self._show_cut()
            del ended
            self._count_time()

    def _show_cut(self) -> None:
        """Put an event into the recording: it tells which events belong to a cut."""
        with self._functorch.heard(), profiler.RecordFunction(CUT):
            pass

    def _in_the_way(self, session: profiler.Profiler) -> str:
        """Return why the session cannot be cut now, "" where it can."""
        if self._functorch.within:
            return "a transform of torch.func is around that"
        if self._imports.importing:
            return IMPORTS
        return self._ranges.in_the_way(has_calls=session.has_calls) or self._points.in_the_way()

    def _foresee(self, seconds: float, event_count: int) -> None:
        """Set the time after which the next session is cut, from what the last one recorded.

        A loop of small operators may begin at any time: the time grows slowly.
        """
        foreseen = seconds * _EVENTS_BETWEEN_CUTS / max(1, event_count)
        longest = min(2 * self._cut_after_s, _LATEST_CUT_S)
        self._cut_after_s = max(min(foreseen, longest), _SOONEST_CUT_S)

    def _may_keep(self) -> bool:
        names = self._reader.strings.values()
        return self._functorch.entered or any(
            name.startswith("aten::") and "sparse" in name for name in names
        )

    @untraced
    def _pause(self, *, is_cut: bool = False) -> profiler.ProfilerResult | None:
        """End the session and read it; return what it consists of, to be dropped."""
        with ORIGINALS.back():
            return self._ended(is_cut=is_cut)

    def _ended(self, *, is_cut: bool) -> profiler.ProfilerResult | None:
        session = self._profiler
        if session is None:
            return None
        try:
            self._profiler = None
            if not profiler.profiler_is_active():
                raise RecordingError(
                    "the test body ran a torch profiler of its own, and only one can be active; "
                    "what was measured until then is lost"
                )
            begin_ns = perf_counter_ns()
            seconds = thread_time() - self._session_began_s
            result = self._end(session)
            self._read(result, session, seconds, is_cut=is_cut)
            self._own_ns += perf_counter_ns() - begin_ns
        except BaseException:
            # Memory may be short, or another thread has had this one raise.
            if session.is_undisturbed():
                self._profiler = session
            else:
                self._has_lost = True
            raise
        return result

    def _end(self, session: profiler.Profiler) -> profiler.ProfilerResult:
        # To record these calls would take longer than the calls.
        self._tracing.suspend()
        try:
            self._points.hold()
            self._history.end()
            return session.stop()
        finally:
            self._tracing.resume()

    def _read(
        self,
        result: profiler.ProfilerResult,
        session: profiler.Profiler,
        seconds: float,
        *,
        is_cut: bool,
    ) -> None:
        tables = self._reader.read(result, is_cut=is_cut, lost_calls=session.lost_calls)
        self._foresee(seconds, tables.read_count)
        if entries := self._history.read():
            device = self._reader.device_names.number(str(self._device))
            total, number = self._history.allocated, self._reader.strings.number
            tables = with_lost(tables, device, entries, number=number, allocated=total)
        self._segments.append(tables.packed())
        self._size.add(self._segments[-1])
        self._threads.look_at(result, self._reader.threads)

    def _clock_mark(self, kind: MarkKind, text: str = "") -> int:
        self._marks.append((kind, time_ns(), -1, self._reader.strings.number(text)))
        return len(self._marks) - 1

    def _assemble(self, *, last: bool = False) -> Trace:
        tables, marks = joined(self._segments, last=last), self._marks.table()
        events, allocations, edges = tables.events, tables.allocations, self._log.edges.table()
        place_marks(events, marks, self._reader.strings)
        device_names = self._reader.device_names.values()
        if str(self._device) in device_names:
            times_ns = events["start_ns"][allocations["event"]]
            self._history.fill(allocations, times_ns, device_names.index(str(self._device)))
        return Trace(
            events=events,
            tensors=tables.tensors,
            allocations=allocations,
            module_calls=tables.module_calls,
            overloads=tables.overloads,
            details=tables.details,
            marks=marks,
            owners=self._log.owners.table(),
            module_edges=edges,
            compiled_lines=(
                self._sources.read(events, edges)
                if compiler.is_imported()
                else np.empty(0, COMPILED_LINE)
            ),
            strings=self._reader.strings.values(),
            devices=device_names,
            meta=self._meta(),
        )

    def _meta(self) -> dict[str, Json]:
        return {
            "torch": torch.__version__,
            "device": str(self._device),
            "library_paths": library_paths(),
            "counters": self._counters.peaks,
            "counters_before": self._counters.before,
            "own_cost_ns": self._own_ns,
            "live_at_start_known": True,
            # The allocator's history has what every thread did.
            **(self._threads.meta() if self._history.requests is None else {}),
            "workspace_bytes": workspace_bytes(self._device),
        }


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


@cache
def _listen_to_the_process() -> None:
    """Have each process that is forked from now on leave a recording to its parent.

    And have no calls followed where torch's Python tracer would raise. Python forgets neither.
    """
    ends = False

    def forked() -> None:
        if Recorder.now is not None:
            Recorder.now.leave_to_parent()

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        # Called for much that happens in the process. What it raised the program would get.
        if event != "exec" or ends:
            return
        if any(map(profiler.raises_for, arguments)) and Recorder.now is not None:
            Recorder.now.follow_no_calls()

    def end() -> None:
        # When Python itself ends, the names of modules are None.
        nonlocal ends
        ends = True

    # Dynamo looks at frames of an audit hook, too, also where nothing is recorded.
    compiler.never_trace(heard.__code__)
    sys.addaudithook(heard)
    atexit.register(end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forked)
