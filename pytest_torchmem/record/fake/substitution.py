"""Puts fake tensors in the place of a program's real ones, and the real ones back.

Modules and optimizers are changed in place, since programs reach them in ways that a copy would
not follow (closures, tied weights, lists of layers). Whatever happens in between,
`Substitution.restore` leaves every one of them as it was, attributes that the program assigned
included.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from pytest_torchmem.record.fake.known_values import KnownValues
from pytest_torchmem.record.torch_api import autograd, fake_tensors
from pytest_torchmem.record.torch_api.modules import (
    OPTIMIZERS_OWN,
    OWN_ATTRIBUTES,
    buffers_of,
    dicts_of,
    parameters_of,
)
from pytest_torchmem.values.errors import EstimateError

_Key = TypeVar("_Key")
_MAX_DEPTH = 4
_MOST_HELD = 1000
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
# Whatever these hold of a program is not its data.
_PYTHONS_OWN = frozenset({"logging", "threading", "queue", "multiprocessing", "asyncio", "weakref"})


@dataclass(slots=True)
class Reachable:
    """The modules and optimizers that a program can get at, by the name it knows them by.

    ``holders`` is all else that may hold tensors after the run: containers, objects, functions.
    """

    modules: dict[int, tuple[str, torch.nn.Module]] = field(default_factory=dict)
    optimizers: dict[int, torch.optim.Optimizer] = field(default_factory=dict)
    holders: list[object] = field(default_factory=list)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters of all modules, each once."""
        found = {id(p): p for _, m in self.modules.values() for p in m.parameters()}
        return list(found.values())

    @property
    def updated(self) -> list[torch.Tensor]:
        """The tensors that optimizers update: parameters, and copies of them in another type."""
        return fake_tensors.tensors_in([o.param_groups for o in self.optimizers.values()])


def find_reachable(*roots: object) -> Reachable:
    """Return the modules and optimizers among the roots and in what their functions refer to."""
    found = Reachable()
    seen: set[int] = set()
    # Kept with its depth: a program can refer to half of the process.
    waiting = [("", root, 0) for root in roots]
    while waiting:
        name, value, depth = waiting.pop(0)
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            found.modules[id(value)] = (name, value)
            hooks = [h for m in value.modules() for kept in dicts_of(m) for h in kept.values()]
            waiting += [("", hook, depth + 1) for hook in hooks if isinstance(hook, _FUNCTIONS)]
        elif isinstance(value, torch.optim.Optimizer):
            found.optimizers[id(value)] = value
            # Some wrap another one.
            inside = ((key, v) for key, v in vars(value).items() if key not in OPTIMIZERS_OWN)
            waiting += [(key, inner, depth + 1) for key, inner in inside]
        else:
            found.holders.append(value)
            waiting += [(key, inner, depth + 1) for key, inner in refers_to(value)]
    # A module that is part of another one has a better name there.
    inside_others = (c for _, m in found.modules.values() for c in m.modules() if c is not m)
    children = set(map(id, inside_others))
    found.modules = {key: m for key, m in found.modules.items() if key not in children}
    return found


def refers_to(value: object) -> Iterator[tuple[str, object]]:
    """Yield what a function, a container or an object refers to, with names; no modules' own."""
    if type(value).__module__.partition(".")[0] in _PYTHONS_OWN:
        return
    if isinstance(value, list | tuple | set | collections.deque):
        yield from ((str(i), inner) for i, inner in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, functools.partial):
        yield from (("", inner) for inner in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, types.BuiltinMethodType):
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _captured(value)
    elif not isinstance(value, type | types.ModuleType | torch.Tensor):
        yield from getattr(value, "__dict__", {}).items()


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # A cell of a name that is assigned later is still empty.
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents
    for name in global_names(function):
        yield name, function.__globals__[name]
    for inner in (function.__defaults__, getattr(function, "__wrapped__", None)):
        if inner is not None:
            yield "", inner


def global_names(function: types.FunctionType) -> list[str]:
    """Return the global names that a function, or one that is written inside it, may use."""
    codes = [function.__code__]
    names: list[str] = []
    for code in codes:
        names += code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return [name for name in dict.fromkeys(names) if name in function.__globals__]


class Substitution:
    """Fake tensors for real ones, the same fake for the same real one.

    ``device`` is where the fakes are said to be; None leaves each where it is, and ``meta``
    tensors, which are nowhere, on the CPU.
    """

    def __init__(self, fake_mode: fake_tensors.FakeTensorMode, device: torch.device | None) -> None:
        self.mode = fake_mode
        self.values = KnownValues()
        self._device = device
        # Real tensors stay referenced: their ``id`` is the key. Their fakes do not: what a program
        # replaces is gone, as it would be where nobody else has the real one.
        self._fakes: dict[
            int, tuple[torch.Tensor, torch.Tensor | None, weakref.ref[torch.Tensor]]
        ] = {}
        #: The fakes of tensors on meta, by ``id``.
        self.on_meta: set[int] = set()
        self._captured: dict[int, torch.Tensor] = {}
        self._leaves: list[weakref.ref[torch.Tensor]] = []
        self._undo: list[Callable[[], None]] = []
        # Groups and states of optimizers, each with its fake; several may have the same.
        self._shared: dict[int, tuple[object, Any]] = {}

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor for a real one, made when first asked for; a fake one is its own."""
        return self._fake(tensor, move=True)

    def captured(self, tensor: torch.Tensor) -> torch.Tensor:
        """The fake tensor for a real one that the program itself holds, to the end of the run.

        Raises `EstimateError` where autograd would leave a gradient at the real one, although the
        module or the optimizer that it belongs to has the fake.
        """
        replaced = id(tensor) in self._fakes and id(tensor) not in self._captured
        if replaced and _gets_gradients(tensor) and torch.is_grad_enabled():
            raise EstimateError(
                "the program uses a parameter that it holds where nobody can replace it (in a "
                "functools.partial, a set or an object with __slots__); let it be an argument of "
                "the program, or a part of a module"
            )
        fake = self._captured[id(tensor)] = self.fake_of(tensor)
        return fake

    def _fake(self, tensor: torch.Tensor, *, move: bool) -> torch.Tensor:
        is_fake = isinstance(tensor, fake_tensors.FakeTensor)
        if is_fake and not (move and self._device not in (None, tensor.device)):
            return tensor
        known = self._fakes.get(id(tensor))
        fake = fake_tensors.from_weak(known[2]) if known is not None else None
        if fake is None:
            make = self._elsewhere if is_fake else functools.partial(self._make, move=move)
            # Asking others than leaves warns.
            grad = tensor.grad if autograd.is_leaf(tensor) else None
            fake = make(tensor)
            self._fakes[id(tensor)] = (tensor, grad, weakref.ref(fake))
        return fake

    def _elsewhere(self, fake: Any) -> torch.Tensor:
        """A fake tensor like another one, on the device that is asked about."""
        with fake.fake_mode:
            moved = torch.empty_strided(
                fake.size(), fake.stride(), dtype=fake.dtype, device=self._device
            )
            if isinstance(fake, torch.nn.Parameter):
                moved = torch.nn.Parameter(moved, requires_grad=fake.requires_grad)
            elif fake.requires_grad:
                moved.requires_grad_()
            if fake.is_leaf and fake.grad is not None:
                moved.grad = self._elsewhere(fake.grad)
        return moved

    def _make(self, tensor: torch.Tensor, *, move: bool) -> torch.Tensor:
        # What an input was computed from is no part of the program.
        own = tensor if autograd.is_leaf(tensor) else tensor.detach().requires_grad_()
        try:
            fake = self.mode.from_tensor(own)
        except fake_tensors.OPERATOR_ERRORS as error:
            raise EstimateError(
                f"a {type(tensor).__name__} of layout {tensor.layout} has no fake counterpart: "
                f"{error}"
            ) from error
        self.values.learn(fake, tensor)
        device = self._device if move and self._device is not None else tensor.device
        if tensor.device.type == "meta":
            self.on_meta.add(id(fake))
        target = torch.device("cpu") if device.type == "meta" else device
        for part in (fake, fake.grad if fake.is_leaf else None):
            if part is not None and part.device != target:
                fake_tensors.move_fake(part, target)
        if tensor.layout is torch.strided and not fake_tensors.wraps_others(tensor):
            # Of a part of a larger tensor, the whole is kept.
            fake_tensors.resize(fake, tensor.untyped_storage().nbytes())
        return fake

    def in_tree(self, tree: Any) -> Any:
        """The same nesting of values with every tensor faked."""
        return fake_tensors.map_tensors(self.fake_of, tree)

    def in_module(self, root: torch.nn.Module) -> None:
        for module in root.modules():
            attributes = dict(module.__dict__)
            # Its parameters, buffers and children, and hooks of all kinds.
            self._remember(module.__dict__, *dicts_of(module))
            own: list[dict[str, Any]] = [parameters_of(module), buffers_of(module)]
            for owned in own:
                owned.update({k: self.fake_of(t) for k, t in owned.items() if t is not None})
            for name, value in attributes.items():
                if name not in OWN_ATTRIBUTES and _holds_tensors(value):
                    module.__dict__[name] = self.in_tree(value)

    def _remember(self, *dicts: MutableMapping[str, Any]) -> None:
        self._undo += [functools.partial(refill, kept, dict(kept)) for kept in dicts]

    def in_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        attributes = dict(optimizer.__dict__)
        # The groups' own dicts are never changed here, but a program may set a learning rate.
        self._remember(optimizer.__dict__, *optimizer.param_groups)
        # One that wraps another may have the same groups and the same state.
        for name, fake in (("param_groups", self._groups), ("state", self._state)):
            kept = getattr(optimizer, name)
            if id(kept) not in self._shared:
                self._shared[id(kept)] = kept, fake(kept)
            setattr(optimizer, name, self._shared[id(kept)][1])
        for name, value in attributes.items():
            if name not in OPTIMIZERS_OWN and _holds_tensors(value):
                optimizer.__dict__[name] = self.in_tree(value)

    def _groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self.in_tree(dict(group)) for group in groups]

    def _state(self, state: Any) -> Any:
        made = type(state)(dict)
        for parameter, values in state.items():
            # Scalars stay on the CPU, as optimizers keep them there.
            key = self.in_tree(parameter)  # some keep what is of no parameter by a name
            made[key] = fake_tensors.map_tensors(lambda t: self._fake(t, move=t.dim() > 0), values)
        return made

    def in_holder(self, holder: object, updated: Container[int]) -> None:
        """Fake the tensors that a function or a container holds, so that what it replaces is gone.

        Gradients of leaves would be left at the real ones, where no optimizer looks. Others stay in
        a long list, of data that a program draws from, and where it may read whole numbers.
        """
        slots = [*_slots(holder)]
        for value, put in slots:
            direct = isinstance(value, torch.Tensor) or type(value) is tuple
            leaves = fake_tensors.leaves(value) if direct else []
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            trained = any(_gets_gradients(t) or id(t) in updated for t in tensors)
            if not trained and (len(slots) > _MOST_HELD or all(map(_may_be_read, tensors))):
                continue
            # What has no fake counterpart is refused where the program uses it.
            with contextlib.suppress(EstimateError):
                faked = self.in_tree(value)
                put(faked)
                self._undo.append(functools.partial(_put_again, put, value))
                if trained:
                    self._leaves += map(weakref.ref, fake_tensors.tensors_in(faked))

    def in_keys(self, holder: object) -> None:
        """Put fakes in the place of tensors, or of their ids, that a mapping or a set knows.

        Those that the program reaches as fakes: what it holds otherwise is still its key.
        """
        if not isinstance(holder, MutableMapping | set):
            return
        others = {key: self._key_for(key) for key in holder}
        others = {key: other for key, other in others.items() if other is not key}
        if others:
            _rename(holder, others)
            back = {other: key for key, other in others.items()}
            self._undo.append(functools.partial(_rename, holder, back))

    def _key_for(self, key: object) -> object:
        known = self._fakes.get(key if type(key) is int else id(key))
        fake = fake_tensors.from_weak(known[2]) if known is not None else None
        return key if fake is None else id(fake) if type(key) is int else fake

    def leaves(self) -> list[torch.Tensor]:
        """Return the fakes that `in_holder` made, as far as somebody holds them."""
        found = map(fake_tensors.from_weak, self._leaves)
        return [leaf for leaf in found if leaf is not None]

    def restore(self) -> None:
        """Put every real tensor back, gradients included, and hold none of them any longer."""
        while self._undo:
            self._undo.pop()()
        for tensor, grad, _ in self._fakes.values():
            if tensor.is_leaf and isinstance(tensor.grad, fake_tensors.FakeTensor):
                tensor.grad = grad
        # What recorded the run is part of a cycle: it must not keep the caller's tensors alive.
        self._fakes.clear()
        self._captured.clear()
        self._shared.clear()


def _slots(holder: object) -> Iterator[tuple[object, Callable[[object], None]]]:
    """Yield each value that a holder has, with a function that replaces it."""
    if isinstance(holder, types.FunctionType):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
        yield holder.__defaults__, functools.partial(setattr, holder, "__defaults__")
        inside: Any = {name: holder.__globals__[name] for name in global_names(holder)}
        owner: Any = holder.__globals__
    elif isinstance(holder, list):
        inside, owner = dict(enumerate(holder)), holder
    elif isinstance(holder, MutableMapping):
        inside, owner = dict(holder), holder
    elif isinstance(holder, type | types.ModuleType | torch.Tensor):
        return
    else:
        owner = getattr(holder, "__dict__", {})
        inside = dict(owner)
    for key, value in inside.items():
        yield value, functools.partial(operator.setitem, owner, key)


def _put_again(put: Callable[[object], None], value: object) -> None:
    # The program may have taken the slot away.
    with contextlib.suppress(IndexError):
        put(value)


def _gets_gradients(leaf: torch.Tensor) -> bool:
    return leaf.is_leaf and leaf.requires_grad


def _may_be_read(tensor: torch.Tensor) -> bool:
    """Return whether a program may ask for values: those of 8 bits are pictures or states."""
    plain = not (tensor.is_floating_point() or tensor.is_complex())
    return plain and tensor.dtype not in (torch.uint8, torch.int8)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    plain = type(value) in (list, tuple, dict)
    return plain and any(isinstance(leaf, torch.Tensor) for leaf in fake_tensors.leaves(value))


def _rename(kept: MutableMapping[_Key, object] | set[_Key], others: Mapping[_Key, _Key]) -> None:
    values: dict[_Key, object] = dict.fromkeys(kept) if isinstance(kept, set) else dict(kept)
    refill(kept, {others.get(key, key): value for key, value in values.items()})


def refill(kept: MutableMapping[_Key, Any] | set[_Key], contents: Mapping[_Key, object]) -> None:
    """Give a mapping other contents, in their order, or a set other members."""
    kept.clear()
    kept.update(contents)
