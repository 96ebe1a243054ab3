"""The operators of a recorded forward pass, as steps between sets of storages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import FORWARD
from pytest_torchmem.analysis.storages.categories import Step
from pytest_torchmem.analysis.storages.evidence import Evidence

# Larger is no number that became a tensor: a complex one has so many bytes.
_NUMBER_BYTES: Final = 16


def forward_steps(evidence: Evidence) -> Iterator[Step]:
    """Yield the leaf operators of the forward pass in the order in which they ran.

    What no other operator reads is left out of the steps, and so is a step that does nothing but
    read what the one before it reads::

        for _ in range(1000):
            x + 1    # each reads x, and makes what no other operator reads: one step
    """
    leaves = _Leaves.of(evidence)
    step, storage, written = leaves.mentions(evidence)
    reads_others = (leaves.maker[storage] != step) & ~leaves.is_number[storage]
    reads = _Members.of(step[reads_others], storage[reads_others], leaves.count)
    is_read = np.zeros(len(leaves.maker), np.bool_)
    is_read[reads.values] = True
    is_read[-1] = False
    written &= is_read[storage]
    writes = _Members.of(step[written], storage[written], leaves.count)
    made = np.flatnonzero(is_read & (leaves.maker >= 0))
    makes = _Members.of(leaves.maker[made], made, leaves.count)
    is_new = (writes.counts > 0) | (makes.counts > 0) | ~reads.as_before()
    is_new[1:] |= leaves.in_module[1:] != leaves.in_module[:-1]
    kept = np.flatnonzero(is_new)
    columns = (leaves.in_module[kept].tolist(), *(m.lists(kept) for m in (reads, writes, makes)))
    for in_module, read, overwritten, new in zip(*columns, strict=True):
        yield Step(in_module, set(read), set(overwritten), new)


@dataclass(frozen=True, slots=True, eq=False)
class _Leaves:
    """The leaf operators of the forward pass, numbered in the order in which they ran.

    Attributes:
        number: int32, shape (E,), the number of a leaf at its row, -1 at all others.
        in_module: bool, shape (L,), whether it runs within the call of a module.
        maker: int32, shape (S + 1,), the leaf that allocated each storage, or -1. The last entry
            stands for no storage.
        is_number: bool, shape (S + 1,), whether a storage is a number that became a tensor: the 255
            of ``x / 255`` is no data. It is made before its operator begins, and no larger than a
            complex number.
    """

    number: NDArray[np.int32]
    in_module: NDArray[np.bool_]
    maker: NDArray[np.int32]
    is_number: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return len(self.in_module)

    @classmethod
    def of(cls, evidence: Evidence) -> _Leaves:
        tree, birth_leaf = evidence.tree, evidence.birth_leaf
        event, _, _ = evidence.operands
        reading = tree.leaf[event[tree.phase[event] == FORWARD]]
        is_leaf = np.zeros(len(tree.leaf) + 1, np.bool_)
        is_leaf[reading] = True
        is_leaf[birth_leaf[evidence.made]] = True
        rows = np.flatnonzero(is_leaf[:-1] & (tree.phase == FORWARD))
        rows = rows[np.argsort(tree.rank[rows])]
        number = np.full(len(tree.leaf), -1, np.int32)
        number[rows] = np.arange(len(rows))
        maker = np.full(len(birth_leaf) + 1, -1, np.int32)
        made = np.flatnonzero(evidence.made & (birth_leaf >= 0))
        maker[made] = number[birth_leaf[made]]
        is_number = evidence.made & (birth_leaf < 0)
        is_number &= evidence.storages.size_bytes <= _NUMBER_BYTES
        in_module = evidence.module_call[rows] >= 0
        return cls(number, in_module, maker, np.append(is_number, False))

    def mentions(
        self, evidence: Evidence
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """Return leaf, storage and whether it is written to, for each mention in a leaf."""
        tree = evidence.tree
        event, storage, written = evidence.operands
        leaf = tree.leaf[event]
        step = np.where(leaf >= 0, self.number[leaf], np.int32(-1))
        rows = (tree.phase[event] == FORWARD) & (step >= 0)
        return step[rows], storage[rows], written[rows]


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    """The members of numbered groups, each once: group g has ``counts[g]`` in a row of ``values``.

    ``counts`` is int64, shape (G,); ``values`` are grouped, and ascend within each group.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, group: NDArray[np.int32], value: NDArray[np.int64], count: int) -> _Members:
        order = np.lexsort((value, group))
        group, value = group[order], value[order]
        first = np.ones(len(group), np.bool_)
        first[1:] = (group[1:] != group[:-1]) | (value[1:] != value[:-1])
        return cls(value[first], np.bincount(group[first], minlength=count))

    def as_before(self) -> NDArray[np.bool_]:
        """Return whether each group has the members of the one before: bool, shape (G,).

        Groups {7, 8}, {7, 8} and {7, 9}::

            values          [7, 8, 7, 8, 7, 9]
            two before      [.., .., 7, 8, 7, 8]
            as before       [no, yes, no]
        """
        if not len(self.counts):
            return np.zeros(0, np.bool_)
        group = np.repeat(np.arange(len(self.counts)), self.counts)
        before = np.arange(len(self.values)) - self.counts[group]
        differs = self.values != self.values[before] if len(before) else np.zeros(0, np.bool_)
        same: NDArray[np.bool_] = np.bincount(group[differs], minlength=len(self.counts)) == 0
        same[1:] &= self.counts[1:] == self.counts[:-1]
        same[0] = False
        return same

    def lists(self, groups: NDArray[np.int64]) -> Iterator[list[int]]:
        """Yield the members of some groups, ascending."""
        ends = np.cumsum(self.counts)[groups]
        begins = ends - self.counts[groups]
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            yield self.values[begin:end].tolist() if end > begin else []
