"""What each storage is for: an ordered chain of passes over the evidence.

A pass takes the evidence and the labels so far and returns new labels; it only labels what no pass
before it did. The order is the ranking of the evidence, and stands in `CATEGORY_PASSES` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.analysis.events.op_tree import BACKWARD, FORWARD, RECOMPUTE
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.analysis.storages.input_flow import made_from_data
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import Mutable, Ownership, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Labels = NDArray[np.uint8]
    CategoryPass = Callable[[Evidence, Labels], Labels]

#: The label of a storage that no pass has spoken about yet; column of `Category.UNKNOWN`.
UNLABELLED: Final = Category.UNKNOWN.column

# Operators that make a library set up its scratch space.
_GEMM_WORDS: Final = ("mm", "linear", "conv", "matmul", "dot", "mv", "scaled")
_ACCUMULATE: Final = "torch::autograd::AccumulateGrad"


def label_storages(evidence: Evidence) -> Labels:
    """Return the category of each storage, as a column number: uint8, shape (S,)."""
    labels = np.full(len(evidence.storages), UNLABELLED, np.uint8)
    for category_pass in CATEGORY_PASSES:
        labels = category_pass(evidence, labels)
    return labels


def _labelled(labels: Labels, where: NDArray[np.bool_], category: Category) -> Labels:
    result: Labels = np.where(
        where & (labels == UNLABELLED), np.uint8(category.column), labels
    ).astype(np.uint8)
    return result


def set_workspaces(evidence: Evidence, labels: Labels) -> Labels:
    """Library scratch on a GPU: no tensor has it, and it outlives the operator that caused it."""
    trace, storages = evidence.tree.trace, evidence.storages
    sizes = trace.meta.get("workspace_bytes", [])
    unseen = np.zeros(len(storages), np.bool_)
    allocated = storages.event >= 0
    keyed = np.zeros(len(trace.events), np.bool_)
    keyed[trace.allocations["event"]] = trace.allocations["keyed"]
    unseen[allocated] = ~keyed[storages.event[allocated]]
    gemm = np.array([any(word in text for word in _GEMM_WORDS) for text in trace.strings], np.bool_)
    parents = np.where(allocated, trace.events["parent"][storages.event], -1)
    in_gemm = (parents >= 0) & gemm[trace.events["name"][parents]]
    fits = np.isin(storages.size_bytes, sizes) & evidence.outlives(evidence.birth_leaf)
    fits &= ~_is_output(evidence, parents)
    return _labelled(labels, unseen & in_gemm & fits, Category.WORKSPACE)


def _is_output(evidence: Evidence, parents: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a storage is an operator's output: its first allocation, if it writes to no input.

    ``parents`` are the events in which storages were allocated: int64, shape (S,), or -1.
    """
    tree, storages = evidence.tree, evidence.storages
    tensors = tree.trace.tensors
    writes = np.zeros(len(tree.trace.events), np.bool_)
    writes[tensors["event"][tensors["mutable"] != Mutable.NO]] = True
    rows = np.flatnonzero(parents >= 0)
    order = rows[np.argsort(storages.born[rows], kind="stable")]
    _, first = np.unique(parents[order], return_index=True)
    result = np.zeros(len(storages), np.bool_)
    result[order[first]] = ~writes[parents[order[first]]]
    return result


def set_parameters(evidence: Evidence, labels: Labels) -> Labels:
    """What a module or an optimizer holds as a parameter.

    Without either, the leaves that a backward pass gives gradients are the parameters: that is what
    training on plain tensors has.
    """
    held = evidence.owned(Ownership.PARAMETER) | evidence.mentioned(
        Role.MODULE_PARAMETER, Role.OPTIMIZER_PARAMETER
    )
    if not (held & evidence.counted).any():
        held = held | evidence.owned(Ownership.LEAF)
    return _labelled(labels, held, Category.PARAMETER)


def set_buffers(evidence: Evidence, labels: Labels) -> Labels:
    """What a module holds as a buffer. A parameter that is also a buffer stays a parameter."""
    return _labelled(labels, evidence.owned(Ownership.BUFFER), Category.BUFFER)


def set_optimizer_state(evidence: Evidence, labels: Labels) -> Labels:
    """What an optimizer keeps per parameter between its steps."""
    held = evidence.owned(Ownership.OPTIMIZER_STATE) | evidence.mentioned(Role.OPTIMIZER_STATE)
    return _labelled(labels, held, Category.OPTIMIZER_STATE)


def set_gradients(evidence: Evidence, labels: Labels) -> Labels:
    """What was found in ``.grad``, was returned by ``autograd.grad``, or was on its way there; and
    the buckets in which DDP reduces gradients.

    A hook may consume a gradient during the backward pass, so that nobody finds it afterwards. Then
    the node that accumulates into the leaf is the witness: what it keeps or adds to is a gradient.

    Two things look like gradients and are steps on the way of others. A custom Function that
    differentiates in its own forward pass uses the result for its output. And the leaves of a
    checkpoint's inner backward pass are copies of activations.
    """
    held = evidence.owned(Ownership.GRADIENT, in_operators=False) | evidence.mentioned(
        Role.MODULE_GRADIENT, Role.OPTIMIZER_GRADIENT
    )
    held = held | evidence.buckets
    on_the_way = evidence.owned(Ownership.GRADIENT_ROOT)
    return _labelled(labels, held | (_accumulated(evidence) & ~on_the_way), Category.GRADIENT)


def _accumulated(evidence: Evidence) -> NDArray[np.bool_]:
    trace, tree = evidence.tree.trace, evidence.tree
    mask = np.zeros(len(evidence.storages), np.bool_)
    names = {name: number for number, name in enumerate(trace.strings)}
    if _ACCUMULATE not in names:
        return mask
    is_node = trace.events["name"] == names[_ACCUMULATE]
    node = tree.innermost(is_node & (tree.backward_node >= 0))
    keeps = [names[n] for n in ("aten::detach", "aten::add_") if n in names]
    tensors = trace.tensors
    parents = trace.events["parent"][tensors["event"]]
    direct = (parents >= 0) & (node[tensors["event"]] == parents)
    kept = (
        direct & (tensors["argument"] == 0) & np.isin(trace.events["name"][tensors["event"]], keeps)
    )
    mask[evidence.storages.of_tensor[kept]] = True
    # A gradient that cannot be taken over as it is gets copied inside the node.
    born_in = evidence.storages.event
    inside = np.where(born_in >= 0, node[born_in], -1)
    return mask | ((inside >= 0) & evidence.outlives(inside.astype(np.int32)))


def set_inputs(evidence: Evidence, labels: Labels) -> Labels:
    """What the forward pass reads and did not compute: data that was there before, or was made by
    the body out of nothing but data.

    Assumes that everything the model owns is labelled.
    """
    unowned = labels == UNLABELLED
    there_before = evidence.touched & unowned & evidence.read_in(FORWARD, RECOMPUTE)
    labels = _labelled(labels, there_before, Category.INPUT)
    return _labelled(labels, made_from_data(evidence, labels), Category.INPUT)


def set_activations(evidence: Evidence, labels: Labels) -> Labels:
    """What the forward pass made and autograd keeps for backward.

    The graph itself is the first witness: it was asked what it keeps when backward began. What was
    recomputed did not exist then, and nodes written in C++ do not tell: there, a storage made in a
    forward pass that an operator of the backward pass reads was kept for it.
    """
    if not evidence.has_backward:
        return labels
    forward = np.isin(evidence.birth_phase, (FORWARD, RECOMPUTE))
    roots = evidence.owned(Ownership.GRADIENT_ROOT)
    # The node that asks for what it saved is the one around the recomputation: what it reads itself
    # dies within it.
    survives = evidence.outlives(evidence.birth_leaf) | (evidence.birth_phase == RECOMPUTE)
    read_later = evidence.read_by_backward & survives & ~roots
    kept = evidence.owned(Ownership.SAVED) | (forward & read_later)
    return _labelled(labels, kept, Category.ACTIVATION)


def set_autograd_detail(evidence: Evidence, labels: Labels) -> Labels:
    """Gradients of activations: what a node of the backward graph hands to the next one.

    A node's result that the engine first sums up to the shape of what was broadcast is not handed
    on; the sum is.
    """
    storages, tree = evidence.storages, evidence.tree
    allocated = storages.event >= 0
    node = np.where(allocated, tree.backward_node[storages.event], np.int32(-1))
    backward = evidence.birth_phase == BACKWARD
    # Sums of several gradients are made by the engine between two nodes.
    between = backward & (node < 0) & evidence.outlives(evidence.birth_leaf)
    returned = (node >= 0) & evidence.outlives(node) & ~_summed_up(evidence, node)
    handed_on = backward & (returned | between)
    return _labelled(
        labels, handed_on | evidence.owned(Ownership.GRADIENT_ROOT), Category.AUTOGRAD_DETAIL
    )


def _summed_up(evidence: Evidence, node: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Results of ``node`` that an ``aten::sum`` beside the node reads, and that are gone with it.

    The tree of the backward of ``x * weight``::

        autograd::engine::evaluate_function: MulBackward0
          MulBackward0
            aten::mul     x's gradient
            aten::mul     weight's gradient, as large as x
          aten::sum       weight's gradient, as large as weight
    """
    trace, tree = evidence.tree.trace, evidence.tree
    is_sum = np.array([text == "aten::sum" for text in trace.strings], np.bool_)
    engine = np.where(node >= 0, trace.events["parent"][node], np.int32(-1))
    readers = trace.tensors["event"]
    rows = is_sum[trace.events["name"][readers]] & (tree.backward_node[readers] < 0)
    return evidence.in_rows(rows) & (engine >= 0) & ~evidence.outlives(engine)


def set_temporaries(evidence: Evidence, labels: Labels) -> Labels:
    """Everything else that the body made."""
    return _labelled(labels, evidence.made, Category.TEMPORARY)


CATEGORY_PASSES: Final[tuple[CategoryPass, ...]] = (
    set_workspaces,
    set_parameters,
    set_buffers,
    set_optimizer_state,
    set_gradients,
    set_inputs,
    set_activations,
    set_autograd_detail,
    set_temporaries,
)
