"""Notes the owners of storages: modules, optimizers, gradients, the autograd graph.

The event tree says what operators did, not what a tensor is for. These are the facts that torch
itself holds, noted at the moments when they are sure to be true: when a module gets its parameters,
when a backward pass begins and ends, after an optimizer's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from threading import get_ident
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import GradientEdge

from pytest_torchmem.record.devices import device_name
from pytest_torchmem.record.owners.autograd_graph import (
    GraphHoldings,
    graph_holdings,
)
from pytest_torchmem.record.owners.live_objects import Live, find_live
from pytest_torchmem.record.owners.places import (
    ORDINARY,
    answers,
    data_ptr,
    places_of,
    plain_tensors,
    storages_of,
    tensors_within,
    values_of,
)
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.quiet import quiet
from pytest_torchmem.record.recorded_tables import Rows, StringTable
from pytest_torchmem.record.torch_api import autograd, memory
from pytest_torchmem.record.torch_api.modules import (
    CONVERT,
    buffers_of,
    groups_of,
    main_gradient_of,
    own_values_of,
    parameters_of,
    state_of,
    submodules_of,
)
from pytest_torchmem.values.trace import CREATE_GRAPH, MODULE_EDGE, OWNER, MarkKind, Ownership

# Notes of a storage that say how large it is.
_WITH_BYTES: Final = (Ownership.LIVE, Ownership.SURVIVOR)
_GRADIENTS: Final = (Ownership.GRADIENT, Ownership.RETURNED)

_Run: TypeAlias = Callable[..., tuple[torch.Tensor | None, ...]]
"""Has the engine run a backward pass, and returns the gradients that were asked for."""


@dataclass(slots=True)
class OwnershipLog:
    """Rows of `trace.OWNER` and `trace.MODULE_EDGE` in the making."""

    strings: StringTable
    devices: StringTable
    owners: Rows = field(default_factory=partial(Rows, OWNER))
    edges: Rows = field(default_factory=partial(Rows, MODULE_EDGE))

    def owner(
        self, mark: int, kind: Ownership, tensor: object, module: int = 0, name: str = ""
    ) -> None:
        """Note that ``tensor``'s storage is held as ``kind``; one without storage is skipped.

        Bytes are noted for LIVE, the mark at which a storage is met first, and for SURVIVOR.
        """
        number, rest = self.devices.number, (module, self.strings.number(name))
        if kind in _WITH_BYTES:
            for device, ptr, size_bytes in storages_of(tensor):
                self.owners.append((mark, kind, number(device), ptr, size_bytes, *rest))
            return
        if kind in _GRADIENTS and type(tensor) is torch.Tensor and tensor.is_sparse:
            # The indices of an embedding's sparse gradient are the input that was looked up.
            tensor = values_of(tensor)
        for device, ptr in places_of(tensor):
            self.owners.append((mark, kind, number(device), ptr, 0, *rest))

    def owned(self, mark: int, kind: Ownership, tensors: Iterable[object]) -> None:
        """Note several tensors as `owner` does one."""
        for tensor in tensors:
            self.owner(mark, kind, tensor)

    def edge(self, mark: int, child: object, parent: object | None, name: str) -> None:
        number = self.strings.number
        parent_id = 0 if parent is None else id(parent)
        self.edges.append((mark, id(child), parent_id, number(name), number(type(child).__name__)))


class _Known(NamedTuple):
    """A module that was met.

    Attributes:
        number: Its own, as its ``id()`` is not.
        noted: What it held under a name when that was noted last, where that can be known to be the
            same later: a module's number and class, a parameter's address, a buffer's below 0.
    """

    module: weakref.ref[torch.nn.Module]
    number: int
    noted: dict[str, int]


class KnownModules:
    """The modules that were met, by identity: a dataclass has no hash. It keeps none alive."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._numbers = count()

    def update(self, modules: Iterable[torch.nn.Module]) -> None:
        for module in modules:
            if self.get(module) is None:
                entry = _Known(weakref.ref(module), next(self._numbers), {})
                self._known[id(module)] = entry

    def get(self, module: torch.nn.Module) -> _Known | None:
        """Return what is known of a module; None for one that was not met."""
        entry = self._known.get(id(module))
        return entry if entry is not None and entry.module() is module else None

    def alive(self) -> list[tuple[torch.nn.Module, _Known]]:
        """Return those that live; the others are forgotten."""
        found = [(m, entry) for entry in self._known.values() if (m := entry.module()) is not None]
        self._known = {id(module): entry for module, entry in found}
        return found


class OwnershipWatch:
    """Follows modules, optimizers and backward passes while a body runs, and logs what they own.

    ``mark(kind, text)`` notes a moment in the recording and returns its number.
    """

    def __init__(
        self,
        log: OwnershipLog,
        mark: Callable[[MarkKind, str], int],
        sees_end: Callable[[torch.UntypedStorage], bool] = lambda _: False,
    ) -> None:
        self._log = log
        self._sees_end = sees_end
        self._mark = mark
        self._modules = KnownModules()
        self._compiled_ran = False
        self._storages: dict[tuple[int, int], weakref.ref[torch.UntypedStorage]] = {}
        self._depth = 0

    def install(self, patches: Installed) -> None:
        """Begin to follow, until ``patches`` are removed; may be begun again after that."""
        patches.replace(autograd.ENGINE, lambda engine: WatchedEngine(engine, self, patches))
        patches.replace(autograd.RUN_BACKWARD, autograd.engine().around)

    def install_hooks(self, patches: Installed) -> None:
        """Put hooks in that dynamo would see: `CompiledRegions` takes them out meanwhile."""
        module, optimizer = "torch.nn.modules.module.", "torch.optim.optimizer."
        hooks: dict[str, Callable[..., None]] = {
            f"{module}register_module_parameter_registration_hook": partial(
                self._on_registered, Ownership.PARAMETER
            ),
            f"{module}register_module_buffer_registration_hook": partial(
                self._on_registered, Ownership.BUFFER
            ),
            f"{module}register_module_module_registration_hook": self._on_submodule,
            f"{optimizer}register_optimizer_step_pre_hook": self._before_step,
            f"{optimizer}register_optimizer_step_post_hook": self._after_step,
        }
        for name, function in hooks.items():
            patches.hook(name, function)
        patches.replace("torch.nn.Module.__setstate__", self._seeing_filled)
        patches.replace(CONVERT, self._seeing_filled)
        patches.replace(memory.RESIZE_STORAGE, self._seeing_moves)

    def note_compiled(self) -> None:
        """Learn that compiled code runs, where no hook is called."""
        self._compiled_ran = True

    def _seeing_filled(self, fill: Callable[..., object]) -> Callable[..., object]:
        """See modules that get their state, or tensors in place of theirs: they register nothing.

        Deep copies and unpickled ones get all at once. The profiler knows what a module holds, too,
        but takes one that is made where another has died for that one.
        """

        def watched(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
            __tracebackhide__ = True
            result = fill(module, *args, **kwargs)
            self._see_filled(module)
            return result

        return watched

    def forget_storages(self) -> None:
        """Notice no longer which storages die."""
        self._storages.clear()

    @quiet
    def scan(self, mark: int) -> None:
        """Log every live tensor, and learn the modules and optimizers that exist already."""
        live = find_live()
        tensors = live.tensors
        self._modules.update(live.modules)
        holdings = graph_holdings(t for t in tensors if autograd.has_graph(t))
        # What a graph saved and what is in a ``.grad`` may have no Python object until we ask.
        gradients = map(autograd.gradient_of, filter(autograd.is_leaf, tensors))
        for tensor in (*tensors, *holdings.saved, *(g for g in gradients if g is not None)):
            self._log.owner(mark, Ownership.LIVE, tensor)
            self._follow_storages(tensor)
        for storage in self._unfollowed(live.storages):
            self._log.owner(mark, Ownership.LIVE, storage)
            self._follow_storages(storage)
        self.sample(mark)
        self._log_holdings(mark, holdings)
        self._log_optimizers(mark, live.optimizers)

    @quiet
    def sample(self, mark: int) -> None:
        """Log what the known modules hold now."""
        self._find_unhooked(mark)
        for module, entry in self._modules.alive():
            self._log_held(mark, module, entry.noted)

    def _find_unhooked(self, mark: int) -> None:
        """Learn what compiled code made or stepped, where no hook of ours is called."""
        if self._compiled_ran:
            self._compiled_ran = False
            live = find_live()
            # What the compiler makes of a step holds the optimizer's tensors as its buffers.
            self._modules.update(m for m in live.modules if not isinstance(m, torch.fx.GraphModule))
            self._log_optimizers(mark, live.optimizers)

    def _log_held(
        self, mark: int, module: torch.nn.Module, noted: dict[str, int], gradients: bool = True
    ) -> None:
        """Log what a module holds, less what is ``noted`` already and has not changed since."""
        for name, parameter in parameters_of(module).items():
            if parameter is not None:
                if self._is_new(noted, name, Ownership.PARAMETER, parameter):
                    self._log.owner(mark, Ownership.PARAMETER, parameter, id(module), name)
                gradient = autograd.gradient_of(parameter) if gradients else None
                if gradient is not None:
                    self._log.owner(mark, Ownership.GRADIENT, gradient, id(module), name)
        for name, buffer in buffers_of(module).items():
            if buffer is not None and self._is_new(noted, name, Ownership.BUFFER, buffer):
                self._log.owner(mark, Ownership.BUFFER, buffer, id(module), name)
        for name, child in submodules_of(module).items():
            if child is not None:
                entry, kind = self._modules.get(child), type(child).__name__
                # Its class may become another one, as by a parametrization.
                place = entry and entry.number << 32 | self._log.strings.number(kind)
                if place is None or noted.get(name) != place:
                    self._log.edge(mark, child, module, name)
                if place is not None:
                    noted[name] = place

    def _is_new(
        self, noted: dict[str, int], name: str, kind: Ownership, tensor: torch.Tensor
    ) -> bool:
        """Return whether a tensor has to be noted, and note that it is.

        A storage that was there at the start is known to be the same while it is where it was. All
        that modules of the process hold is looked at before each backward pass: so this asks once.
        """
        if type(tensor) not in ORDINARY or not (ptr := data_ptr(tensor)):
            return True
        # Where a tensor does not begin with its storage, none is found.
        place = self._log.devices.number(device_name(tensor.device)), ptr
        reference = self._storages.get(place)
        storage = None if reference is None else reference()
        if storage is None or data_ptr(storage) != ptr:
            return True
        holding = ptr if kind is Ownership.PARAMETER else -ptr
        if noted.get(name) == holding:
            return False
        noted[name] = holding
        return True

    @quiet
    def sample_graphs(self, mark: int) -> None:
        """Log what all live graphs keep for a backward pass that may follow, and what is held."""
        live = find_live()
        self._log_graphs(mark, live.tensors)
        self._log_ends(mark, live)

    def _log_ends(self, mark: int, live: Live) -> None:
        """Log gradients that a program put in place itself, and state that no step has made.

        Megatron sums gradients up in ``main_grad``. State may have been loaded from a checkpoint.
        """
        for tensor in live.tensors:
            if autograd.is_leaf(tensor):
                if (gradient := autograd.gradient_of(tensor)) is not None:
                    self._log.owner(mark, Ownership.GRADIENT, gradient)
                self._log.owned(mark, Ownership.GRADIENT, tensors_within(main_gradient_of(tensor)))
        self._log_optimizers(mark, live.optimizers)

    def _log_graphs(self, mark: int, tensors: Iterable[torch.Tensor]) -> None:
        self._log_holdings(mark, graph_holdings(t for t in tensors if autograd.has_graph(t)))

    @quiet
    def note_call(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> int:
        """Log the tensors that an unobserved operator is called with; return the mark."""
        mark = self._mark(MarkKind.CALL, "")
        self._log.owned(mark, Ownership.USED, read)
        self._log.owned(mark, Ownership.WRITTEN, written)
        return mark

    @quiet
    def sample_end(self, mark: int) -> None:
        """Log what is held at the end, and what on the CPU is new since the start.

        The recording has most of the new storages; this look finds the rest.
        """
        self._find_unhooked(mark)
        for module, entry in self._modules.alive():
            self._log_held(mark, module, entry.noted, gradients=False)
        live = find_live()
        self._log_graphs(mark, live.tensors)
        self._log_ends(mark, live)
        cpu = self._log.devices.number("cpu")
        for tensor in live.tensors:
            if tensor.device.type == "cpu" and any(
                (cpu, ptr) not in self._storages for _, ptr in places_of(tensor)
            ):
                self._log.owner(mark, Ownership.SURVIVOR, tensor)
        for storage in self._unfollowed(live.storages):
            if storage.device.type == "cpu":
                self._log.owner(mark, Ownership.SURVIVOR, storage)

    @quiet
    def before_backward(
        self, roots: Iterable[object], gradients: Iterable[object], create_graph: bool
    ) -> list[torch.Tensor]:
        """Log what the graph keeps; return its leaves, whose gradients are logged afterwards."""
        mark = self._mark(MarkKind.BACKWARD_BEGIN, CREATE_GRAPH if create_graph else "")
        self.sample(mark)
        self._log.owned(mark, Ownership.GRADIENT_ROOT, gradients)
        holdings = graph_holdings(roots)
        self._log_holdings(mark, holdings)
        self._depth += 1
        return holdings.leaves

    @quiet
    def after_backward(self, leaves: Iterable[torch.Tensor], gradients: Iterable[object]) -> None:
        mark = self._mark(MarkKind.BACKWARD_END, "")
        self._depth -= 1
        for leaf in leaves:
            if (gradient := autograd.gradient_of(leaf)) is not None:
                self._log.owner(mark, self._gradient_kind(leaf), gradient)
        # The gradients of a backward pass within another one go on into the outer one: those of a
        # checkpoint do.
        kind = Ownership.GRADIENT_ROOT if self._depth else Ownership.RETURNED
        self._log.owned(mark, kind, gradients)

    def _log_holdings(self, mark: int, holdings: GraphHoldings) -> None:
        self._log.owned(mark, Ownership.SAVED, holdings.saved)
        leaves = (t for t in holdings.leaves if self._gradient_kind(t) is Ownership.GRADIENT)
        self._log.owned(mark, Ownership.LEAF, leaves)

    def _gradient_kind(self, leaf: torch.Tensor) -> Ownership:
        """Return the kind of owner that a leaf's gradient has.

        A backward pass within another one belongs to a checkpoint: its graph begins at detached
        copies of activations, whose gradients go on into the outer pass.
        """
        if self._depth and not isinstance(leaf, torch.nn.Parameter):
            return Ownership.GRADIENT_ROOT
        return Ownership.GRADIENT

    def _see(self, module: torch.nn.Module) -> None:
        """Log a module when it is first met: from now on its ``id()`` stands for it."""
        if self._modules.get(module) is None:
            self._modules.update([module])
            mark = self._mark(MarkKind.MODULE_SEEN, "")
            self._log.edge(mark, module, None, "")

    @quiet
    def _see_filled(self, module: torch.nn.Module) -> None:
        """Log a module that got everything that it holds at once."""
        self._see(module)
        self._log_held(self._mark(MarkKind.MODULE_SEEN, ""), module, {})

    @quiet
    def _on_registered(
        self, kind: Ownership, module: torch.nn.Module, name: str, tensor: torch.Tensor | None
    ) -> None:
        self._see(module)
        if tensor is not None:
            mark = self._mark(MarkKind.MODULE_SEEN, "")
            self._log.owner(mark, kind, tensor, id(module), name)

    @quiet
    def _on_submodule(
        self, module: torch.nn.Module, name: str, child: torch.nn.Module | None
    ) -> None:
        self._see(module)
        if child is not None:
            self._see(child)
            self._log.edge(self._mark(MarkKind.MODULE_SEEN, ""), child, module, name)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._mark(MarkKind.OPTIMIZER_BEGIN, "")

    @quiet
    def _after_step(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        self._log_optimizers(self._mark(MarkKind.OPTIMIZER_END, ""), [optimizer])

    def _log_optimizers(self, mark: int, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for optimizer in optimizers:
            for parameter in chain.from_iterable(g["params"] for g in groups_of(optimizer)):
                self._log.owner(mark, Ownership.PARAMETER, parameter)
                if (gradient := autograd.gradient_of(parameter)) is not None:
                    self._log.owner(mark, Ownership.GRADIENT, gradient)
            for state in (*state_of(optimizer).values(), *own_values_of(optimizer)):
                self._log.owned(mark, Ownership.OPTIMIZER_STATE, tensors_within(state))

    def _follow_storages(self, holder: torch.Tensor | torch.UntypedStorage) -> None:
        """Know storages while they live, and log the death of those whose end nobody else tells.

        The Python object of a storage lives exactly as long as the storage, whoever else holds it.
        Where a call of ours at its death is not needed there is none: Python drops what a signal's
        handler raises in one.
        """
        parts = [holder] if isinstance(holder, torch.UntypedStorage) else plain_tensors(holder)
        for part in parts:
            for device, ptr, size_bytes in storages_of(part):
                place = (self._log.devices.number(device), ptr)
                if place not in self._storages:
                    storage = (
                        part if isinstance(part, torch.UntypedStorage) else part.untyped_storage()
                    )
                    died = partial(self._on_freed, (*place, size_bytes))
                    called = None if self._sees_end(storage) else died
                    self._storages[place] = weakref.ref(storage, called)

    def _seeing_moves(self, resize: Callable[[Any, int], object]) -> Callable[[Any, int], object]:
        """See a storage from before leave its place: it lives on, at another one or without any."""

        def resized(storage: torch.UntypedStorage, size: int) -> object:
            __tracebackhide__ = True
            place = self._followed(storage)
            result = resize(storage, size)
            if place and data_ptr(storage) != place[1]:
                self._on_freed(place, None)
            return result

        return resized

    @quiet
    def _followed(self, storage: torch.UntypedStorage) -> tuple[int, int, int] | None:
        """Return device, pointer and bytes of a storage whose death is waited for."""
        for device, ptr, size_bytes in storages_of(storage):
            place = self._log.devices.number(device), ptr
            if self._storages.get(place, lambda: None)() is storage:
                return (*place, size_bytes)
        return None

    def _unfollowed(self, storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
        """Return the live storages that no tensor led to."""
        number = self._log.devices.number
        return [
            storage
            for storage in storages
            for device, ptr, _ in storages_of(storage)
            if (number(device), ptr) not in self._storages
        ]

    @quiet
    def _on_freed(self, row: tuple[int, int, int], _: object) -> None:
        """Log it on the CPU: there the profiler reports none for blocks it saw no birth of."""
        self._storages.pop(row[:2], None)
        if row[0] == self._log.devices.number("cpu"):
            mark = self._mark(MarkKind.STORAGE_FREED, "")
            self._log.owners.append((mark, Ownership.LIVE, *row, 0, 0))


class WatchedEngine:
    """Stands in for the autograd engine while a body runs, and notes each backward pass.

    Python names the caller of the engine where a backward pass warns, and filters go by that name.
    So `around` is around torch's own caller, and gives it the engine alone; what a program calls
    the engine with has a caller of ours.

    A program that keeps it has the engine alone once ``patches`` are removed.
    """

    def __init__(self, engine: Any, watch: OwnershipWatch, patches: Installed) -> None:
        self._engine = engine
        self._watch: OwnershipWatch | None = watch
        self._noted_threads: set[int] = set()
        patches.finally_do(self._end)

    def _end(self) -> None:
        self._watch = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def run_backward(self) -> _Run:
        run: _Run = self._engine.run_backward
        thread = get_ident()
        if thread in self._noted_threads:
            self._noted_threads.discard(thread)
            return run
        return partial(self._run, run, False)

    def around(self, run: _Run) -> _Run:
        """Return a function that notes a pass, which ``run`` has this engine do."""
        return partial(self._run, run, True)

    def _run(
        self,
        run: _Run,
        by_torch: bool,
        tensors: Sequence[object],
        grad_tensors: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor | None, ...]:
        __tracebackhide__ = True
        arguments = (tensors, grad_tensors, keep_graph, create_graph, *args)
        gradients: tuple[torch.Tensor | None, ...] = ()
        watch = self._watch
        if watch is None or not _has_memory(tensors):
            # A compiler traces: nothing that runs in there has memory.
            return run(*arguments, **kwargs)
        leaves = watch.before_backward(tensors, grad_tensors, create_graph)
        thread = get_ident()
        if by_torch:
            self._noted_threads.add(thread)
        try:
            gradients = run(*arguments, **kwargs)
        finally:
            self._noted_threads.discard(thread)
            for device in _devices(tensors):
                autograd.await_engine(device, self._engine)
            watch.after_backward(leaves, gradients or ())
        return gradients


@quiet
def _devices(roots: Iterable[object]) -> set[torch.device]:
    return {r.device for r in roots if isinstance(r, torch.Tensor) and answers(r)}


@quiet
def _has_memory(roots: Iterable[object]) -> bool:
    """False for the roots of a backward pass that a compiler traces."""
    return any(isinstance(r, GradientEdge) or any(places_of(r)) for r in roots)
