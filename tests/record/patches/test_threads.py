"""Threads that the profiler does not see: they are counted, or the result says they are not."""

from __future__ import annotations

import _thread
import ctypes
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest
import torch

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.patches import threads
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.findings import FindingKind
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size

SIZE = 1 << 16
# What `doubled` holds at a time: two tensors.
HELD = 2 * 4 * SIZE
KEPT: list[torch.Tensor] = []
KEPT_THREADS: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    yield
    KEPT.clear()


def measured(body: Callable[[], object]) -> Result:
    measurement = BodyMeasurement("cpu")
    measurement.start()
    try:
        torch.ones(16)
        body()
    finally:
        result = measurement.stop()
    return result


def in_thread(work: Callable[[], object], *, daemon: bool = False) -> None:
    thread = threading.Thread(target=work, name="loader", daemon=daemon)
    thread.start()
    thread.join()


def doubled() -> None:
    x = torch.ones(SIZE)
    x *= 2
    x = x + 1


def test_a_body_without_threads_has_no_blind_spot():
    layer = torch.nn.Linear(8, 8)
    result = measured(lambda: layer(torch.ones(2, 8)).sum().backward())
    assert (result.blind_spots, result.unexplained_bytes) == ((), 0)


def test_what_a_thread_held_for_a_while_is_known():
    result = measured(lambda: in_thread(doubled))
    assert HELD <= result.others_bytes <= HELD + 64
    held = format_size(result.others_bytes)
    assert result.blind_spots == (f"other threads held {held} that are not in the figures: loader",)


def test_a_module_called_on_a_thread_is_counted():
    layer = torch.nn.Linear(8, SIZE // 8)
    x = torch.ones(8, 8)
    result = measured(lambda: in_thread(lambda: layer(x)))
    assert result.others_bytes == 4 * SIZE


def test_threads_one_after_the_other_hold_what_one_holds():
    result = measured(lambda: [in_thread(doubled, daemon=True) for _ in range(4)])
    assert HELD <= result.others_bytes <= HELD + 64


def test_what_threads_hold_at_the_same_time_adds_up():
    both = threading.Barrier(2)

    def held() -> None:
        x = torch.ones(SIZE)
        both.wait()
        del x

    def body() -> None:
        threads = [threading.Thread(target=held) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert measured(body).others_bytes == pytest.approx(8 * SIZE, abs=64)


def test_what_a_thread_makes_and_the_recorded_one_frees_is_gone():
    made: queue.Queue[torch.Tensor] = queue.Queue()

    def body() -> None:
        for _ in range(4):
            in_thread(lambda: made.put(torch.ones(SIZE)))
            made.get().sum()

    assert measured(body).others_bytes == 4 * SIZE


def test_what_a_thread_holds_for_a_while_passes_no_limit_in_silence():
    result = measured(lambda: in_thread(doubled))
    (finding,) = judge_limits(result, {"total": HELD})
    assert finding.kind is FindingKind.UNSEEN
    assert "another thread or another allocator made 512.0 KiB unseen" in finding.sentence
    assert (
        judge_limits(result, {"total": 2 * HELD, "temporary": 2 * HELD, "retained": 1 << 10}) == ()
    )
    # Of which category it was nobody knows.
    (finding,) = judge_limits(result, {"temporary": HELD - 1})
    assert finding.kind is FindingKind.UNSEEN


def test_what_a_thread_holds_counts_in_the_region_in_which_it_does():
    measurement = BodyMeasurement("cpu")
    measurement.start()
    regions = []
    for work in (doubled, lambda: torch.ones(SIZE), int):
        with measurement.region("one") as region:
            torch.ones(16)
            in_thread(work)
        regions.append(region)
    measurement.stop()
    held = [region.result.others_bytes for region in regions]
    assert held == pytest.approx([HELD, 4 * SIZE, 0], abs=64)


def test_a_thread_in_the_middle_of_its_work_is_told():
    ready, go_on = threading.Event(), threading.Event()
    after: list[object] = []

    def work() -> None:
        x = torch.ones(SIZE)
        ready.set()
        while not go_on.is_set():
            x = x + 1
            time.sleep(1e-3)
        after.append(sys.getprofile())

    def body() -> None:
        thread = threading.Thread(target=work, name="loader")
        thread.start()
        KEPT_THREADS.append(thread)
        ready.wait()

    result = measured(body)
    go_on.set()
    KEPT_THREADS.pop().join()
    told = "memory of other threads is not in the figures: loader ran torch"
    assert told in result.blind_spots
    assert after == [None]


def test_a_thread_that_waits_for_more_work_is_counted():
    tasks: queue.Queue[Callable[[], object] | None] = queue.Queue()

    def work() -> None:
        while task := tasks.get():
            task()
            tasks.task_done()

    def body() -> None:
        thread = threading.Thread(target=work, name="loader", daemon=True)
        thread.start()
        KEPT_THREADS.append(thread)
        for _ in range(2):
            tasks.put(doubled)
            tasks.join()

    result = measured(body)
    tasks.put(None)
    KEPT_THREADS.pop().join()
    assert HELD <= result.others_bytes <= HELD + 64
    assert "are not in the figures: loader" in result.blind_spots[0]


def test_a_pool_of_the_body_is_counted():
    def body() -> None:
        with ThreadPool(1) as pool:
            pool.map(lambda _: doubled(), range(3))
        with ThreadPoolExecutor(1) as executor:
            list(executor.map(lambda _: doubled(), range(3)))

    result = measured(body)
    assert HELD <= result.others_bytes <= HELD + 64


def test_a_thread_that_profiles_itself_loses_the_measurement_and_nothing_else():
    profiled: list[int] = []

    def profile() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            torch.ones(16)
        profiled.append(len(seen.events()))

    def body() -> None:
        in_thread(profile)
        torch.ones(SIZE)

    with pytest.raises(RecordingError, match="another thread of the test body ran"):
        measured(body)
    assert profiled
    assert measured(lambda: torch.ones(SIZE)).peak.total >= 4 * SIZE


def test_a_thread_without_torch_is_nobodys_business():
    assert measured(lambda: in_thread(lambda: sum(map(int, range(1000))))).blind_spots == ()


def test_a_body_without_operators_is_no_other_thread():
    """Making an object calls ``__new__`` of its type, and torch's functions are of a type, too."""
    with ThreadPool(1) as pool:
        pool.apply(int)
        measurement = BodyMeasurement("cpu")
        measurement.start()
        tuple.__new__(tuple)
        assert measurement.stop().blind_spots == ()


def test_a_pool_of_other_makers_that_was_there_before_is_noticed():
    with ThreadPool(1) as pool:
        pool.apply(int)
        spots = measured(lambda: pool.apply(doubled)).blind_spots
    assert spots == (
        "memory of other threads is not in the figures: one from before the body ran torch",
    )


def test_an_executor_that_was_there_before_is_counted():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        used, held = measured(lambda: pool.submit(torch.ones, SIZE).result().sum()).blind_spots
        assert "another thread made it" in used
        assert held == (
            "other threads held 256.0 KiB that are not in the figures: ThreadPoolExecutor"
        )
        assert measured(lambda: pool.submit(sum, range(9)).result()).blind_spots == ()


def test_reading_regions_one_after_the_other_is_no_other_thread():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        measurement = BodyMeasurement("cpu")
        measurement.start()
        regions = []
        for name in ("one", "two"):
            with measurement.region(name) as region:
                torch.ones(SIZE)
            regions.append(region)
        assert [region.peak.total for region in regions] == [4 * SIZE] * 2
        assert measurement.stop().blind_spots == ()


def test_what_another_thread_made_and_left_alive_is_counted_as_unexplained():
    result = measured(lambda: in_thread(lambda: KEPT.append(torch.ones(SIZE))))
    assert result.unexplained_bytes == 4 * SIZE
    assert any("256.0 KiB that are alive at the end" in spot for spot in result.blind_spots)


def test_memory_of_another_allocator_is_not_in_the_footprint_and_is_named():
    def body() -> None:
        for n in range(1, 20):
            torch.from_numpy(np.ones(n * SIZE, np.float32)).sum()

    result = measured(body)
    assert result.peak.total < 4 * SIZE
    (spot,) = result.blind_spots
    assert "another allocator (such as numpy's)" in spot


def test_what_a_compiler_traces_with_is_no_memory():
    x = torch.ones(64, 8)

    def body() -> None:
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(x)

    assert measured(body).blind_spots == ()


def test_memory_of_another_allocator_that_was_there_before_is_in_the_footprint():
    tensor = torch.from_numpy(np.ones(SIZE, np.float32))
    result = measured(tensor.sum)
    assert result.peak.total >= 4 * SIZE
    assert result.blind_spots == ()


def test_the_number_in_a_threads_name_is_left_out():
    def body() -> None:
        thread = threading.Thread(target=lambda: torch.ones(SIZE).sum())
        thread.start()
        thread.join()

    (spot,) = measured(body).blind_spots
    assert spot.endswith(": Thread (<lambda>)")


def test_shared_memory_reconciles():
    def body() -> None:
        KEPT.append(torch.ones(SIZE).share_memory_())
        torch.ones(SIZE)

    assert measured(body).unexplained_bytes == 0


def test_what_a_thread_left_and_what_comes_after_it_is_counted_once():
    def body() -> None:
        in_thread(lambda: KEPT.append(torch.ones(SIZE)))
        torch.ones(SIZE)

    result = measured(body)
    assert (result.unexplained_bytes, result.others_bytes) == (4 * SIZE, 4 * SIZE)


def test_what_was_there_before_is_explained():
    KEPT.append(torch.ones(SIZE))
    assert measured(KEPT[0].sum).unexplained_bytes == 0


def test_a_profiler_of_threads_is_left_in_place():
    seen: list[str] = []

    def profile(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    threading.setprofile(profile)
    try:
        measured(lambda: in_thread(lambda: torch.ones(4)))
        assert threading.getprofile() is profile
    finally:
        threading.setprofile(None)
    assert seen


def test_nothing_is_left_behind():
    inside: list[object] = []
    measured(lambda: in_thread(lambda: inside.append(torch.ones(4)) or sys.getprofile()))
    assert threading.getprofile() is None
    assert sys.getprofile() is None


def test_what_another_thread_leaves_passes_no_limit_in_silence() -> None:
    kept: list[torch.Tensor] = []

    def body() -> None:
        torch.empty(8)
        other = threading.Thread(target=lambda: kept.append(torch.empty(1 << 20)))
        other.start()
        other.join()

    result = measured(body)
    assert result.unexplained_bytes == 4 << 20
    (finding,) = judge_limits(result, {"retained": 1 << 20})
    assert finding.kind is FindingKind.UNSEEN
    assert (
        "cannot be judged: another thread or another allocator made 4.0 MiB unseen"
        in finding.sentence
    )
    assert judge_limits(result, {"retained": 4 << 20}) == ()
    assert judge_limits(result, {"activation": 1 << 20, "total": 8 << 20})[0].key == "activation"


def test_what_torchs_own_threads_make_is_counted() -> None:
    """A thread of torch's works with the state of the one that asked it, the profiler included."""

    @torch.jit.script
    def made(size: int) -> torch.Tensor:
        return torch.ones(size) * 2

    def body() -> None:
        KEPT.append(torch.jit.wait(torch.jit.fork(made, SIZE)))

    body()
    KEPT.clear()
    result = measured(body)
    assert result.retained.total == 4 * SIZE
    assert result.peak.total >= 2 * 4 * SIZE
    assert result.unexplained_bytes == 0


def test_what_a_pool_of_before_leaves_passes_no_limit_in_silence() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        result = measured(lambda: KEPT.append(pool.submit(torch.empty, SIZE).result()))
    assert result.unexplained_bytes == 4 * SIZE
    findings = judge_limits(result, {"retained": 2 * SIZE, "total": 2 * SIZE})
    assert {finding.kind for finding in findings} == {FindingKind.UNSEEN}


RUNS_TORCH = {
    "operators": lambda: len(KEPT[0] + 1),
    "an_index": lambda: len(KEPT[0][KEPT[0] < 2]),
    "a_constructor": lambda: torch.FloatTensor(SIZE),
    "an_operator_by_name": lambda: torch.ops.aten.exp(KEPT[0]),
    "after_many_calls": lambda: [abs(n) for n in range(30_000)] and KEPT[0] + 1,
}


@pytest.mark.parametrize("work", RUNS_TORCH.values(), ids=RUNS_TORCH)
def test_what_a_thread_holds_without_a_call_of_torchs_functions_is_counted(
    work: Callable[[], object],
) -> None:
    KEPT.append(torch.ones(SIZE))
    assert measured(lambda: in_thread(work)).others_bytes >= 4 * SIZE


def test_a_thread_that_threading_does_not_know_is_counted() -> None:
    def body() -> None:
        done = _thread.allocate_lock()
        done.acquire()

        def work() -> None:
            doubled()
            done.release()

        _thread.start_new_thread(work, ())
        done.acquire()

    known = threading.enumerate()
    result = measured(body)
    assert threading.enumerate() == known
    assert any("a thread without a name" in spot for spot in result.blind_spots)


def test_a_thread_that_threading_does_not_know_has_no_profile_function_and_fails_as_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[object] = []
    over = _thread.allocate_lock()
    over.acquire()

    def failing() -> None:
        seen.append(sys.getprofile())
        raise ValueError("as ever")

    def body() -> None:
        _thread.start_new_thread(failing, ())
        assert over.acquire(timeout=60)

    def hook(failed: sys.UnraisableHookArgs) -> None:
        seen.extend((repr(failed.object), str(failed.exc_value)))
        over.release()

    monkeypatch.setattr(sys, "unraisablehook", hook)
    threading.setprofile(lambda *_: seen.append("profiled"))
    try:
        body()
        measured(body)
    finally:
        threading.setprofile(None)
    assert seen == [None, repr(failing), "as ever"] * 2


def test_arguments_that_start_no_thread_raise_as_ever() -> None:
    def errors() -> list[str]:
        found = []
        for wrong in ((), (1,), (print,), (1, ()), (print, []), (print, (), 1)):
            with pytest.raises(TypeError) as error:
                _thread.start_new_thread(*wrong)
            found.append(str(error.value))
        return found

    within: list[str] = []
    measured(lambda: within.extend(errors()))
    assert within == errors()


def test_a_thread_with_the_users_own_profile_function_is_counted() -> None:
    seen: list[object] = []
    KEPT.append(torch.ones(SIZE))

    def note(frame: object, event: str, argument: object) -> None:
        seen.append(event)

    threading.setprofile(note)
    try:
        result = measured(
            lambda: in_thread(lambda: [seen.append(sys.getprofile()), KEPT[0] + 1][1])
        )
        assert threading.getprofile() is note
    finally:
        threading.setprofile(None)
    assert result.others_bytes >= 4 * SIZE
    assert note in seen
    assert "return" in seen


def test_a_thread_that_is_not_followed_to_its_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_PATIENCE", 50)

    def work() -> int:
        return sum(abs(n) for n in range(1000))

    (spot,) = measured(lambda: in_thread(work)).blind_spots
    assert "may be missing from the figures: loader made too many calls to be followed" in spot


def by_a_name_from_before(work: Callable[[], object]) -> None:
    over = _thread.allocate_lock()
    over.acquire()
    start_new_thread(lambda: (work(), over.release()), ())
    over.acquire()


def by_a_library_in_c(work: Callable[[], object]) -> None:
    libc = ctypes.CDLL(None)
    libc.pthread_join.argtypes = (ctypes.c_ulong, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def run(_: object) -> None:
        work()

    thread = ctypes.c_ulong()
    assert libc.pthread_create(ctypes.byref(thread), None, run, None) == 0
    libc.pthread_join(thread, None)


STARTERS = (
    by_a_name_from_before,
    pytest.param(
        by_a_library_in_c,
        marks=pytest.mark.skipif(sys.platform != "linux", reason="pthreads of the C library"),
    ),
)


@pytest.mark.parametrize("start", STARTERS)
def test_a_thread_that_nobody_knows_is_noticed(start: Callable[[Callable[[], object]], None]):
    assert measured(int).blind_spots == ()
    (spot,) = measured(lambda: start(doubled)).blind_spots
    assert "may be missing from the figures: a thread that Python's `threading` did" in spot


@pytest.mark.skipif(sys.platform != "linux", reason="pthreads of the C library")
def test_threads_of_a_process_group_may_call_python(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "_name_of_task", lambda _: b"pt_gloo_runloop")
    assert measured(lambda: by_a_library_in_c(doubled)).blind_spots == ()


def test_threads_that_are_known_are_no_unknown_ones():
    def body() -> None:
        in_thread(int)
        _thread.start_new_thread(int, ())
        with ThreadPoolExecutor(2) as executor, ThreadPool(2) as pool:
            executor.submit(in_thread, int).result()
            pool.map(int, range(4))
        timer = threading.Timer(60, int)
        timer.start()
        timer.cancel()
        torch.ones(1 << 20).sum()  # torch's threads for parts of an operator

    measurement = BodyMeasurement("cpu")
    measurement.start()
    with measurement.region("one") as region:
        body()
    assert region.result.blind_spots == measurement.stop().blind_spots == ()


@contextmanager
def worker_of_before() -> Iterator[Callable[[Callable[[], object]], None]]:
    """A thread that is there already, and does what it is given."""
    given: queue.Queue[Callable[[], object] | None] = queue.Queue()
    done: queue.Queue[None] = queue.Queue()

    def work() -> None:
        while (task := given.get()) is not None:
            task()
            del task
            done.put(None)

    def does(task: Callable[[], object]) -> None:
        given.put(task)
        del task
        done.get()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield does
    finally:
        given.put(None)
        thread.join()


def test_what_a_thread_of_before_holds_passes_no_limit_in_silence():
    with worker_of_before() as does:

        def body() -> None:
            does(lambda: KEPT.append(torch.ones(SIZE)))
            torch.ones(16)
            does(KEPT.clear)
            torch.ones(16)

        result = measured(body)
    assert result.others_bytes == 4 * SIZE
    (finding,) = judge_limits(result, {"total": 2 * SIZE})
    assert finding.kind is FindingKind.UNSEEN
    assert judge_limits(result, {"total": 8 * SIZE, "retained": 0}) == ()


def test_what_was_made_before_and_another_thread_frees_is_nobodys_memory():
    with worker_of_before() as does:
        KEPT.append(torch.ones(SIZE))

        def body() -> None:
            torch.ones(16)
            does(KEPT.clear)
            torch.ones(16)

        assert measured(body).others_bytes == 0


IN_C = """
#include <pthread.h>
#include <stdint.h>
typedef int (*make_t)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
static make_t make;
static int64_t size;
static void* made;
static void* run(void* nothing) {
    int64_t step = 1;
    make(1, &size, &step, 0, 0, 0, &made);
    return nothing;
}
void* in_thread(make_t torchs, int64_t bytes) {
    pthread_t thread;
    make = torchs;
    size = bytes;
    pthread_create(&thread, 0, run, 0);
    pthread_join(thread, 0);
    return made;
}
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("gcc"), reason="needs Linux and gcc"
)
def test_a_thread_in_c_that_never_calls_python_is_counted(tmp_path: Path) -> None:
    source, library = tmp_path / "thread.c", tmp_path / "thread.so"
    source.write_text(IN_C)
    subprocess.run(["gcc", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    in_c = ctypes.CDLL(str(library)).in_thread
    in_c.argtypes, in_c.restype = (ctypes.c_void_p, ctypes.c_int64), ctypes.c_void_p
    shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    make = ctypes.cast(shim.aoti_torch_empty_strided, ctypes.c_void_p)
    gone = shim.aoti_torch_delete_tensor_object
    gone.argtypes = (ctypes.c_void_p,)

    def body() -> None:
        made = in_c(make, 4 * SIZE)
        torch.ones(16)
        gone(made)
        torch.ones(16)

    result = measured(body)
    assert result.others_bytes == 4 * SIZE
    assert result.blind_spots[-1] == (
        "other threads held 256.0 KiB that are not in the figures: threads that nobody follows"
    )
    (finding,) = judge_limits(result, {"total": 2 * SIZE})
    assert finding.kind is FindingKind.UNSEEN


def test_threads_that_share_an_operators_work_are_no_others() -> None:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        x = torch.randn(4, 8, 512, 64, dtype=torch.bfloat16)
        attention = torch.nn.functional.scaled_dot_product_attention
        assert measured(lambda: attention(x, x, x)).blind_spots == ()
    finally:
        torch.set_num_threads(threads_before)


def test_totals_are_left_alone_where_torch_would_print_each_allocation() -> None:
    code = (
        "import pytest_torchmem, torch\n"
        "with pytest_torchmem.measure('a', device='cpu') as a: torch.ones(16)\n"
        "print(a.result.peak.total)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["64"]
    assert "C10 alloc" not in run.stderr
