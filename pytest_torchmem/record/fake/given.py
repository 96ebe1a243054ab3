"""Storages that were there before a run on fake tensors, and when the run makes use of them.

A storage counts once an operator gets it, once a module is called that holds it or has a child that
does, or once an optimizer updates by it: so it is where a program is measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Container
from dataclasses import dataclass
from functools import partial

import torch

from pytest_torchmem.record.fake.ledger import Ledger, LedgerEntry
from pytest_torchmem.record.torch_api import fake_tensors, memory
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.static_graph import NodeKind, StaticNode


@dataclass(frozen=True, slots=True)
class _Owned:
    """A storage that nothing has used yet. Once it is gone, another may be found in its place."""

    entry: LedgerEntry
    path: str
    watch: weakref.ref[torch.UntypedStorage]


class Given:
    """Knows each storage from before the run: its category, and its node once it is used."""

    def __init__(self, ledger: Ledger) -> None:
        self.nodes: list[StaticNode] = []
        self._ledger = ledger
        self._unused: dict[int, _Owned] = {}
        # Where a program calls a module with other parameters, its own are still what it holds.
        # What is on meta has no memory then.
        self._held: dict[int, list[tuple[weakref.ref[torch.Tensor], bool]]] = {}
        self._called: set[int] = set()

    def own(self, tensor: torch.Tensor, category: Category, path: str = "") -> None:
        """Say what a tensor is for. The last word before its first use stands."""
        storage = tensor.untyped_storage()
        key = memory.key_of_storage(storage)
        watch = weakref.ref(storage, partial(self._died_unused, key))
        size = fake_tensors.size_hint(storage.nbytes())
        entry = LedgerEntry(size, str(tensor.device), category, 0)
        self._unused[key] = _Owned(entry, path, watch)

    def holds(self, module: torch.nn.Module, on_meta: Container[int]) -> None:
        """Note the parameters and buffers that a module has before the run."""
        self._held[id(module)] = [(weakref.ref(t), id(t) in on_meta) for t in _own(module)]

    def called(self, root: torch.nn.Module) -> None:
        """Let a module use all that it and its children hold."""
        if id(root) in self._called:
            return
        for module in root.modules():
            self._called.add(id(module))
            now = set(map(id, _own(module)))
            for weak, on_meta in self._held.get(id(module), ()):
                held = fake_tensors.from_weak(weak)
                if held is not None and not (on_meta and id(held) not in now):
                    self._use((held, held.grad if held.is_leaf else None))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer use its parameters, their gradients and its state."""
        for parameter in fake_tensors.tensors_in([g["params"] for g in optimizer.param_groups]):
            self._use((parameter, parameter.grad if parameter.is_leaf else None))
        self._use(list(optimizer.state.values()))

    def _use(self, tensors: object) -> None:
        for tensor in fake_tensors.tensors_in(tensors):
            self.used(tensor.untyped_storage())

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, which is an input if nobody knows it."""
        number = self.used(tensor.untyped_storage())
        if number is None:
            number = self._ledger.add(tensor, Category.INPUT, 0)
            self._append(number, "")
        return number

    def used(self, storage: torch.UntypedStorage) -> int | None:
        """The number of a storage that is known, or that somebody owns; None for another."""
        key = memory.key_of_storage(storage)
        owned = self._unused.pop(key, None)
        if owned is None:
            return self._ledger.live.get(key)
        number = self._ledger.watch(storage, owned.entry)
        self._append(number, owned.path)
        return number

    def finish(self) -> None:
        """Stop watching."""
        self._unused.clear()
        self._held.clear()

    def _died_unused(self, key: int, _: object) -> None:
        """A storage that dies in the run had been there until then."""
        owned = self._unused.pop(key)
        self._append(self._ledger.ended(owned.entry), owned.path)

    def _append(self, number: int, path: str) -> None:
        self.nodes.append(
            StaticNode(path or f"given_{number}", NodeKind.INPUT, module=path, makes=(number,))
        )


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
