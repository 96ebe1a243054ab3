"""Why a storage has its category: who decided, by what evidence, and which storages are told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.categories import CATEGORY_PASSES
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.trace import EventKind, Ownership, Scope
from tests.builders import TraceBuilder


def a_step() -> MemoryProfile:
    """A weight of 8 bytes, an activation of 32 in a module, scratch of 64, a gradient of 8."""
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.module(1, "Net"):
        with b.op("aten::mm", reads=[weight], sequence=0):
            kept = b.alloc(32)
        with b.op("aten::relu", reads=[kept], sequence=1):
            scratch = b.alloc(64)
    b.free(scratch)
    with b.backward():
        b.owner(kept, Ownership.SAVED)
        with b.node("MmBackward0"), b.op("aten::mm", reads=[kept]):
            gradient = b.alloc(8)
    b.owner(gradient, Ownership.GRADIENT)
    b.free(kept)
    return analyze_trace(b.build())


def test_each_storage_says_who_decided_and_by_what_evidence():
    told = [
        (e.storage.size_bytes, e.storage.category.value, e.decided_by, e.reason)
        for e in a_step().explain()
    ]
    assert told == [
        (8, "parameter", "parameters", "a module or an optimizer holds it as a parameter"),
        (32, "activation", "activations", "an autograd graph keeps it for backward"),
        (
            64,
            "temporary",
            "temporaries",
            "the body made it, and no graph, module or optimizer has it",
        ),
        (8, "gradient", "gradients", "it was found in a .grad"),
    ]


def test_a_storage_is_told_with_its_life_and_where_it_comes_from():
    weight, kept, scratch, gradient = a_step().explain()
    assert (weight.born_ns, weight.died_ns, gradient.died_ns) == (None, None, None)
    assert weight.number != kept.number
    assert kept.born_ns < scratch.born_ns < scratch.died_ns < gradient.born_ns < kept.died_ns  # type: ignore[operator]
    assert (kept.storage.operator, kept.storage.module) == ("aten::mm", "Net")
    assert (scratch.storage.phase, gradient.storage.phase) == (Phase.FORWARD, Phase.BACKWARD)


def test_what_nobody_could_tell_has_no_decision():
    b = TraceBuilder()
    b.existing(8)
    unclear = b.existing(16)
    with b.optimizer_step():
        b.read(unclear)
    (told,) = analyze_trace(b.build()).explain()
    assert told.storage.category is Category.UNKNOWN
    assert (told.decided_by, told.reason) == ("", "")


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"category": "activation"}, [32]),
        ({"category": Category.GRADIENT}, [8]),
        ({"module": "Net"}, [32, 64]),
        ({"module": "Other"}, []),
        ({"at": "peak"}, [8, 32, 64]),
        ({"at": 0}, [8]),
        ({"at": 10**9}, [8, 8]),
        ({"at": "peak", "category": "temporary"}, [64]),
    ],
)
def test_storages_are_chosen_by_category_module_and_moment(asked, sizes):
    assert [e.storage.size_bytes for e in a_step().explain(**asked)] == sizes


def test_a_moment_is_the_state_after_the_change_at_it():
    profile = a_step()
    scratch = profile.explain("temporary")[0]
    alive = profile.explain("temporary", at=scratch.born_ns)
    assert alive == (scratch,)
    assert profile.explain("temporary", at=scratch.born_ns - 1) == ()  # type: ignore[operator]
    assert profile.explain("temporary", at=scratch.died_ns) == ()


def test_what_is_told_of_a_moment_adds_up_to_the_footprint():
    profile = a_step()
    for time_ns, total in zip(profile.timeline.times_ns, profile.timeline.total, strict=True):
        told = profile.explain(at=int(time_ns))
        assert sum(e.storage.size_bytes for e in told) == total


@pytest.mark.parametrize("asked", [{"category": "activations"}, {"at": "end"}])
def test_a_category_or_moment_that_means_nothing_is_refused(asked):
    with pytest.raises(MarkerError, match=r"is no category|is no moment"):
        a_step().explain(**asked)


def test_every_pass_has_a_reason_for_every_claim():
    profile = a_step()
    grounds = profile.decisions.grounds
    assert {g.decided_by for g in grounds} == {
        p.__name__.removeprefix("find_") for p in CATEGORY_PASSES
    }
    assert all(ground.reason for ground in grounds)


def test_what_the_first_watched_operator_s_node_makes_is_made_by_that_operator():
    b = TraceBuilder()
    with b.module(1, "Net"), b.op("aten::mm", sequence=0):
        b.alloc(8)
    node = b.op("MmBackward0", scope=Scope.BACKWARD_FUNCTION, is_operator=False, sequence=0)
    with b.backward(), node, b.op("aten::t"):
        b.alloc(16)
    told = {e.storage.size_bytes: e.storage.module for e in analyze_trace(b.build()).explain()}
    assert told == {8: "Net", 16: "Net"}


def test_the_calls_around_an_allocation_end_with_the_outermost_of_the_user_s():
    b = TraceBuilder()

    @contextmanager
    def call(file: str, function: str) -> Iterator[None]:
        with b.op(function, kind=EventKind.PY_CALL, is_operator=False) as row:
            b._rows["events"][row]["file"] = b._string(file)
            yield

    library = "/home/me/.venv/lib/python3.11/site-packages/net.py"
    with (
        call("<frozen runpy>", "main"),
        call(library, "run"),
        call("train.py", "step"),
        call("torch/nn/modules/linear.py", "forward"),
        b.op("aten::mm"),
    ):
        b.alloc(8)
    stack = analyze_trace(b.build()).attribution.stack(0)
    assert [source.function for source in stack] == ["forward", "step"]


def test_where_none_of_the_calls_around_is_the_user_s_there_is_no_stack():
    b = TraceBuilder()
    with b.op("main", kind=EventKind.PY_CALL, is_operator=False) as row, b.op("aten::mm"):
        b._rows["events"][row]["file"] = b._string("<frozen runpy>")
        b.alloc(8)
    assert analyze_trace(b.build()).attribution.stack(0) == ()
