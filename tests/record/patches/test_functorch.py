"""Transforms of ``torch.func``: recording them keeps nothing alive, and still tells what ran."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch._functorch import eager_transforms, vmap
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp
from torch.overrides import TorchFunctionMode
from torch.profiler import record_function

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.functorch import FunctorchWatch
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import MarkKind
from tests.measured import measured

SIZE = 1 << 16
MEGABYTE = 4 * SIZE
# Some releases do not say what a node keeps without unpacking it.
KEPT_IS_TOLD = hasattr(torch._C._autograd.SavedTensor, "data")


def plain_peak(body: Callable[[], object]) -> int:
    """The peak of what the body makes, with nothing recorded but allocations and frees."""
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profiler:
        body()
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    sizes = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size_bytes in sorted(sizes, key=lambda pair: pair[0]):
        live += size_bytes
        peak = max(peak, live)
    return peak


def energy(x: torch.Tensor) -> torch.Tensor:
    waves = x.sin()
    return (waves * x).sum()


def often() -> None:
    x = torch.ones(SIZE)
    for _ in range(10):
        grad(energy)(x)


def gradients_in_a_batch() -> None:
    y = x = torch.ones(64, requires_grad=True)
    for _ in range(6):
        y = y.sin() * 2
    torch.autograd.grad(y, x, torch.eye(64), is_grads_batched=True)


BODIES: dict[str, Callable[[], object]] = {
    "grad": often,
    "grad of grad": lambda: grad(lambda x: grad(energy)(x).sum())(torch.ones(SIZE)),
    "vmap": lambda: torch.vmap(lambda row: row.exp() + 1)(torch.ones(64, 1024)),
    "vmap of grad": lambda: torch.vmap(grad(energy))(torch.ones(64, 1024)),
    "vmap in chunks": lambda: torch.vmap(torch.sin, chunk_size=16)(torch.ones(64, 1024)),
    "jacrev": lambda: jacrev(torch.sin)(torch.ones(64)),
    "jacfwd": lambda: jacfwd(torch.sin)(torch.ones(64)),
    "hessian": lambda: hessian(energy)(torch.ones(64)),
    "jvp": lambda: jvp(torch.sin, (torch.ones(SIZE),), (torch.ones(SIZE),)),
    "gradients in a batch": gradients_in_a_batch,
    "hessian of autograd": lambda: torch.autograd.functional.hessian(
        energy, torch.ones(64), vectorize=True
    ),
    "functionalize": lambda: functionalize(lambda x: x.clone().add_(1))(torch.ones(SIZE)),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_recording_keeps_nothing_alive(body):
    body()
    assert measured(body).peak.total == plain_peak(body)


def test_ten_gradients_need_no_more_than_one():
    x = torch.ones(SIZE)
    one = measured(lambda: grad(energy)(x)).peak.total

    def ten() -> None:
        for _ in range(10):
            grad(energy)(x)

    assert measured(ten).peak.total == one


def test_results_are_the_same_to_the_bit():
    x = torch.randn(64, 16)
    torch.manual_seed(3)
    expected = torch.vmap(grad(energy))(x), hessian(energy)(x[0])
    got: list[torch.Tensor] = []
    measured(lambda: got.extend((torch.vmap(grad(energy))(x), hessian(energy)(x[0]))))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_was_there_before_and_is_used_counts():
    x, scale, unused = torch.ones(SIZE), torch.ones(SIZE), torch.ones(SIZE)
    result = measured(lambda: torch.vmap(lambda row: row * 2)(x.view(64, -1)) + scale[0])
    assert result.peak.at_peak.input == 2 * MEGABYTE
    closed_over = measured(lambda: torch.vmap(lambda row: row + scale.sum())(x.view(64, -1)))
    assert closed_over.peak.by_category.input == 2 * MEGABYTE
    del unused


def test_operators_and_lines_are_known_within_a_transform():
    x = torch.ones(64, 1024)
    (made,) = [
        contributor
        for contributor in measured(lambda: torch.vmap(lambda row: row.exp())(x)).peak.live
        if contributor.operator
    ]
    assert made.operator == "aten::exp"
    assert made.source is not None
    assert made.source.file == __file__
    assert made.source.function == "<lambda>"


@pytest.mark.parametrize("transform", [grad, lambda f: torch.vmap(grad(f)), jacrev, hessian])
def test_what_a_backward_pass_within_a_transform_makes_has_a_nodes_name(transform):
    """No operator is observed there; autograd's nodes say what they do by their names."""
    x = torch.ones(8, 64)
    kept: list[object] = []
    result = measured(lambda: kept.append(transform(lambda row: (row.sin() * row).sum())(x)))
    backward = [
        c for c in (*result.peak.live, *result.retained.live) if c.phase.value == "backward"
    ]
    # What the pass begins with was made before any node was reached.
    unnamed = [c for c in backward if not c.operator]
    assert len(unnamed) <= 1
    assert sum(c.size_bytes for c in unnamed) <= 8 * 4
    assert {c.operator for c in backward} & {"MulBackward0", "SinBackward0", "SumBackward0"}


def test_operators_after_a_transform_are_observed_again():
    x = torch.ones(SIZE)

    def body() -> None:
        grad(energy)(x)
        torch.cat([x] * 8)

    assert any(c.operator == "aten::cat" for c in measured(body).peak.live)


def test_an_exception_within_a_transform_comes_out_and_restores():
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the body")

    names = [vars(m)[n] for m, n in ((eager_transforms, "_grad_increment_nesting"),)]
    with pytest.raises(ValueError, match="of the body"):
        measured(lambda: grad(failing)(torch.ones(4)))
    assert [eager_transforms._grad_increment_nesting] == names
    assert any(c.operator for c in measured(lambda: torch.ones(SIZE).exp()).peak.live)


def test_torchs_functions_are_its_own_again_afterwards():
    before = (eager_transforms._grad_increment_nesting, vmap._vmap_decrement_nesting)
    inside: list[object] = []
    measured(lambda: inside.append(eager_transforms._grad_increment_nesting))
    assert (eager_transforms._grad_increment_nesting, vmap._vmap_decrement_nesting) == before
    assert inside != [before[0]]


def test_annotations_may_be_open_around_and_within():
    x = torch.ones(SIZE)

    def within(x: torch.Tensor) -> torch.Tensor:
        with record_function("inner"):
            return energy(x)

    def body() -> None:
        with record_function("outer"):
            grad(within)(x)

    assert measured(body).peak.total == measured(lambda: grad(energy)(x)).peak.total


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_a_function_mode_of_the_users_sees_what_it_would_see_alone():
    x = torch.ones(64)

    def body(mode: Counting) -> None:
        with mode:
            torch.vmap(lambda value: value.sin() + 1)(x)

    alone, recorded = Counting(), Counting()
    body(alone)
    measured(lambda: body(recorded))
    assert recorded.names == alone.names


def test_a_pullback_may_be_called_later():
    x = torch.ones(SIZE)

    def body() -> None:
        _, pullback = vjp(energy, x)  # type: ignore[misc]
        pullback(torch.ones(()))

    body()
    assert measured(body).peak.by_category.input <= 2 * MEGABYTE


def product(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (weight * x).sin().sum()


def with_noise(weight: torch.Tensor) -> torch.Tensor:
    return product(weight, torch.randn(SIZE))


def leaf() -> torch.Tensor:
    return torch.randn(SIZE, requires_grad=True)


# What runs in a transform, and what autograd alone would run.
ALIKE: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "closed over": (
        lambda: grad(partial(product, x=torch.randn(SIZE)))(torch.randn(SIZE)),
        lambda: torch.autograd.grad(product(w := leaf(), torch.randn(SIZE)), w),
    ),
    "argument": (
        lambda: grad(product)(torch.randn(SIZE), torch.randn(SIZE)),
        lambda: torch.autograd.grad(product(w := leaf(), torch.randn(SIZE)), w),
    ),
    "made within": (
        lambda: grad(with_noise)(torch.randn(SIZE)),
        lambda: torch.autograd.grad(with_noise(w := leaf()), w),
    ),
    "written to": (
        lambda: torch.vmap(lambda row: torch.zeros(SIZE // 64).add_(3).mul(row))(
            torch.randn(64, SIZE // 64)
        ),
        lambda: torch.zeros(SIZE // 64).add_(3).mul(torch.randn(64, SIZE // 64)),
    ),
    "vmap": (
        lambda: torch.vmap(lambda row: row.exp() * 2)(torch.randn(64, SIZE // 64)),
        lambda: torch.randn(64, SIZE // 64).exp() * 2,
    ),
}


@pytest.mark.parametrize(("transformed", "plain"), ALIKE.values(), ids=ALIKE.keys())
def test_labels_are_those_of_the_same_body_without_a_transform(transformed, plain):
    expected, got = measured(plain), measured(transformed)
    assert expected.peak.by_category.input
    # A number that is made a tensor may be kept by one of the two.
    for category, size_bytes in expected.peak.by_category.items():
        # Elsewhere it is an operator of the backward pass that tells, which is not observed here.
        if KEPT_IS_TOLD or category not in (Category.ACTIVATION, Category.TEMPORARY):
            assert got.peak.by_category[category] == pytest.approx(size_bytes, abs=64), category


def into_zeros(row: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(row).copy_(row.exp()) + 1


def test_what_a_model_writes_its_results_to_is_no_input():
    def body() -> None:
        torch.vmap(into_zeros)(torch.randn(64, 1024))

    assert measured(body).peak.by_category.input == MEGABYTE


def test_a_gradient_that_only_the_input_gets_is_on_its_way_there():
    """Its last step is the sum of two, and no node is handed either of them."""
    got = measured(lambda: grad(energy)(torch.randn(SIZE))).peak.by_category
    assert got.autograd_detail == pytest.approx(3 * MEGABYTE, abs=64)


def test_what_is_used_again_in_a_later_region_counts_there():
    x = torch.ones(64, 1024)
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    torch.vmap(torch.sin)(x)
    begin = recorder.mark(MarkKind.REGION_BEGIN, "again")
    torch.vmap(torch.cos)(x)
    trace = recorder.stop()
    (stop,) = np.flatnonzero(trace.marks["kind"] == MarkKind.STOP).tolist()
    assert analyze_trace(trace).region(begin, stop).peak.by_category.input == MEGABYTE


@pytest.mark.parametrize(
    "call",
    [
        lambda row: torch.nn.functional.relu(row, inplace=True),
        lambda row: row.relu_(),
        lambda row: torch.mul(row, 2, out=row),
    ],
    ids=["inplace=True", "name", "out"],
)
def test_what_a_call_writes_to_is_not_among_what_it_reads(call):
    calls: list[tuple[int, int]] = []

    def note(read: list[torch.Tensor], written: list[torch.Tensor]) -> int:
        calls.append((len(read), len(written)))
        return 0

    patches = Installed()
    watch = FunctorchWatch(note)
    watch.install(patches)
    watch.install_hooks(patches)
    try:
        functionalize(call)(torch.ones(4))
    finally:
        patches.remove()
    assert calls[0] == (int("mul" in call.__code__.co_names), 1)


@pytest.mark.parametrize("transform", [grad, torch.vmap])
def test_the_profiler_records_little_of_what_notes_an_operator(
    transform: Callable[[Callable[..., object]], Callable[..., object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(Recorder, "_foresee", lambda self, seconds, count: counts.append(count))

    def event_count(operator_count: int) -> int:
        def add(x: torch.Tensor) -> torch.Tensor:
            for _ in range(operator_count):
                x = x + 1
            return x.sum()

        counts.clear()
        measured(lambda: transform(add)(torch.ones(2, 2)))
        return sum(counts)

    event_count(1)
    # Six are allocations and frees; each takes 3 KiB at the end of the session.
    assert (event_count(120) - event_count(20)) / 100 < 30
