"""The functions of Python that the library sees, beside those that the interpreter names."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count
from types import FrameType

import pytest
import torch
from torch import nn

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import RowReader, resolved
from pytest_torchmem.values.trace import EventKind

pytestmark = pytest.mark.slow

Call = tuple[str, str, int]
"""A function, its file, and the line on which it is."""


@dataclass(frozen=True, slots=True)
class Stacks:
    """Notes a mark and, beside it, what `sys._getframe` says."""

    mark: Callable[[int], int]
    expected: dict[int, list[Call]] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def look(self) -> None:
        number, frame = next(self.numbers), sys._getframe()
        row, line = self.mark(number), frame.f_lineno
        assert row >= 0
        self.expected[number] = calls(frame, line)


def calls(frame: FrameType | None, line: int | None) -> list[Call]:
    found = []
    while frame:
        code = frame.f_code
        found.append((code.co_name, resolved(code.co_filename), line or 0))
        frame = frame.f_back
        line = frame and frame.f_lineno
    return found[::-1]


def wrong(stacks: Stacks, columns: RowReader) -> list[tuple[list[Call], list[Call]]]:
    """What the library has noted otherwise, beside what is right."""
    tables = columns.read()
    strings = columns.strings.values()
    events = tables.events
    kinds, parents, lines = (events[n].tolist() for n in ("kind", "parent", "line"))
    names, files = events["name"].tolist(), events["file"].tolist()
    found: dict[int, list[Call]] = {}
    for number, row in columns.placed.tolist():
        line, stack = lines[row], []
        while (row := parents[row]) >= 0:
            if kinds[row] == EventKind.PY_CALL:
                stack.append((strings[names[row]], strings[files[row]], line))
                line = lines[row]
        found[number] = stack[::-1]
    assert found.keys() == stacks.expected.keys()
    return [(found[n], right) for n, right in stacks.expected.items() if found[n] != right]


@pytest.fixture(scope="module")
def library() -> Library:
    choice = Choice.of_process()
    assert choice.library
    assert choice.has_stacks, choice.reasons
    return choice.library


@pytest.fixture(params=["with the GIL", "without"])
def stacks(library: Library, request: pytest.FixtureRequest) -> Iterator[Stacks]:
    """A recording; what it has noted otherwise at its end fails the test."""
    without: Callable[[int], int] = ctypes.CDLL(str(library.path)).torchmem_mark
    without.restype, without.argtypes = ctypes.c_int64, [ctypes.c_int64]  # type: ignore[attr-defined]
    made = Stacks(library.mark if request.param == "with the GIL" else without)
    columns = RowReader(library)
    with gc_paused():
        library.prepare()
        library.begin()
        try:
            yield made
        finally:
            library.end()
        try:
            assert made.expected
            assert wrong(made, columns)[:3] == []
        finally:
            library.let_go()


def recursive(stacks: Stacks, depth: int) -> None:
    if depth:
        recursive(stacks, depth - 1)
    stacks.look()
    stacks.look()


def test_recursion(stacks: Stacks) -> None:
    for depth in (0, 1, 60, 3, 200):
        recursive(stacks, depth)


def test_a_function_is_on_another_line_each_time(stacks: Stacks) -> None:
    stacks.look()
    for _ in range(3):
        stacks.look(), stacks.look()
        stacks.look()
        recursive(
            stacks,
            1,
        )
    [stacks.look() for _ in range(2)]
    sorted([1, 2], key=lambda _: stacks.look() or 0)
    eval("stacks.look()")
    exec(compile("\n\nstacks.look()\n", "<strïng>", "exec"))


def test_generators(stacks: Stacks) -> None:
    def numbers(depth: int) -> Generator[int, None, None]:
        stacks.look()
        yield 1
        if depth:
            yield from numbers(depth - 1)
        stacks.look()
        yield 2

    half = numbers(3)
    next(half)
    stacks.look()
    next(half)
    list(numbers(2))
    list(half)  # resumed elsewhere than it was begun
    half = numbers(0)
    next(half)
    half.close()
    list(map(lambda _: stacks.look(), numbers(1)))  # noqa: C417 - map calls from C


def test_coroutines(stacks: Stacks) -> None:
    class Waits:
        def __await__(self) -> Generator[None, None, None]:
            stacks.look()
            yield
            stacks.look()

    async def inner() -> None:
        stacks.look()
        await Waits()
        stacks.look()

    async def outer() -> None:
        await inner()
        stacks.look()

    async def items() -> AsyncIterator[int]:
        stacks.look()
        yield 1
        await Waits()

    async def all_items() -> None:
        async for _ in items():
            stacks.look()

    begun = [outer(), outer(), all_items()]
    while begun:
        for coroutine in list(begun):
            try:
                coroutine.send(None)
            except StopIteration:
                begun.remove(coroutine)


def test_properties_and_methods_that_python_calls_itself(stacks: Stacks) -> None:
    class Odd:
        @property
        def seen(self) -> None:
            stacks.look()

        def __getattr__(self, name: str) -> None:
            stacks.look()

        def __add__(self, other: object) -> None:
            stacks.look()

        def __del__(self) -> None:
            stacks.look()

        def __enter__(self) -> None:
            stacks.look()

        def __exit__(self, *_: object) -> None:
            stacks.look()

        def __init_subclass__(cls) -> None:
            stacks.look()

    odd = Odd()
    _ = odd.seen, odd.unseen, odd + 1
    with odd:
        stacks.look()
    del odd
    type("More", (Odd,), {})
    cycle = [Odd()]
    cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    gc.collect()


def test_exceptions(stacks: Stacks) -> None:
    def fails(depth: int) -> None:
        try:
            if depth:
                fails(depth - 1)
            raise ValueError("deep")
        finally:
            stacks.look()

    with pytest.raises(ValueError, match="deep"):
        fails(4)
    stacks.look()
    try:
        fails(1)
    except ValueError:
        stacks.look()


def test_names_that_are_not_ascii(stacks: Stacks) -> None:
    for name, file in (("naïve", "ünd.py"), ("日本", "<日本>"), ("𐐷", "<𝄞>"), ("Ж", "Ж" * 300)):
        source = f"def {name}(): stacks.look()\n{name}()"
        exec(compile(source, file, "exec"), {"stacks": stacks})


def test_code_whose_address_is_used_again(stacks: Stacks) -> None:
    for number in range(3000):
        lines, name, file = "\n" * (number % 50), f"g{number % 7}", f"<c{number % 3}>"
        source = f"{lines}def {name}(): return stacks.look()\n{name}()"
        exec(compile(source, file, "exec"), {"stacks": stacks})


def test_threads(stacks: Stacks) -> None:
    threads = [threading.Thread(target=recursive, args=(stacks, depth)) for depth in range(8)]
    for thread in threads:
        thread.start()
        thread.join()
    stacks.look()


def test_others_look_at_the_frames_meanwhile(library: Library) -> None:
    """At this interval threads take turns within nearly each line; reading locals writes some."""
    ended = threading.Event()

    def read_all() -> None:
        while not ended.is_set():
            for frame in sys._current_frames().values():
                inner: FrameType | None = frame
                while inner:
                    _ = inner.f_locals, inner.f_lineno
                    inner = inner.f_back

    def work() -> None:
        for number in range(300):
            recursive(noted, number % 30)

    noted, columns, interval = Stacks(library.mark), RowReader(library), sys.getswitchinterval()
    readers = [threading.Thread(target=read_all) for _ in range(2)]
    workers = [threading.Thread(target=work) for _ in range(3)]
    # CPython makes a frame object of a frame that may be gone by then: where a collection begins
    # meanwhile, other threads run.
    with gc_paused():
        library.prepare()
        library.begin()
        sys.setswitchinterval(1e-6)
        try:
            for thread in (*readers, *workers):
                thread.start()
            for thread in workers:
                thread.join()
        finally:
            sys.setswitchinterval(interval)
            ended.set()
            library.end()
            for thread in readers:
                thread.join()
    try:
        assert len(noted.expected) == 3 * sum(2 * (n % 30 + 1) for n in range(300))
        assert wrong(noted, columns)[:3] == []
    finally:
        library.let_go()


def test_modules_are_seen_where_they_are_called(library: Library) -> None:
    """The rows of a module have its address, and its class for a name."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            library.mark(0)
            return x + x

    model, columns = nn.Sequential(nn.Identity(), Twice()), RowReader(library)
    library.prepare()
    library.begin()
    model(torch.ones(1))
    library.end()
    tables = columns.read()
    library.let_go()
    strings = columns.strings.values()
    addresses = dict(
        zip(*(tables.module_calls[n].tolist() for n in ("event", "module")), strict=True)
    )
    ((_, row),) = columns.placed.tolist()
    around = []
    while (row := int(tables.events["parent"][row])) >= 0:
        if row in addresses:
            around.append((strings[int(tables.events["name"][row])], addresses[row]))
    assert around == [
        ("nn.Module: Twice", id(model[1])),
        ("nn.Module: Sequential", id(model)),
    ]


def test_a_wrong_stack_would_be_noticed(library: Library) -> None:
    stacks, columns = Stacks(library.mark), RowReader(library)
    library.prepare()
    library.begin()
    recursive(stacks, 2)
    library.end()
    name, file, line = stacks.expected[1][-2]
    stacks.expected[1][-2] = (name, file, line + 1)
    assert len(wrong(stacks, columns)) == 1
    library.let_go()
