"""What every allocation of a workload is for, found without the engine that is being graded.

Four things are needed to grade a label: which allocations there were, which are live at the peak,
what each is for, and which allocation of another run is the same one.

* **Allocations and frees** come from a second run under torch's profiler with nothing but
  ``profile_memory=True``: no shapes, no stacks, no analysis. It is started before the workload
  makes anything, so that no free goes unseen.
* **What each is for** comes from those who know, asked while the run goes on: ``named_parameters``,
  ``named_buffers``, ``.grad`` and ``optimizer.state`` of the modules and optimizers that the
  workload declares; hooks on autograd's nodes for the gradients that are handed on; what a
  saved-tensor hook was given *and returned* for what is kept for backward (a checkpoint's hook
  returns a placeholder in the forward pass, and when it recomputes the tensor, or it raises for the
  last one that it needs); the attributes of a custom Function's context; the workload's own word
  for its data. Each answer is (category, data_ptr) at a moment, noted as an annotation in the same
  recording, and so belongs to exactly one lifetime of that pointer.
* What nobody claimed, the body made for itself: TEMPORARY.
* **The same allocation of another run** is the one with the same number. Programs on a CPU allocate
  in the same order each time; the sizes, compared one by one, prove it. A hook that disturbed
  what it looks at would show as a difference too.

Where several claim a storage, the first in `RANKING` is right: a parameter that is saved for
backward is a parameter.

Not seen: autograd tells no hook about numbers that became tensors (``x * 3.0`` keeps 8 bytes), so
these count as wrong where the engine calls them ACTIVATION, which they are.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch._C._profiler import _RecordFunctionFast
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from benchmarks.workloads import Declarations, Workload
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.values.contributors import Category

T = TypeVar("T")

RANKING = (
    Category.PARAMETER,
    Category.BUFFER,
    Category.OPTIMIZER_STATE,
    Category.GRADIENT,
    Category.INPUT,
    Category.ACTIVATION,
    Category.AUTOGRAD_DETAIL,
)
_NOTE = "label truth note "


@dataclass(slots=True)
class Storage:
    """One storage: what it asked for, and all that was said about it."""

    size_bytes: int
    claims: set[Category] = field(default_factory=set)

    def category(self, has_backward: bool) -> Category:
        for category in RANKING:
            # By definition nothing is kept for a backward pass that never comes.
            if category in self.claims and (has_backward or category is not Category.ACTIVATION):
                return category
        return Category.TEMPORARY


@dataclass(frozen=True, slots=True)
class Truth:
    """What a body did.

    Attributes:
        sizes: Bytes of each allocation of the body, in order.
        labels: What each of them is for.
        peak: Bytes by category at the largest footprint.
        own_peaks: Each category's own largest value over time.
    """

    sizes: tuple[int, ...]
    labels: tuple[Category, ...]
    peak: dict[Category, int]
    own_peaks: dict[Category, int]


class Declared(Declarations):
    """Keeps the modules, optimizers and tensors that a workload declares, without owning them."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[Any]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._tensors: list[tuple[Category, weakref.ref[Any]]] = []

    def model(self, model: T) -> T:
        self._modules.append(weakref.ref(model))
        return model

    def optimizer(self, optimizer: T) -> T:
        self._optimizers.append(weakref.ref(optimizer))
        return optimizer

    def input(self, tensor: T) -> T:
        return self.claim(Category.INPUT, tensor)

    def parameter(self, tensor: T) -> T:
        return self.claim(Category.PARAMETER, tensor)

    def gradient(self, tensor: T) -> T:
        return self.claim(Category.GRADIENT, tensor)

    def kept(self, tensor: T) -> T:
        return self.claim(Category.ACTIVATION, tensor)

    def claim(self, category: Category, tensor: T) -> T:
        if category in (Category.INPUT, Category.PARAMETER):
            self._tensors.append((category, weakref.ref(tensor)))
        return tensor

    def holdings(self) -> Iterator[tuple[Category, torch.Tensor]]:
        """What is held now, and as what."""
        for module in _alive(self._modules):
            for parameter in module.parameters():
                yield from _with_gradient(Category.PARAMETER, parameter)
            for buffer in module.buffers():
                yield Category.BUFFER, buffer
        for category, reference in self._tensors:
            if (tensor := reference()) is not None:
                yield from _with_gradient(category, tensor)
        for optimizer in _alive(self._optimizers):
            for leaf in tree_leaves(list(optimizer.state.values())):
                if isinstance(leaf, torch.Tensor):
                    yield Category.OPTIMIZER_STATE, leaf

    def pointers(self) -> dict[int, Category]:
        """The holdings by pointer, for telling what was there before a body began."""
        found: dict[int, Category] = {}
        for category, tensor in self.holdings():
            for pointer in _pointers(tensor):
                if pointer not in found or RANKING.index(category) < RANKING.index(found[pointer]):
                    found[pointer] = category
        return found


def _alive(references: list[weakref.ref[Any]]) -> Iterator[Any]:
    return (thing for reference in references if (thing := reference()) is not None)


def _with_gradient(
    category: Category, tensor: torch.Tensor
) -> Iterator[tuple[Category, torch.Tensor]]:
    yield category, tensor
    if tensor.is_leaf and tensor.grad is not None:
        yield Category.GRADIENT, tensor.grad


def _pointers(tensor: Any) -> Iterator[int]:
    """Where the storage of a tensor begins; of a sparse one, that of its values.

    Its indices may be somebody else's: those of an embedding's gradient are the input itself.
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        yield from _pointers(tensor._values())
        return
    # Never the storage itself: one with a Python object is no longer autograd's alone, and sums of
    # gradients are then made in new memory instead of in place.
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # a compiler's stand-in for a tensor
        return
    if pointer:
        yield pointer - tensor.storage_offset() * tensor.element_size()


class Witness(Declared):
    """Notes in a running recording what each tensor is for."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Category | None, int]] = []
        self.has_backward = False

    def note(self, category: Category | None, pointer: int = 0) -> None:
        self.notes.append((category, pointer))
        with _RecordFunctionFast(f"{_NOTE}{len(self.notes) - 1}"):
            pass

    def claim(self, category: Category, tensor: T) -> T:
        super().claim(category, tensor)
        for pointer in _pointers(tensor):
            self.note(category, pointer)
        return tensor

    def model(self, model: T) -> T:
        super().model(model)
        self.look()
        for parameter in model.parameters():  # type: ignore[attr-defined]
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)
        return model

    def look(self) -> None:
        """Note all that is held now."""
        for category, tensor in self.holdings():
            for pointer in _pointers(tensor):
                self.note(category, pointer)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Follow backward passes, optimizer steps and what is saved, until the block ends."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        step = register_optimizer_step_post_hook(lambda *_: self.look())
        try:
            with (
                mock.patch.object(hooks, "__init__", self._watched_hooks(hooks.__init__)),
                mock.patch("torch.autograd.backward", self._watched(torch.autograd.backward)),
                mock.patch("torch.autograd.grad", self._watched(torch.autograd.grad)),
            ):
                yield
        finally:
            step.remove()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            for pointer in _pointers(parameter.grad):
                self.note(Category.GRADIENT, pointer)

    def _watched_hooks(self, initialize: Callable[..., None]) -> Callable[..., None]:
        """Note what pack hooks return, whoever installs them."""

        def initialize_and_watch(hooks: Any, pack: Any, unpack: Any) -> None:
            def watched_pack(tensor: torch.Tensor) -> Any:
                try:
                    packed = pack(tensor)
                except Exception:
                    # A checkpoint keeps the last tensor that it needs and stops by raising.
                    self.claim(Category.ACTIVATION, tensor)
                    raise
                if isinstance(packed, torch.Tensor):
                    self.claim(Category.ACTIVATION, packed)
                return packed

            initialize(hooks, watched_pack, unpack)

        return initialize_and_watch

    def _watched(self, differentiate: Callable[..., Any]) -> Callable[..., Any]:
        def differentiate_and_watch(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.has_backward = True
            self.look()
            nodes = _nodes([outputs] if isinstance(outputs, torch.Tensor) else list(outputs))
            for value in (v for node in nodes for v in _attributes(node)):
                self.claim(Category.ACTIVATION, value)
            handles = [handle for node in nodes for handle in self._hook(node)]
            try:
                return differentiate(outputs, *args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()
                self.look()

        return differentiate_and_watch

    def _hook(self, node: Any) -> Iterator[Any]:
        # What reaches a node includes the engine's own sums, and the gradient of the root.
        yield node.register_prehook(self._on_handed_on)
        if not hasattr(node, "variable"):
            yield node.register_hook(lambda given, _: self._on_handed_on(given))

    def _on_handed_on(self, gradients: Any) -> None:
        for gradient in gradients:
            if gradient is not None:
                self.claim(Category.AUTOGRAD_DETAIL, gradient)


def _nodes(roots: list[torch.Tensor]) -> list[Any]:
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = {id(node): node for node in waiting}
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and id(following) not in seen:
                seen[id(following)] = following
                waiting.append(following)
    return list(seen.values())


def _attributes(node: Any) -> list[torch.Tensor]:
    """Tensors in the attributes of a custom Function's context, where no hook sees them."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    return [value for value in vars(node).values() if isinstance(value, torch.Tensor)]


def find_truth(workload: Workload, hooks_allowed: bool = True) -> Truth:
    """Run the workload and return what its body did.

    Without ``hooks_allowed`` saved tensors are only known from the workload's own word.
    """
    witness = Witness()
    hooks = torch.autograd.graph.saved_tensors_hooks
    with (
        gc_paused(),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile,
        witness.listening(),
        hooks(_same, _same) if hooks_allowed else nullcontext(),
    ):
        body = workload(witness)
        witness.look()
        witness.has_backward = False
        witness.note(None)
        body()
        witness.note(None)
    result = profile.profiler.kineto_results
    return _replay(witness, allocation_log(result.experimental_event_tree()))


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def allocation_log(roots: Any) -> list[Any]:
    """A profile's allocations, frees and our notes, in the order of time."""
    waiting, found = list(roots), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" or event.name.startswith(_NOTE):
            found.append(event)
    found.sort(key=lambda event: event.start_time_ns)
    return found


def _replay(witness: Witness, log: list[Any]) -> Truth:
    live: dict[int, Storage] = {}
    # Each entry: the storage, and whether it is born (+1) or dies (-1).
    changes: list[tuple[Storage, int]] = []
    before: dict[int, Storage] = {}
    made: list[Storage] = []
    inside = False
    for event in log:
        if event.name != "[memory]":
            category, pointer = witness.notes[int(event.name.removeprefix(_NOTE))]
            if category is not None:
                if pointer in live:
                    live[pointer].claims.add(category)
            elif inside:
                break
            else:
                inside, before = True, dict(live)
            continue
        fields = event.typed[1]
        if fields.alloc_size > 0:
            storage = live[fields.ptr] = Storage(fields.alloc_size)
            if inside:
                made.append(storage)
                changes.append((storage, +1))
        elif (freed := live.pop(fields.ptr, None)) is not None and inside:
            changes.append((freed, -1))
    owned = [s for s in before.values() if s.claims & set(RANKING[:5])]
    return _summed(owned, made, changes, witness.has_backward)


def _summed(
    owned: list[Storage],
    made: list[Storage],
    changes: list[tuple[Storage, int]],
    has_backward: bool,
) -> Truth:
    """Add up over time. Of what was there before, only what somebody owns is the body's concern."""
    now = dict.fromkeys(Category, 0)
    counted = {id(storage) for storage in itertools.chain(owned, made)}
    for storage in owned:
        now[storage.category(has_backward)] += storage.size_bytes
    peak, own_peaks = dict(now), dict(now)
    for storage, sign in changes:
        if id(storage) in counted:
            category = storage.category(has_backward)
            now[category] += sign * storage.size_bytes
            own_peaks[category] = max(own_peaks[category], now[category])
            if sum(now.values()) > sum(peak.values()):
                peak = dict(now)
    return Truth(
        tuple(storage.size_bytes for storage in made),
        tuple(storage.category(has_backward) for storage in made),
        peak,
        own_peaks,
    )
