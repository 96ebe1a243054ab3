"""The answers of a recording to what the category passes ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import FORWARD, PHASES, RECOMPUTE, ascends
from pytest_torchmem.analysis.storages.categories import Mask, Step
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.analysis.storages.storages import NEVER
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.trace import Mutable, Ownership, Role, are_among

# The members of steps that mention so many tensors are in memory at a time.
_MENTIONS_AT_ONCE: Final = 2**18
# Larger is no number that became a tensor: a complex one has so many bytes.
_NUMBER_BYTES: Final = 16


def forward_steps(evidence: Evidence) -> Iterator[Step]:
    """Yield the leaf operators of the forward pass in the order in which they ran.

    What no other operator reads is left out of the steps, and so is a step that does nothing but
    read what the one before it reads::

        for _ in range(1000):
            x + 1    # each reads x, and makes what no other operator reads: one step

    The members of all steps at once would take as much as the recording. So some leaves are looked
    at after the others, twice: to find out what is read, and to yield the steps.
    """
    leaves, step, storage, written = _leaves_and_mentions(evidence)
    pieces = list(_pieces(step, leaves.count))
    is_read = np.zeros(len(leaves.maker), np.bool_)
    for _, rows in pieces:
        is_read[storage[rows][leaves.others(step[rows], storage[rows])]] = True
    is_read[-1] = False
    read_rows = np.flatnonzero(is_read & (leaves.maker >= 0)).astype(np.int32)
    read_rows = read_rows[np.argsort(leaves.maker[read_rows], kind="stable")]
    for numbers, rows in pieces:
        members = step[rows] - numbers.start, storage[rows]
        new = read_rows[
            slice(*np.searchsorted(leaves.maker[read_rows], (numbers.start, numbers.stop)))
        ]
        yield from _steps(
            leaves.in_module[numbers.start : numbers.stop],
            _Members.of(*members, leaves.others(step[rows], storage[rows]), len(numbers)),
            _Members.of(*members, written[rows] & is_read[storage[rows]], len(numbers)),
            _Members.of(leaves.maker[new] - numbers.start, new, new >= 0, len(numbers)),
        )


def _pieces(step: NDArray[np.int32], count: int) -> Iterator[tuple[range, slice]]:
    """Yield the numbers of some steps after the others, and the rows that mention them.

    A piece of two rows at least, of three steps that have two, one and one::

        step      [0, 0, 1, 2]
        pieces    steps 0 in rows 0 and 1, steps 1 and 2 in rows 2 and 3
    """
    first = row = 0
    while first < count:
        further = row + _MENTIONS_AT_ONCE
        last = int(step[further - 1]) + 1 if further < len(step) else count
        end = int(np.searchsorted(step, last))
        yield range(first, last), slice(row, end)
        first, row = last, end


def _steps(
    in_module: NDArray[np.bool_], reads: _Members, writes: _Members, makes: _Members
) -> Iterator[Step]:
    """Yield the steps of some leaves, the first of them and those that say more than the last."""
    is_new = (writes.counts > 0) | (makes.counts > 0) | ~reads.as_before()
    is_new[1:] |= in_module[1:] != in_module[:-1]
    new_rows = np.flatnonzero(is_new)
    columns = (in_module[new_rows].tolist(), *(m.lists(new_rows) for m in (reads, writes, makes)))
    for within, read, overwritten, new in zip(*columns, strict=True):
        yield Step(within, set(read), set(overwritten), new)


@dataclass(frozen=True, slots=True, eq=False)
class _Leaves:
    """The leaf operators of the forward pass, numbered in the order in which they ran.

    Attributes:
        in_module: bool, shape (L,), whether it runs within the call of a module.
        maker: int32, shape (S + 1,), the leaf that allocated each storage, or -1. The last entry
            stands for no storage.
        is_number: bool, shape (S + 1,), whether a storage is a number that became a tensor: the 255
            of ``x / 255`` is no data. It is made before its operator begins, and no larger than a
            complex number.
    """

    in_module: NDArray[np.bool_]
    maker: NDArray[np.int32]
    is_number: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return len(self.in_module)

    def others(self, step: NDArray[np.int32], storage: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return which mentions are of what the step did not make, and of no number."""
        others: NDArray[np.bool_] = self.maker[storage] != step
        others &= ~self.is_number[storage]
        return others


def _leaves_and_mentions(
    evidence: Evidence,
) -> tuple[_Leaves, NDArray[np.int32], NDArray[np.int32], NDArray[np.bool_]]:
    """Return the leaves, and of each mention in one: leaf, storage, whether it is written to.

    The mentions are in the order of the leaves.
    """
    tree, birth_leaf = evidence.tree, evidence.birth_leaf
    event, storage, written = evidence.operands
    forward = tree.phase[event] == FORWARD
    if not forward.all():
        event, storage, written = event[forward], storage[forward], written[forward]
    leaf = tree.leaf[event]
    del event, forward
    is_leaf = np.zeros(len(tree.leaf) + 1, np.bool_)
    is_leaf[leaf] = True
    is_leaf[birth_leaf[evidence.made]] = True
    rows = np.flatnonzero(is_leaf[:-1] & (tree.phase == FORWARD))
    rows = rows[np.argsort(tree.rank[rows])]
    # The last entry is that of what is in no leaf.
    number = np.full(len(tree.leaf) + 1, -1, np.int32)
    number[rows] = np.arange(len(rows))
    made = evidence.made & (birth_leaf >= 0)
    maker = np.append(np.where(made, number[birth_leaf], np.int32(-1)), np.int32(-1))
    is_number = evidence.made & (birth_leaf < 0)
    is_number &= evidence.storages.size_bytes <= _NUMBER_BYTES
    in_module = evidence.module_call[rows] >= 0
    leaves = _Leaves(in_module, maker, np.append(is_number, False))
    step = number[leaf]
    del leaf, number
    inside = step >= 0
    if not inside.all():
        step, storage, written = step[inside], storage[inside], written[inside]
    if not ascends(step):
        order = np.argsort(step, kind="stable")
        step, storage, written = step[order], storage[order], written[order]
    return leaves, step, storage, written


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """The members of numbered groups, each once: group g has ``counts[g]`` in a row of ``values``.

    ``counts`` is int32, shape (G,); ``values`` are grouped, and ascend within each group.
    """

    values: NDArray[np.int32]
    counts: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        group: NDArray[np.int32],
        value: NDArray[np.int32],
        where: NDArray[np.bool_],
        count: int,
    ) -> _Members:
        """Return the members ``value`` of each ``group``, of the rows ``where`` that is so."""
        # Both are below 2**31, so they pack into one sortable number; a value may be -1.
        members = group[where].astype(np.int64)
        members <<= 32
        members += value[where]
        members += 1
        members.sort()
        is_new = np.ones(len(members), np.bool_)
        np.not_equal(members[1:], members[:-1], out=is_new[1:])
        members = members[is_new]
        values = (members & (2**32 - 1)).astype(np.int32)
        values -= 1
        members >>= 32
        return cls(values, np.bincount(members, minlength=count).astype(np.int32))

    def as_before(self) -> NDArray[np.bool_]:
        """Return whether each group has the members of the one before: bool, shape (G,).

        Groups {7, 8}, {7, 8} and {7, 9}::

            values          [7, 8, 7, 8, 7, 9]
            two before      [.., .., 7, 8, 7, 8]
            as before       [no, yes, no]
        """
        if not len(self.counts):
            return np.zeros(0, np.bool_)
        group = np.repeat(np.arange(len(self.counts), dtype=np.int32), self.counts)
        before = np.arange(len(self.values), dtype=np.int32)
        before -= self.counts[group]
        differs = self.values != self.values[before] if len(before) else np.zeros(0, np.bool_)
        same: NDArray[np.bool_] = np.bincount(group[differs], minlength=len(self.counts)) == 0
        same[1:] &= self.counts[1:] == self.counts[:-1]
        same[0] = False
        return same

    def lists(self, groups: NDArray[np.int64]) -> Iterator[list[int]]:
        """Yield the members of some groups, which ascend; so do the members."""
        is_wanted = np.zeros(len(self.counts), np.bool_)
        is_wanted[groups] = True
        values = self.values[np.repeat(is_wanted, self.counts)].tolist()
        for begin, end in pairwise([0, *np.cumsum(self.counts[groups]).tolist()]):
            yield values[begin:end]


# Operators that make a library set up its scratch space.
_GEMM_WORDS: Final = (
    *("mm", "linear", "matmul", "dot", "mv", "scaled"),
    *("linalg", "solve", "cholesky", "lu_"),
)
# It may multiply, or have scratch of cuDNN's that is as large by chance, and is freed with it.
_CONVOLUTION: Final = "conv"
# Libraries that plan a call and say how much scratch it takes: cuDNN, cuSOLVER, cuFFT.
_PLANS: Final = ("conv", "cudnn", "miopen", "linalg", "cholesky", "lu_", "ormqr", "geqrf", "fft")
# They look for cuBLAS before they take memory for their result, which is one number.
_NUMBER_LAST: Final = ("aten::dot", "aten::vdot")
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"
# A node of it does so: the gradient is kept as it comes, or added to the one that is there.
_KEEPS: Final = frozenset({"aten::detach", "aten::add_"})
_ENGINE: Final = "autograd::engine::evaluate_function"
# As what a storage is held, and in which role Python's objects show it, for each category.
_HOLDINGS: Final = {
    Category.PARAMETER: (Ownership.PARAMETER, (Role.MODULE_PARAMETER, Role.OPTIMIZER_PARAMETER)),
    Category.BUFFER: (Ownership.BUFFER, ()),
    Category.OPTIMIZER_STATE: (Ownership.OPTIMIZER_STATE, (Role.OPTIMIZER_STATE,)),
    Category.GRADIENT: (Ownership.GRADIENT, (Role.MODULE_GRADIENT, Role.OPTIMIZER_GRADIENT)),
}


class MeasuredFacts(Evidence):
    """`Facts` about a recording; each attribute is described there, or with the evidence."""

    @property
    def given(self) -> Mask:
        return self.touched & self.read_in(FORWARD, RECOMPUTE)

    def held_as(self, category: Category) -> Mask:
        """Gradients within an operator of the forward pass are that operator's own business."""
        ownership, roles = _HOLDINGS[category]
        in_operators = category is not Category.GRADIENT
        owned = self.owned(ownership, in_operators=in_operators)
        return owned | self.mentioned(*roles)

    @property
    def leaves(self) -> Mask:
        return self.owned(Ownership.LEAF)

    @property
    def returned(self) -> Mask:
        return self.owned(Ownership.RETURNED, in_operators=False)

    @cached_property
    def roots(self) -> Mask:
        return self.owned(Ownership.GRADIENT_ROOT)

    @property
    def has_modules(self) -> bool:
        return len(self.tree.trace.module_calls) > 0

    def made_in(self, *phases: Phase) -> Mask:
        return are_among(self.birth_phase, map(PHASES.index, phases))

    @property
    def survives(self) -> Mask:
        return self.outlives(self.birth_leaf)

    @cached_property
    def saved(self) -> Mask:
        return self.owned(Ownership.SAVED)

    @property
    def workspaces(self) -> Mask:
        """On a GPU an allocation without a tensor in it, within an operator that multiplies.

        It has the size of a workspace, and is not the operator's output. Until torch 2.14 it stays
        with the handle of the library; since then each call takes one and frees it. Where operators
        are not observed, as in the backward pass of a ``torch.func`` transform, it is one that no
        tensor or owner ever has, and that stays. What cuDNN and cuSOLVER take is of any size, and
        is gone when the operator ends.
        """
        trace, storages = self.tree.trace, self.storages
        sizes = trace.meta.get("workspace_bytes", [])
        unseen = np.zeros(len(storages), np.bool_)
        if not sizes:
            return unseen
        allocated = storages.event >= 0
        keyed = np.zeros(len(trace.events), np.bool_)
        keyed[trace.allocations["event"]] = trace.allocations["keyed"]
        unseen[allocated] = ~keyed[storages.event[allocated]]
        parents = self._operators_around(storages.event)
        names = np.append(trace.events["name"], np.int32(-1))[np.where(parents >= 0, parents, -1)]
        in_gemm = trace.texts_are(names, lambda text: any(word in text for word in _GEMM_WORDS))
        in_convolution = trace.texts_are(names, lambda text: _CONVOLUTION in text)
        of_library = trace.texts_are(names, lambda text: any(word in text for word in _PLANS))
        scratch = unseen & of_library & ~self.survives
        unseen &= np.isin(storages.size_bytes, sizes)
        mentioned = np.zeros(len(storages) + 1, np.bool_)
        mentioned[storages.of_tensor] = mentioned[storages.of_owner] = True
        stays = (storages.died == NEVER) & ~mentioned[:-1]
        within = (in_gemm | (in_convolution & self.survives)) & ~self._is_output(parents)
        is_scratch: Mask = scratch | (unseen & (within | (allocated & (parents < 0) & stays)))
        return is_scratch

    def _operators_around(self, events: NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the innermost operator around each event, or -1. An operator may open ranges::

        aten::bmm
          eager_router      no operator: torch chooses one of its kernels
            [memory]
        """
        trace = self.tree.trace
        above = np.append(trace.events["parent"], np.int32(-1)).astype(np.int64)
        is_operator = np.append(trace.events["is_operator"], True)
        operators = above[events]
        while not is_operator[operators].all():
            operators = np.where(is_operator[operators], operators, above[operators])
        return operators

    def _is_output(self, parents: NDArray[np.int64]) -> Mask:
        """Return which storages are the first allocation of an operator that writes to no input.

        ``parents`` are the events in which storages were allocated: int64, shape (S,), or -1. Four
        storages; event 5 writes to none of its inputs, event 9 does (``out=``)::

            parents          [5,    9,     5,     -1]
            born             [6,    10,    7,     BEFORE]
            first of each    [0, 1]                      rows, by birth
            result           [True, False, False, False]
        """
        tree, storages = self.tree, self.storages
        tensors = tree.trace.tensors
        writes = np.zeros(len(tree.trace.events), np.bool_)
        writes[tensors["event"][tensors["mutable"] != Mutable.NO]] = True
        writes |= tree.trace.texts_are(tree.trace.events["name"], lambda text: text in _NUMBER_LAST)
        rows = np.flatnonzero(parents >= 0)
        order = rows[np.argsort(storages.born[rows], kind="stable")]
        _, first = np.unique(parents[order], return_index=True)
        result = np.zeros(len(storages), np.bool_)
        result[order[first]] = ~writes[parents[order[first]]]
        return result

    @property
    def accumulated(self) -> Mask:
        """An ``AccumulateGrad`` node keeps the gradient that it is handed, or adds to it::

        torch::autograd::AccumulateGrad
          aten::detach      its first argument becomes the .grad
          aten::add_        so does this one's, which was the .grad before
          aten::clone       makes a copy where the gradient cannot be taken over: the copy
        """
        trace, tree, storages = self.tree.trace, self.tree, self.storages
        mask = np.zeros(len(storages), np.bool_)
        is_node = trace.texts_are(trace.events["name"], _ACCUMULATE.__eq__)
        if not is_node.any():
            return mask
        node = tree.innermost(is_node & (tree.backward_node >= 0))
        tensors = trace.tensors
        parents = trace.events["parent"][tensors["event"]]
        direct = (parents >= 0) & (node[tensors["event"]] == parents)
        is_kept = direct & (tensors["argument"] == 0)
        is_kept &= trace.texts_are(trace.events["name"][tensors["event"]], _KEEPS.__contains__)
        mask[storages.of_tensor[is_kept]] = True
        return mask | self.outlives(self.at_birth(node))

    @property
    def handed_on(self) -> Mask:
        """Storages that outlive their node and are not summed up, or that the engine itself made.

        Between two nodes the engine adds up the gradients that several nodes handed on. A backward
        pass may run within a node of another one, as a checkpoint's does::

            CheckpointFunctionBackward
              autograd::engine::evaluate_function: AddmmBackward0
                AddmmBackward0
                aten::sum         between two nodes, though within a third one
        """
        node = self.at_birth(self.tree.backward_node)
        engine = self.at_birth(self._engine_events)
        # Of two events around a third one, the inner one has the larger row.
        within_another = (node >= 0) & (engine > node) & self.outlives(engine)
        between = ((node < 0) & self.survives) | within_another
        return between | (self.outlives(node) & ~self._summed_up(node))

    @cached_property
    def _engine_events(self) -> NDArray[np.int32]:
        """For each event the row of the innermost evaluation of a node, -1 for none: shape (E,)."""
        trace = self.tree.trace
        names = trace.events["name"]
        evaluates = trace.texts_are(names, lambda text: text.startswith(_ENGINE))
        return self.tree.innermost(evaluates)

    def _summed_up(self, node: NDArray[np.int32]) -> Mask:
        """Results of ``node`` that an ``aten::sum`` beside the node reads, and that die with it.

        The tree of the backward of ``x * weight``::

            autograd::engine::evaluate_function: MulBackward0
              MulBackward0
                aten::mul     x's gradient
                aten::mul     weight's gradient, as large as x
              aten::sum       weight's gradient, as large as weight
        """
        trace, tree = self.tree.trace, self.tree
        engine = np.append(trace.events["parent"], np.int32(-1))[node]
        readers = trace.tensors["event"]
        rows = trace.texts_are(trace.events["name"][readers], "aten::sum".__eq__)
        rows &= tree.backward_node[readers] < 0
        return self.in_rows(rows) & (engine >= 0) & ~self.outlives(engine)

    def forward_steps(self) -> Iterator[Step]:
        return forward_steps(self)
