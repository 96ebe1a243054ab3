"""The buckets in which DDP reduces gradients.

No Python object holds them, so the recorder cannot list them at the start. They are known by the
operators with which DDP copies gradients to them::

    autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
      torch::distributed::reducer::mul_out    the part of the bucket for this gradient
        aten::mul
    c10d::allreduce_                          all of the bucket

After the first backward pass DDP makes new buckets, in the order in which gradients came. The next
forward pass begins with that, and the old ones are gone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.analysis.storages.storages import BEFORE, NEVER, Storages
from pytest_torchmem.values.trace import Role, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COPIES: Final = ("torch::distributed::reducer::mul_out", "torch::distributed::reducer::copy_")


def bucket_mentions(trace: Trace) -> NDArray[np.int64]:
    """Rows of ``trace.tensors`` that are parts of buckets: int64, shape (B,)."""
    numbers = [number for number, text in enumerate(trace.strings) if text in _COPIES]
    tensors = trace.tensors
    copied_to = np.isin(trace.events["name"][tensors["event"]], numbers)
    copied_to &= (tensors["role"] == Role.OPERATOR_INPUT) & (tensors["argument"] == 0)
    return np.flatnonzero(copied_to)


def without_old_buckets(tree: OpTree, storages: Storages) -> Storages:
    """Return the storages, with each old bucket ending where a forward pass makes new buckets.

    The profiler reports no free of a storage whose allocation it did not see. An old bucket that is
    used last at rank 5, and new ones that are born at 3 and 8::

        rebuilt     [3, 8, NEVER]
        the first one after its last use: 8, so it died at 8
    """
    rows = bucket_mentions(tree.trace)
    last_use = np.full(len(storages), -np.inf)
    used_at = tree.rank[tree.trace.tensors["event"][rows]]
    np.maximum.at(last_use, storages.of_tensor[rows], used_at)
    is_bucket = last_use > -np.inf
    made = is_bucket & (storages.event >= 0)
    # Another DDP is made outside of every call of a module.
    made[made] = tree.innermost_module_calls()[storages.event[made]] >= 0
    old = is_bucket & (storages.born == BEFORE)
    rebuilt = np.append(np.sort(storages.born[made]), NEVER)
    died = storages.died.copy()
    died[old] = np.minimum(died[old], rebuilt[np.searchsorted(rebuilt, last_use[old])])
    return replace(storages, died=died)
