"""What the library notes beside calls of Python: names, ranges, pauses and threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.profiler import record_function

from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import MENTION, ROW
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import Trace
from tests.measured import measured, profile_of

pytestmark = pytest.mark.slow


@pytest.fixture
def library() -> Library:
    library = Choice.of_process().library
    assert library
    return library


def names_around(trace: Trace, name: str) -> Iterator[list[str]]:
    """Yield what was open around each operator of a name, innermost first."""
    names = [trace.strings[number] for number in trace.events["name"].tolist()]
    parents = trace.events["parent"].tolist()
    for row in (row for row, each in enumerate(names) if each == name):
        around = []
        while (row := parents[row]) >= 0:
            around.append(names[row])
        yield around


def trace_of(body: Callable[[], object]) -> Trace:
    return profile_of(body).tree.trace


# A name is known by its place, which the next node or range of the program has, too.


def test_each_node_of_a_graph_has_its_own_name() -> None:
    leaf = torch.ones(4, requires_grad=True)
    loss = leaf.exp().exp2().sin().sinh().sum()
    trace = trace_of(loss.backward)
    names = [trace.strings[number] for number in trace.events["name"].tolist()]
    evaluated = [name.rpartition(" ")[2] for name in names if "evaluate_function" in name]
    assert evaluated == [
        *("SumBackward0", "SinhBackward0", "SinBackward0", "Exp2Backward0", "ExpBackward0"),
        "torch::autograd::AccumulateGrad",
    ]


def test_each_range_has_its_own_name() -> None:
    written = ["load the batch", "load the bath", "load the bat", "load the batch"]

    def body() -> None:
        for name in written:
            with record_function(name):
                torch.ones(1)

    trace = trace_of(body)
    names = [trace.strings[number] for number in trace.events["name"].tolist()]
    assert [name for name in names if name.startswith("load")] == written


# --- what is open -----------------------------------------------------------------------------


def test_a_range_ends_and_the_one_around_it_goes_on() -> None:
    """As C++ has them: in Python a range ends, for what is within, with ``__enter__``."""
    functions = torch._C._get_operation_overload
    enter, _, _ = functions("profiler::_record_function_enter_new", "")
    leave, _, _ = functions("profiler::_record_function_exit", "_RecordFunction")

    def body() -> None:
        outer, inner = enter("outer", None), enter("inner", None)
        torch.ones(1)
        leave(inner)
        torch.zeros(1)
        leave(outer)
        torch.eye(1)

    trace = trace_of(body)
    around = {name: next(names_around(trace, f"aten::{name}")) for name in ("ones", "zeros", "eye")}
    assert {
        name: [each for each in names if each in ("outer", "inner")]
        for name, names in around.items()
    } == {"ones": ["inner", "outer"], "zeros": ["outer"], "eye": []}


@torch.library.custom_op("test_observer::calls", mutates_args=())
def calls(x: torch.Tensor) -> torch.Tensor:
    steps.pop(0)()
    return x.neg()


steps: list[Callable[[], object]] = []


def test_an_operator_goes_on_after_a_pause() -> None:
    recorder = Recorder(torch.device("cpu"))

    def pause() -> None:
        with recorder.paused():
            torch.ones(1)

    steps.append(pause)
    recorder.start()
    calls(torch.zeros(1))
    torch.arange(1)
    trace = recorder.stop()
    assert "test_observer::calls" in next(names_around(trace, "aten::neg"))
    assert "test_observer::calls" not in next(names_around(trace, "aten::arange"))
    assert not list(names_around(trace, "aten::ones"))


def test_an_operator_of_another_thread_may_end_in_a_pause() -> None:
    begun, paused, ended, goes_on = (threading.Event() for _ in range(4))

    def work() -> None:
        calls(torch.zeros(1))
        ended.set()
        goes_on.wait()
        torch.ones(1)

    steps.append(lambda: (begun.set(), paused.wait()))
    recorder, thread = Recorder(torch.device("cpu")), threading.Thread(target=work)
    recorder.start()
    thread.start()
    begun.wait()
    with recorder.paused():
        paused.set()
        ended.wait()
    goes_on.set()
    thread.join()
    trace = recorder.stop()
    (around,) = names_around(trace, "aten::ones")
    assert "test_observer::calls" not in around


def test_a_gradient_belongs_to_the_line_of_its_thread() -> None:
    """Each thread counts its operators by itself: a number alone names one of each."""

    def body() -> None:
        leaf = torch.ones(1000, requires_grad=True)
        made: list[torch.Tensor] = []
        other = threading.Thread(target=lambda: made.append(leaf.exp()))
        other.start()
        other.join()
        kept = leaf.sin()
        made.pop().sum().backward()
        del kept

    (gradient,) = [c for c in measured(body).peak.live if c.category is Category.GRADIENT]
    assert gradient.source is not None
    assert gradient.source.line == body.__code__.co_firstlineno + 3


# --- memory -----------------------------------------------------------------------------------


def test_what_a_recording_took_is_given_back(library: Library) -> None:
    library.prepare()
    library.begin()
    for number in range(3000):
        library.mark(number)
    library.end()

    def pieces() -> list[int]:
        ((rows, _), *_) = library.threads(ROW, MENTION)
        return [len(piece) for piece in rows]

    assert sum(pieces()) >= 3000
    library.let_go()
    assert sum(pieces()) == 0
    # A piece that is kept is there for the rows of the next recording.
    address = library._rows
    assert [bool(address(0, piece)) for piece in range(3)] == [True, False, False]
