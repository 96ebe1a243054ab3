"""Measured and estimated memory have the same categories: each program is labelled both ways."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest

from pytest_torchmem import estimate
from pytest_torchmem.analysis.estimated.estimated_result import Estimate
from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.analysis.storages import categories
from pytest_torchmem.analysis.storages.explanation import Explanation
from pytest_torchmem.values.contributors import Category, Phase
from tests.analysis.storages.small_programs import PROGRAMS
from tests.measured import profile_of

# Where something is, in which phase, and how many bytes.
Place = tuple[int, Phase, int]
Labels = dict[Place, Counter[Category]]

#: What an estimate cannot know, and a recording can.
KNOWN = {
    "a_graph_is_left": "an estimate does not ask what the graphs keep that are left at its end",
    "hook_on_a_gradient": "torch names the node that comes next, while hooks on its input run",
    "gradient_function": "tensors become leaves within torch.func where no recorder of fakes looks",
}
# Numbers that became tensors are no storages in an estimate.
NUMBER_BYTES = 16


def labelled(explanations: Iterable[Explanation]) -> Labels:
    """The categories at each place.

    A gradient from before counts in a recording with its module, in an estimate when an operator
    touches it. An operator of a backward pass has the line of its forward operator or its own.
    """
    found: Labels = defaultdict(Counter)
    for e in explanations:
        storage = e.storage
        old_gradient = e.born_ns is None and storage.category is Category.GRADIENT
        if storage.size_bytes <= NUMBER_BYTES or old_gradient:
            continue
        here = storage.source is not None and storage.phase is not Phase.BACKWARD
        line = storage.source.line if here and storage.source else 0
        found[line, storage.phase, storage.size_bytes][storage.category] += 1
    return found


def cut_otherwise(run: Estimate) -> Counter[tuple[Phase, int]]:
    """How many storages of an estimate are no storages of their own, for real.

    Some are written over by the sum that follows them. Their last row is the one before the sum's:
    an even one, where others end after an operator. And an estimate has as one storage, which ends
    on the row after its first, what a kernel takes for itself piece by piece.
    """
    first, ends = run.run.lifetimes.first.tolist(), run.run.lifetimes.end.tolist()
    rows = run.run.graph.row_count
    return Counter(
        (e.storage.phase, e.storage.size_bytes)
        for e in run.explain()
        if (ends[e.number] % 2 or ends[e.number] == first[e.number] + 1) and ends[e.number] < rows
    )


def differences(profile: MemoryProfile, estimated: Estimate) -> list[str]:
    """Each place with other categories; scratch that kernels keep to themselves may be missing."""
    real, expected, spare = (
        labelled(profile.explain()),
        labelled(estimated.explain()),
        cut_otherwise(estimated),
    )
    wrong = []
    for place in sorted(real.keys() | expected.keys(), key=str):
        more, missing = expected[place] - real[place], real[place] - expected[place]
        if more.total() > spare[place[1:]] or missing.keys() - {Category.TEMPORARY}:
            wrong.append(f"{place}: measured {real[place]}, estimated {expected[place]}")
    return wrong


def both_ways(name: str) -> tuple[MemoryProfile, Estimate]:
    body = PROGRAMS[name]()
    body()  # the first run makes gradients, and the states of optimizers
    profile = profile_of(body)
    return profile, estimate(body, backward=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            n, marks=[pytest.mark.xfail(reason=KNOWN[n], strict=True)] if n in KNOWN else []
        )
        for n in PROGRAMS
    ],
)
def test_measured_and_estimated_storages_have_the_same_categories(name):
    profile, estimated = both_ways(name)
    assert differences(profile, estimated) == []
    made = [e for e in estimated.explain() if e.born_ns is not None]
    assert sum(e.storage.size_bytes for e in made) > 0


def test_another_rule_on_one_side_would_be_seen(monkeypatch):
    profile, estimated = both_ways("retained_graph")
    assert profile.labels is not None
    without = tuple(p for p in categories.CATEGORY_PASSES if p is not categories.find_activations)
    monkeypatch.setattr(categories, "CATEGORY_PASSES", without)
    assert differences(profile, estimated)


def test_the_programs_are_many():
    assert len(PROGRAMS) - len(KNOWN) >= 40
