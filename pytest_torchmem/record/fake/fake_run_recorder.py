"""Records what an eager program does with memory while it runs on fake tensors.

The program itself runs: Python drops its references, autograd saves tensors and lets go of them
node by node, checkpointing recomputes. Only the operators have no data to work on. A storage lives
from the operator that returned it until its C++ object dies, which a weak reference reports: these
are the lifetimes of the eager program, not what a graph would permit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from pytest_torchmem.record.fake.doubts import Doubt, Doubts
from pytest_torchmem.record.fake.explained import RAGGED
from pytest_torchmem.record.fake.kernels.operator_call import Arguments, Call
from pytest_torchmem.record.fake.kernels.scratch import DECIDED_BY_VALUES, kept_bytes, scratch_of
from pytest_torchmem.record.fake.known_values import KnownValues
from pytest_torchmem.record.fake.ledger import Given, Ledger, LedgerEntry
from pytest_torchmem.record.fake.origin import CallSites, passing_answer
from pytest_torchmem.record.fake.stand_ins import compositions
from pytest_torchmem.record.fake.stand_ins.compositions import adds_in_place
from pytest_torchmem.record.fake.stand_ins.fast_paths import made_of_others
from pytest_torchmem.record.fake.stand_ins.layouts import as_on_the_cpu
from pytest_torchmem.record.owners.autograd_graph import nodes_below
from pytest_torchmem.record.torch_api import autograd, compiler, dispatcher, fake_tensors
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.static_graph import (
    Lifetimes,
    NodeKind,
    StaticGraph,
    StaticNode,
    StaticStorage,
)

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Backward formulas that fill a gradient of zeros: out of place only for subclasses.
_FILLING = frozenset(
    {"aten::scatter", "aten::scatter_add", "aten::index_put", "aten::index_add", "aten::put"}
)
# The gradient of this loss is computed in the memory of its first product.
_IN_PLACE_NODE = "BinaryCrossEntropyWithLogitsBackward0"
_IN_PLACE = frozenset({"aten::sub", "aten::mul"})
_INDEXING = frozenset(
    {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
)
_ZEROS = frozenset({"aten::zeros", "aten::new_zeros", "aten::zeros_like"})

_RESIZED = (
    "the program resizes the storage of a tensor that it holds where nobody can replace it; let "
    "the tensor be an argument of the program or a buffer of a module, or measure with "
    "pytest_torchmem.measure"
)
_Resize = Callable[[torch.UntypedStorage, int], object]


class FakeRunRecorder(fake_tensors.DispatchMode):  # type: ignore[misc]
    """Records every operator that runs while it is entered inside a `FakeTensorMode`.

    ``fake_of`` turns a real tensor into the fake that stands for it, whose values ``values`` may
    know; ``module_names`` has the paths of modules by ``id``; ``threads`` gets those in which it is
    entered; ``leaves_are_parameters`` says that there is no module whose parameters they would be;
    ``stand_in`` is a device that is not there and the one that stands for it.
    """

    def __init__(
        self,
        fake_of: Callable[[torch.Tensor], torch.Tensor],
        module_names: dict[int, str],
        values: KnownValues,
        threads: set[int],
        *,
        leaves_are_parameters: bool,
        stand_in: tuple[torch.device, torch.device] | None = None,
    ) -> None:
        super().__init__()
        # Higher-order operators come here, too: each is refused.
        self.supports_higher_order_operators = True
        self._leaves_are_parameters = leaves_are_parameters
        self._stand_in = stand_in
        self.notes: set[str] = set()
        self._fake_of = fake_of
        self._values = values
        self._threads = threads
        self._ledger = Ledger(self._note_end_of_backward)
        self.given = Given(self._ledger)
        self._nodes: list[StaticNode] = []
        self._sites = CallSites(module_names)
        self._made_in_backward: dict[int, StaticNode] = {}
        self._freed: set[int] = set()
        self._made_of: dict[int, tuple[int, ...]] = {}
        self.numbers_bytes = 0
        self._doubts = Doubts(self._is_doubted)

    # What happened.

    @property
    def stands_in(self) -> bool:
        """True where the fakes are on another device than the one that is estimated for."""
        return self._stand_in is not None

    def finish(self) -> None:
        """Stop watching. What is alive now counts as never released."""
        self._note_end_of_backward()
        self._ledger.watches.clear()
        self.given.finish()

    @property
    def recorded(self) -> tuple[StaticGraph, Lifetimes]:
        """The graph and the lifetimes that were recorded until `finish`."""
        same = self._ledger.join_taken_over()
        storages = tuple(
            StaticStorage(e.size_bytes, e.device, e.category, e.doubted_bytes)
            for e in self._ledger.entries
        )
        nodes = (_of_one_memory(node, same) for node in self._nodes)
        return StaticGraph((*self.given.nodes, *nodes), storages), self._ledger.lifetimes()

    def has_freed(self, tensor: torch.Tensor) -> bool:
        """Return whether a backward pass has let go of a part of the graph of a tensor."""
        return any(autograd.sequence_number(node) in self._freed for node in nodes_below([tensor]))

    # Who owns what.

    def label(self, tensor: torch.Tensor, category: Category) -> None:
        """Say what a tensor is for. The first word about a storage stands."""
        number = self._ledger.number(tensor)
        if number is None:
            self.given.own(tensor, category)
        elif self._ledger.entries[number].category in (Category.UNKNOWN, Category.INPUT):
            self._ledger.entries[number].category = category

    def enter_module(self, module: torch.nn.Module, *_: object) -> None:
        self.given.called(module)
        if self._sites.enter(module):
            return
        # Made inside the program, so nobody could say what its tensors are for beforehand.
        owned = (
            (Category.PARAMETER, module.parameters(recurse=False)),
            (Category.BUFFER, module.buffers(recurse=False)),
        )
        for category, tensors in owned:
            for tensor in tensors:
                # What a transform wraps has no storage to ask for.
                if not autograd.is_wrapper(tensor):
                    self.label(tensor, category)

    def leave_module(self, module: torch.nn.Module, *_: object) -> None:
        self._sites.leave(module)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._sites.optimizers += 1
        self.given.stepped(optimizer)

    def leave_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._sites.optimizers -= 1
        for state in list(optimizer.state.values()):
            for tensor in fake_tensors.tensors_in(state):
                self.label(tensor, Category.OPTIMIZER_STATE)

    def made_outside(self, tensor: torch.Tensor, operator: str) -> None:
        """Record a tensor that C++ made on the CPU without the dispatcher noticing."""
        if self._stand_in is not None:
            return
        made = self._ledger.add(tensor, Category.UNKNOWN, 2 * self._ledger.operator_count + 1)
        self._append(operator, sys._getframe().f_back, makes=(made,))

    def resizing(self, resize: _Resize) -> _Resize:
        """Follow storages that the program gives another size, without an operator."""
        thread = get_ident()

        def resized(storage: torch.UntypedStorage, size: int) -> object:
            if get_ident() != thread:
                return resize(storage, size)
            if storage.device.type != "meta":  # it has memory
                raise EstimateError(_RESIZED)
            number = self.given.used(storage)
            done = resize(storage, size)
            if number is None:
                # It counts from its first use, with the size that it has then. torch itself makes
                # fake tensors of real ones so.
                return done
            made = self._ledger.resized(storage, number, 2 * self._ledger.operator_count + 1)
            if made is not None:
                self._append("storage.resize_", sys._getframe().f_back, (made,), (number,))
            return done

        return resized

    def moving(
        self, plain: Callable[..., torch.Tensor], tensor: torch.Tensor, *to: object, **how: object
    ) -> torch.Tensor:
        """Doubt what a moved tensor is made of: a real one may have that on another device.

        Where a parameter is in it, it is where the program computes, and nothing is moved.
        """
        made = plain(tensor, *to, **how)
        moves = to or how.get("device") is not None
        follows = moves and not autograd.is_wrapper(tensor)
        number = self._ledger.number(tensor) if follows else None
        if number is None or tensor.requires_grad:
            return made
        below, waiting = {number}, [number]
        for other in waiting:
            new = [used for used in self._made_of.get(other, ()) if used not in below]
            below.update(new)
            waiting += new
        entries = self._ledger.entries
        if not any(entries[n].category is Category.PARAMETER for n in below):
            if self._ledger.number(made) == number:
                below.remove(number)
            self._ledger.doubt(n for n in below if entries[n].size_bytes)
        return made

    # What an operator does.

    def __torch_dispatch__(
        self,
        func: dispatcher.Operator,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs, name = kwargs or {}, _name_of(func)
        self._threads.add(get_ident())
        if getattr(func, "namespace", "") == "prim":
            # A question about a device, say: it reads nothing, and C++ that asks takes no error.
            return func(*args, **kwargs)
        _require_runs_once(func)
        if dispatcher.is_composed(func):
            # In inference mode operators come before they are made of others.
            if any(getattr(given, "is_nested", False) for given in args):
                raise EstimateError(RAGGED)
            with self:
                return compositions.run(func, *args, **kwargs)
        if (made := made_of_others(func)) is not None:
            args, kwargs = self._with_fakes(args, kwargs)
            with self:
                return made(*args, **kwargs)
        if (known := self._taken_for(func, args, sys._getframe().f_back)) is not None:
            return known
        if self._stand_in is not None and self._means_missing(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._stand_in[1]}
        uses: tuple[int, ...] = ()
        _require_no_history(func, args)
        if func not in fake_tensors.LIFTS:
            args, kwargs = self._with_fakes(args, kwargs)
            args = self._places_of_masks(name, args)
            given = fake_tensors.tensors_in((args, kwargs))
            uses = tuple(dict.fromkeys(map(self.given.number, given)))
        out = self._values.run(func, name, args, kwargs)
        if self._stand_in is None:
            out = as_on_the_cpu(name, args, out)
        call = Call(func, name, args, kwargs, fake_tensors.tensors_in(out))
        self._record(call, uses, sys._getframe().f_back)
        return out

    def _taken_for(
        self, func: object, args: tuple[Any, ...], caller: FrameType | None
    ) -> float | None:
        """Return the number that a tensor is taken to have for its caller; None where it counts."""
        is_asked = func is fake_tensors.LOCAL_SCALAR
        if is_asked and self._stands_in(args[0]):
            return 1.0
        answer = passing_answer(caller) if is_asked else None
        if answer is not None:
            self.notes.add("the checks of torch.distributions and losses are taken to pass")
        return answer

    def _places_of_masks(self, name: str, args: Arguments) -> tuple[Any, ...]:
        """The numbers of what a mask chooses, as kernels look them up, where the mask is known."""
        filled = name != "aten::index" and name in _INDEXING and args[2].numel() == 1
        if name not in _INDEXING or filled or not any(map(_is_mask, args[1])):
            return (*args,)
        places: list[torch.Tensor | None] = []
        for index in args[1]:
            if not _is_mask(index) or self._values.of(index) is None:
                places.append(index)
                continue
            with self:
                found = torch.ops.aten.nonzero(index)
                places += [found.select(1, dim) for dim in range(index.dim())]
        return (args[0], places, *args[2:])

    def _record(self, call: Call, uses: tuple[int, ...], caller: FrameType | None) -> None:
        """Note an operator that has run: what it used, made and wrote to, and its scratch."""
        func, tensors = call.func, call.outputs
        self._require_runnable(tensors)
        self.numbers_bytes += call.numbers_bytes
        self._resize(call)
        makes = self._made(tensors, has_memory=_takes_memory(call))
        summed = self._note_in_place_for_real(call, makes)
        scope = _scope_of(autograd.running_node())
        doubt = self._doubts.about(call, scope, on_cpu=bool(tensors) and self._on_cpu(call))
        scratch, unknown_bytes = self._scratch(call, doubt)
        if doubt is not None and not doubt.is_sure:
            self._ledger.doubt(makes)
        self._append(
            call.name,
            caller,
            (*makes, *scratch),
            uses,
            self._numbers(tensors) if dispatcher.writes_in_place(func) else (),
            summed=summed,
            unknown_bytes=unknown_bytes,
            unknown_by_values=doubt is not None or call.name in DECIDED_BY_VALUES,
        )
        self._label_made(tensors)

    def _label_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Give the last operator's outputs the labels that only this moment can tell."""
        node = self._nodes[-1]
        if node.scope.startswith(_ACCUMULATE_GRAD):
            category = Category.GRADIENT
        elif node.phase is Phase.BACKWARD and not node.scope:
            # The first gradient. ``backward()`` holds it to its end, but it is nobody's gradient.
            category = Category.AUTOGRAD_DETAIL
        else:
            return
        for tensor in tensors:
            self.label(tensor, category)

    def _with_fakes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Real tensors the program holds (a constant, a captured table) turned into fake ones."""
        tensors = fake_tensors.tensors_in((args, kwargs))
        if not all(isinstance(t, fake_tensors.FakeTensor) for t in tensors):
            args, kwargs = fake_tensors.map_tensors(self._faked, (args, kwargs))
        return args, kwargs

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, fake_tensors.FakeTensor) or self._ledger.number(tensor) is not None:
            return tensor
        fake = self._fake_of(tensor)
        if self._leaves_are_parameters and tensor.requires_grad and tensor.is_leaf:
            self.given.own(fake, Category.PARAMETER)
        return fake

    def _made(self, tensors: Iterable[torch.Tensor], *, has_memory: bool = True) -> tuple[int, ...]:
        row = 2 * self._ledger.operator_count + 1
        made = []
        for tensor in tensors:
            known = self._ledger.number(tensor)
            number = (
                self._ledger.add(tensor, Category.UNKNOWN, row, has_memory=has_memory)
                if known is None
                else self._ledger.resized(tensor.untyped_storage(), known, row)
            )
            if number is not None:
                made.append(number)
        return tuple(made)

    def _note_in_place_for_real(self, call: Call, makes: tuple[int, ...]) -> bool:
        """Return whether autograd adds up gradients here, between two nodes.

        Where a function adds in place to a tensor of its own, the sum takes over its memory, too.

        Autograd avoids writing into tensors of subclasses, which fake ones are. With real ones
        it adds gradients up in place, and fills a gradient of zeros in place.

        See ``accumulate`` in ``torch/csrc/autograd/input_buffer.cpp`` and
        ``areAnyTensorSubclassLike`` in ``torch/csrc/autograd/FunctionsManual.cpp``.
        """
        name, args = call.name, call.args
        old = self._ledger.number(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if not makes or old is None:
            return False
        if name == "aten::add" and adds_in_place():
            self._ledger.may_take_over(old, makes[0])
        maker = self._made_in_backward.get(old)
        if maker is None or not autograd.in_backward() or torch.is_grad_enabled():
            return False
        scope = _scope_of(autograd.running_node())
        if scope.startswith(_IN_PLACE_NODE) and name in _IN_PLACE and maker.scope == scope:
            # One expression of C++, which keeps each fake to its end.
            self._ledger.take_over(old, makes[0])
            return False
        fills = name in _FILLING and maker.operator in _ZEROS and maker.scope == scope
        # Two gradients of one node meet only if two of its edges lead to the same place.
        meets = maker.scope != scope or autograd.has_parallel_edges()
        adds = name == "aten::add" and meets
        if fills or (adds and _adds_alike(args)):
            self._ledger.may_take_over(old, makes[0])
        return adds

    def _resize(self, call: Call) -> None:
        """Give outputs the storages that the kernel leaves them."""
        if call.outputs:
            for place, size_bytes in kept_bytes(call, on_cpu=self._on_cpu(call)).items():
                fake_tensors.resize(call.outputs[place], size_bytes)

    def _scratch(self, call: Call, doubt: Doubt | None) -> tuple[tuple[int, ...], int]:
        """Record what an operator takes for itself; return it, and how much more that may be."""
        if not call.outputs:
            return (), 0
        scratch = scratch_of(call, on_cpu=self._on_cpu(call))
        size, at_most = scratch.bytes_, scratch.at_most_bytes
        if doubt is not None:
            size = size * doubt.is_sure + doubt.taken_bytes
            at_most += doubt.taken_bytes + doubt.unknown_bytes
        if not size:
            return (), at_most
        row = 2 * self._ledger.operator_count + 1
        beside = str(call.outputs[0].device)
        entry = LedgerEntry(size, beside, Category.TEMPORARY, row, row + 1)
        return (self._ledger.append(entry),), at_most - size

    def _is_doubted(self, tensor: torch.Tensor) -> bool:
        number = self._ledger.number(tensor)
        return number is not None and self._ledger.entries[number].doubted_bytes > 0

    def _on_cpu(self, call: Call) -> bool:
        return call.outputs[0].device.type == "cpu" and self._stand_in is None

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
        found = (self._ledger.number(t) for t in tensors)
        return tuple(dict.fromkeys(n for n in found if n is not None))

    def _append(
        self,
        operator: str,
        frame: FrameType | None,
        makes: tuple[int, ...] = (),
        uses: tuple[int, ...] = (),
        writes: tuple[int, ...] = (),
        *,
        summed: bool = False,
        unknown_bytes: int = 0,
        unknown_by_values: bool = False,
    ) -> None:
        phase, module, source = self._sites.of(frame)
        # The engine still names the node that it adds up the outputs of.
        node = autograd.running_node()
        scope = _scope_of(node) + ("+sum" if summed else "")
        # A leaf's node is in every graph of it, and has saved nothing.
        if scope and node[0] != _ACCUMULATE_GRAD and autograd.frees_graph():
            self._freed.add(node[1])
        self._nodes.append(
            StaticNode(
                name=operator,
                kind=NodeKind.OPERATOR,
                operator=operator,
                module=module,
                source=source,
                phase=phase,
                makes=makes,
                # The first gradient takes its shape from the loss: nothing of it is read.
                uses=uses if scope or phase is not Phase.BACKWARD else (),
                writes=writes,
                scope=scope,
                unknown_bytes=unknown_bytes,
                unknown_by_values=unknown_by_values,
            )
        )
        self._ledger.operator_count += 1
        self._made_of.update(dict.fromkeys(makes, uses))
        if phase is Phase.BACKWARD:
            self._made_in_backward.update(dict.fromkeys(makes, self._nodes[-1]))

    def _note_end_of_backward(self) -> None:
        """Tell what dies with the backward from what dies after it, before any other operator."""
        if self._nodes and self._nodes[-1].scope and not autograd.in_backward():
            self._nodes.append(StaticNode("end of backward", NodeKind.OPERATOR))
            self._ledger.operator_count += 1

    # What cannot be done.

    def _means_missing(self, device: object) -> bool:
        if device is None or self._stand_in is None:
            return False
        return torch.device(str(device)).type == self._stand_in[0].type

    def _stands_in(self, tensor: torch.Tensor) -> bool:
        """Return whether a number may stand for a value that nobody knows.

        Optimizers read norms and ratios to scale an update by: no size depends on them.
        """
        known = self._values.of(tensor) is not None
        if known or not self._sites.optimizers or not tensor.dtype.is_floating_point:
            return False
        self.notes.add("the optimizer reads values of tensors; 1.0 stood in for each of them")
        return True

    def _require_runnable(self, tensors: Iterable[torch.Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        kinds = {tensor.device.type for tensor in tensors}
        if missing := next(filter(fake_tensors.lacks_device, kinds), ""):
            raise EstimateError(
                f"the program makes tensors on {missing} and records them for a backward pass, "
                "which autograd cannot follow without such a device; make them on the device of "
                f"the inputs and pass device={missing!r} to estimate"
            )


def _require_runs_once(func: dispatcher.Operator) -> None:
    """Raise `EstimateError` for operators that call functions, and while a graph is traced."""
    if dispatcher.is_of_functions(func):
        raise EstimateError(
            f"the program calls {_name_of(func)}, which chooses, repeats or compiles functions of "
            "the program, and an estimate cannot follow it; "
            "`pytest --torchmem-simulate=H100` measures it on a simulated GPU, and "
            "pytest_torchmem.measure on this device"
        )
    if compiler.is_tracing():
        raise EstimateError(
            "the program traces a graph (torch.export, make_fx, torch.func.linearize), which keeps "
            "other tensors where they are fake; trace it before and give the graph to "
            "estimate_graph, or measure with pytest_torchmem.measure"
        )


def _require_no_history(func: dispatcher.Operator, args: Sequence[Any]) -> None:
    """Raise `EstimateError` where autograd would give a real tensor a history of fake ones.

    ``cache[:, place] = key`` does: the history of a view is that of the tensor it looks into.
    """
    if not (torch.is_grad_enabled() and dispatcher.writes_in_place(func)):
        return
    written, read = map(fake_tensors.tensors_in, (args[:1], args[1:]))
    wholes = map(fake_tensors.whole_of, written)
    real = any(not isinstance(whole, fake_tensors.FakeTensor) for whole in wholes)
    if real and any(tensor.requires_grad for tensor in read):
        raise EstimateError(
            "the program writes values that have a gradient into a tensor that was there before, "
            "which would keep their graph; make that tensor in the program, give it as an "
            "argument or a module's buffer, or write under torch.no_grad()"
        )


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _takes_memory(call: Call) -> bool:
    """Return whether torch allocates what an operator returns."""
    if call.func in fake_tensors.LIFTS:
        return bool(call.args[0].untyped_storage().resizable())  # not numpy's
    return call.func is not fake_tensors.ZEROS_WITHOUT_MEMORY


def _of_one_memory(node: StaticNode, same: dict[int, int]) -> StaticNode:
    """Let a node that made a storage in the memory of another one write to that one instead."""
    if same.keys().isdisjoint((*node.makes, *node.uses)):
        return node
    written = [*node.writes, *filter(same.__contains__, node.makes)]
    return replace(
        node,
        makes=tuple(number for number in node.makes if number not in same),
        uses=tuple(dict.fromkeys(same.get(number, number) for number in node.uses)),
        writes=tuple(dict.fromkeys(same.get(number, number) for number in written)),
    )


def _name_of(func: dispatcher.Operator) -> str:
    schema = dispatcher.schema_of(func)
    return str(schema.name) if schema is not None else str(func)


def _scope_of(node: tuple[str, int]) -> str:
    name, sequence = node
    return f"{name}:{sequence}" if name else ""


def _adds_alike(args: Sequence[Any]) -> bool:
    """Return whether two tensors are added that could share their memory with the sum."""
    if len(args) != 2 or not all(isinstance(a, torch.Tensor) for a in args):
        return False
    left, right = args
    alike = left.shape == right.shape and left.dtype == right.dtype
    # A view of a part, or of one row repeated, is no place for a whole sum; and any view keeps the
    # tensor that it looks into, so that nobody holds the memory alone (``t()`` after ``mm``).
    whole = left.numel() * left.element_size() == left.untyped_storage().nbytes()
    return bool(alike and whole and not fake_tensors.makes_view(left))
