"""The category of each storage: a chain of passes, the same for measured and estimated memory.

A pass looks at the facts and makes claims: these storages are of that category, for this reason. A
claim counts only for storages that no earlier claim was about. So the order ranks the evidence, and
it stands in `CATEGORY_PASSES` alone.

`Facts` is all that a pass may ask. A recording answers in `MeasuredFacts`, a program that was only
estimated in `StaticFacts`; the rules are here, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.contributors import Category, Phase

Mask: TypeAlias = "NDArray[np.bool_]"
Labels: TypeAlias = "NDArray[np.uint8]"
CategoryPass: TypeAlias = "Callable[[Facts, Labels], Iterator[Claim]]"

#: The label of a storage that no pass has spoken about yet; column of `Category.UNKNOWN`.
UNLABELLED: Final = Category.UNKNOWN.column
#: The claim of such a storage, in `Decisions.claim`.
NO_CLAIM: Final = -1


class Step(NamedTuple):
    """One operator of the forward pass, as sets of storages.

    Attributes:
        in_module: Whether it runs within the call of a module.
        reads: All that it is called with; numbers that became tensors are left out.
        writes: Those of them that it writes to.
        makes: What it allocates.
    """

    in_module: bool
    reads: set[int]
    writes: set[int]
    makes: Iterable[int]

    def updates(self, gradients: Set[int]) -> bool:
        """Return whether it computes with gradients outside the model."""
        return not (self.in_module or gradients.isdisjoint(self.reads))


class Facts(Protocol):
    """All that the passes may ask. A mask is a bool array of shape (S,), one entry per storage."""

    @property
    def made(self) -> Mask:
        """The body allocated it."""

    @property
    def counted(self) -> Mask:
        """It is part of the footprint."""

    @property
    def given(self) -> Mask:
        """It was there before the body, and the body's forward pass reads it."""

    @property
    def workspaces(self) -> Mask:
        """A library allocated it for itself; no tensor is in it."""

    def held_as(self, category: Category) -> Mask:
        """A module, an optimizer or a ``.grad`` holds it as this."""

    @property
    def leaves(self) -> Mask:
        """A backward pass gives it a gradient."""

    @property
    def buckets(self) -> Mask:
        """DDP reduces gradients in it."""

    @property
    def accumulated(self) -> Mask:
        """The node that accumulates a leaf's gradient keeps it or adds to it."""

    @property
    def returned(self) -> Mask:
        """``autograd.grad`` returned it; in an estimate, it outlives its backward pass."""

    @property
    def roots(self) -> Mask:
        """A backward pass begins with it, or hands it to another backward pass around it."""

    @property
    def has_modules(self) -> bool:
        """A module is called in the body."""

    def forward_steps(self) -> Iterable[Step]:
        """The operators of the forward pass, in the order in which they ran.

        Those that cannot change what `made_from_data` returns may be left out.
        """

    @property
    def has_backward(self) -> bool:
        """There is a backward pass, or may yet be one."""

    def made_in(self, *phases: Phase) -> Mask:
        """It was allocated in one of those phases."""

    @property
    def survives(self) -> Mask:
        """It is alive when the operator that allocated it is over."""

    @property
    def saved(self) -> Mask:
        """An autograd graph keeps it for a backward pass."""

    @property
    def read_by_backward(self) -> Mask:
        """An operator within a node of the backward graph reads it."""

    @property
    def handed_on(self) -> Mask:
        """It outlives the node of the backward graph that allocated it, or is made between two."""


class Claim(NamedTuple):
    """A pass's word: the storages in ``where`` are of that category, because of ``reason``."""

    category: Category
    where: Mask
    reason: str


class Ground(NamedTuple):
    """The ground of a decision: the name of the pass, and the reason of its claim."""

    decided_by: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """The categories of all storages, and whose word each rests on.

    Attributes:
        labels: uint8, shape (S,), the category as a column number.
        claim: int, shape (S,), index into ``grounds``, or `NO_CLAIM` where nobody could tell.
        grounds: One for each claim that was made, in order.
        own_reasons: The reason of each storage that a user's pass claimed, by its number.
        failed_passes: A sentence for each of users' passes that raised, or that claimed what cannot
            be claimed.
    """

    labels: Labels
    claim: NDArray[np.signedinteger]
    grounds: tuple[Ground, ...]
    own_reasons: Mapping[int, str] = field(default_factory=dict)
    failed_passes: tuple[str, ...] = ()

    def ground(self, storage: int) -> Ground:
        """Return who decided on a storage; both texts are empty where nobody could tell."""
        number = int(self.claim[storage])
        return self.grounds[number] if number != NO_CLAIM else Ground("", "")


def decide(facts: Facts, storage_count: int) -> Decisions:
    """Return the category of each storage, with the claim that decided it.

    Three storages and the claims of two passes: an entry that was claimed is claimed no more. ::

        labels                  [UNKNOWN,   UNKNOWN,    UNKNOWN]
        parameters: [1, 0, 0]   [PARAMETER, UNKNOWN,    UNKNOWN]      claim [0, -1, -1]
        activations: [1, 1, 0]  [PARAMETER, ACTIVATION, UNKNOWN]      claim [0,  1, -1]
    """
    labels = np.full(storage_count, UNLABELLED, np.uint8)
    claimed = np.full(storage_count, NO_CLAIM, np.int8)
    grounds: list[Ground] = []
    for category_pass in CATEGORY_PASSES:
        # A pass sees the labels that earlier passes left, whatever it claims itself.
        before = labels.copy()
        for claim in category_pass(facts, before):
            new = claim.where & (labels == UNLABELLED)
            labels[new] = claim.category.column
            claimed[new] = len(grounds)
            grounds.append(Ground(category_pass.__name__.removeprefix("find_"), claim.reason))
    return Decisions(labels, claimed, tuple(grounds))


def find_workspaces(facts: Facts, _: Labels) -> Iterator[Claim]:
    """Scratch of a GPU's libraries: no tensor has it, and an operator that multiplies took it."""
    reason = "no tensor has it, and it is as large as a workspace of the operator's library"
    yield Claim(Category.WORKSPACE, facts.workspaces, reason)


def find_parameters(facts: Facts, _: Labels) -> Iterator[Claim]:
    """A parameter is held by a module or an optimizer.

    Without either, the leaves that a backward pass gives gradients are the parameters: training on
    plain tensors has no others.
    """
    held = facts.held_as(Category.PARAMETER)
    yield Claim(Category.PARAMETER, held, "a module or an optimizer holds it as a parameter")
    if not (held & facts.counted).any():
        reason = "a backward pass gives it a gradient, and nobody holds any parameters"
        yield Claim(Category.PARAMETER, facts.leaves, reason)


def find_buffers(facts: Facts, _: Labels) -> Iterator[Claim]:
    """A buffer is held by a module. A parameter that is also a buffer stays a parameter."""
    yield Claim(Category.BUFFER, facts.held_as(Category.BUFFER), "a module holds it as a buffer")


def find_optimizer_state(facts: Facts, _: Labels) -> Iterator[Claim]:
    """An optimizer keeps its state between steps."""
    held = facts.held_as(Category.OPTIMIZER_STATE)
    yield Claim(Category.OPTIMIZER_STATE, held, "an optimizer keeps it between its steps")


def find_gradients(facts: Facts, _: Labels) -> Iterator[Claim]:
    """A gradient is in a ``.grad``, on its way there, or returned by ``autograd.grad``.

    A hook may consume a gradient during the backward pass, so that nobody finds it afterwards. Then
    the node that accumulates into the leaf is the witness: what it keeps or adds to is a gradient.

    Three things look like gradients and are steps on the way of others. A custom Function that
    differentiates in its own forward pass uses the result for its output. The leaves of a
    checkpoint's inner backward pass are copies of activations. And what ``autograd.grad`` returned
    may be part of the next graph::

        g, = torch.autograd.grad(h.sum(), w, create_graph=True)
        g.pow(2).sum().backward()  # g is kept for this pass: an activation
    """
    yield Claim(Category.GRADIENT, facts.held_as(Category.GRADIENT), "it was found in a .grad")
    yield Claim(Category.GRADIENT, facts.buckets, "DDP reduces gradients in it")
    reason = "the node that accumulates into a leaf keeps it or adds to it"
    yield Claim(Category.GRADIENT, facts.accumulated & ~facts.roots, reason)
    reason = "autograd.grad returned it, and no graph keeps it"
    yield Claim(Category.GRADIENT, facts.returned & ~facts.saved, reason)


def find_inputs(facts: Facts, labels: Labels) -> Iterator[Claim]:
    """Input is data that was there before, or that the body made out of nothing but data.

    Assumes that everything the model owns is labelled. Data stays data where autograd keeps it. An
    operator on a gradient belongs to an optimizer written by hand, not to the model::

        noise = torch.randn_like(p)     temporary: an intermediate of the optimizer
        p.grad += noise
    """
    given = facts.given & (labels == UNLABELLED)
    yield Claim(Category.INPUT, given, "the forward pass reads it, and it was there before")
    inputs = set(np.flatnonzero(given).tolist())
    from_data = np.zeros(len(labels), np.bool_)
    gradients = set(np.flatnonzero(labels == Category.GRADIENT.column).tolist())
    made = made_from_data(facts.forward_steps(), inputs, facts.has_modules, gradients)
    from_data[list(made)] = True
    reason = "it was made from data alone, before the model reads it"
    yield Claim(Category.INPUT, from_data, reason)


def made_from_data(
    steps: Iterable[Step],
    inputs: set[int],
    has_modules: bool,
    gradients: Set[int] = frozenset(),
) -> set[int]:
    """Return the storages that are data, and that the model reads.

    ``x = torch.randn(...)``, ``y = batch.float() / 255``: made by the body, yet not by the model.
    Data are the ``inputs`` and what operators make out of nothing. With modules, what is computed
    from data before a module sees it is data still. Without any, code and model cannot be told
    apart, and only what came out of nothing counts. Three steps::

        x = torch.rand(8, 8)       reads nothing, makes x:      data {x}
        y = x / 2                  reads x, makes y:            data {x, y}
        z = linear(y)              in a module: used {y}        data and used: {y}

    What reads a gradient outside the model uses nothing, and what it writes to is data no more.
    """
    data, used = set(inputs), set[int]()
    for step in steps:
        others = step.reads.difference(step.makes)
        from_data = others <= data
        updates = step.updates(gradients)
        if step.in_module or not from_data or updates:
            if not updates:
                used |= others
            if not from_data:
                data -= step.writes - inputs
        elif has_modules or not others:
            data.update(step.makes)
        else:
            used |= others
    return data & used


def find_activations(facts: Facts, _: Labels) -> Iterator[Claim]:
    """An activation is what the body computed and autograd keeps for backward.

    The graph itself is the first witness: it was asked what it keeps when backward began. What was
    recomputed did not exist then, and nodes written in C++ do not tell. There, a storage made in a
    forward pass that an operator of the backward pass reads was kept for it.
    """
    if not facts.has_backward:
        return
    yield Claim(Category.ACTIVATION, facts.saved, "an autograd graph keeps it for backward")
    forward = facts.made_in(Phase.FORWARD, Phase.RECOMPUTE)
    # The node that asks for what it saved is the one around the recomputation: what it reads itself
    # dies within it.
    survives = facts.survives | facts.made_in(Phase.RECOMPUTE)
    read_later = forward & facts.read_by_backward & survives & ~facts.roots
    reason = "the forward pass made it, and an operator of the backward pass reads it"
    yield Claim(Category.ACTIVATION, read_later, reason)


def find_autograd_detail(facts: Facts, _: Labels) -> Iterator[Claim]:
    """Autograd's own are gradients of activations: one node of the backward graph hands them on to
    the next.

    A node's result that the engine first sums up to the shape of what was broadcast is not handed
    on; the sum is.
    """
    handed_on = facts.made_in(Phase.BACKWARD) & facts.handed_on
    reason = "one node of the backward graph hands it to the next"
    yield Claim(Category.AUTOGRAD_DETAIL, handed_on, reason)
    reason = "a backward pass begins with it, or goes on with it in the pass around it"
    yield Claim(Category.AUTOGRAD_DETAIL, facts.roots, reason)


def find_temporaries(facts: Facts, _: Labels) -> Iterator[Claim]:
    """Everything else that the body made is temporary."""
    yield Claim(
        Category.TEMPORARY, facts.made, "the body made it, and no graph, module or optimizer has it"
    )


CATEGORY_PASSES: Final[tuple[CategoryPass, ...]] = (
    find_workspaces,
    find_parameters,
    find_buffers,
    find_optimizer_state,
    find_gradients,
    find_inputs,
    find_activations,
    find_autograd_detail,
    find_temporaries,
)
