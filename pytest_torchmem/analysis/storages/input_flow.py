"""Which storages a body made out of nothing but data.

``x = torch.randn(...)``, ``y = batch.float() / 255``: made by the body, yet not by the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from pytest_torchmem.analysis.events.op_tree import FORWARD
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.values.contributors import Category

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUMBER_BYTES: Final = 16


class _Step(NamedTuple):
    """One leaf operator of the forward pass: which storages it reads, writes to and makes."""

    in_module: bool
    reads: set[int]
    writes: set[int]
    makes: list[int]


def made_from_data(evidence: Evidence, labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Storages made from data alone, outside every module, that the model reads.

    Data are the inputs found so far and what operators make out of nothing. With modules in the
    window, what is computed from data before a module sees it is data still. Without any, code and
    model cannot be told apart, and only what came out of nothing counts.
    """
    has_modules = len(evidence.tree.trace.module_calls) > 0
    inputs = labels == Category.INPUT.column
    is_input = set(np.flatnonzero(inputs).tolist())
    data: set[int] = set(is_input)
    used: set[int] = set()
    numbers = set(np.flatnonzero(_numbers(evidence)).tolist())
    for step in _forward_steps(evidence):
        others = step.reads.difference(step.makes, numbers)
        from_data = others <= data
        if step.in_module or not from_data:
            used |= others
            if not from_data:
                data -= step.writes - is_input
        elif has_modules or not others:
            data.update(step.makes)
        else:
            used |= others
    found = np.zeros(len(labels), np.bool_)
    found[list(data & used)] = True
    return found & evidence.made


def _numbers(evidence: Evidence) -> NDArray[np.bool_]:
    """Numbers that became tensors for an operator: the 255 of ``x / 255`` says nothing about x.

    They are made before the operator begins, and no larger than a complex number.
    """
    size_bytes: NDArray[np.int64] = evidence.storages.size_bytes
    return evidence.made & (evidence.birth_leaf < 0) & (size_bytes <= _NUMBER_BYTES)


def _forward_steps(evidence: Evidence) -> Iterator[_Step]:
    """The leaf operators of the forward pass within the window, in the order they ran."""
    tree = evidence.tree
    event, storages, written = evidence.operands
    rows = (tree.phase[event] == FORWARD) & (tree.leaf[event] >= 0)
    reads: dict[int, set[int]] = {}
    writes: dict[int, set[int]] = {}
    columns = (tree.leaf[event[rows]], storages[rows], written[rows])
    for leaf, storage, is_written in zip(*(c.tolist() for c in columns), strict=True):
        reads.setdefault(leaf, set()).add(storage)
        if is_written:
            writes.setdefault(leaf, set()).add(storage)
    makes: dict[int, list[int]] = {}
    born = np.flatnonzero(evidence.made & (evidence.birth_leaf >= 0))
    for leaf, storage in zip(evidence.birth_leaf[born].tolist(), born.tolist(), strict=True):
        makes.setdefault(leaf, []).append(storage)
    forward = np.array([*reads.keys() | makes.keys()], np.int64)
    forward = forward[tree.phase[forward] == FORWARD]
    forward = forward[np.argsort(tree.rank[forward])]
    in_module = (evidence.module_call[forward] >= 0).tolist()
    for leaf, inside in zip(forward.tolist(), in_module, strict=True):
        yield _Step(inside, reads.get(leaf, set()), writes.get(leaf, set()), makes.get(leaf, []))
