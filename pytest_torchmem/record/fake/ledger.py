"""Storages of a run on fake tensors: when each came, and when it went."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from pytest_torchmem.record.torch_api import fake_tensors, memory
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.static_graph import Lifetimes, NodeKind, StaticNode


@dataclass(slots=True)
class LedgerEntry:
    """A storage while it is recorded. Row numbers are those of `values.static_graph`.

    One without memory stands for zeros that forward mode only thinks of. Values decide whether the
    doubted bytes are there.
    """

    size_bytes: int
    device: str
    category: Category
    first: int
    end: int = -1
    has_memory: bool = True
    doubted_bytes: int = 0


@dataclass(slots=True)
class Ledger:
    """All storages that were seen, and which of them live.

    ``before_death`` is called ahead of each death, as time may have passed without an operator.
    """

    before_death: Callable[[], None]
    entries: list[LedgerEntry] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    watches: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    operator_count: int = 0
    # An old storage, the one that may have taken its place, and the operator that did it.
    _takeovers: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Those that did, and whose place each took.
    _taken_over: dict[int, int] = field(default_factory=dict)

    def number(self, tensor: torch.Tensor) -> int | None:
        return self.live.get(memory.storage_key(tensor))

    def add(
        self, tensor: torch.Tensor, category: Category, first: int, *, has_memory: bool = True
    ) -> int:
        storage = tensor.untyped_storage()
        size = fake_tensors.size_hint(storage.nbytes()) if has_memory else 0
        entry = LedgerEntry(size, str(tensor.device), category, first, has_memory=has_memory)
        return self.watch(storage, entry)

    def watch(self, storage: torch.UntypedStorage, entry: LedgerEntry) -> int:
        number = self.append(entry)
        key = memory.key_of_storage(storage)
        self.live[key] = number
        self.watches[number] = weakref.ref(storage, partial(self._died, key, number))
        return number

    def append(self, entry: LedgerEntry) -> int:
        self.entries.append(entry)
        return len(self.entries) - 1

    def doubt(self, numbers: Iterable[int]) -> None:
        """Take back the sizes of storages that are there with certain values only."""
        for number in numbers:
            entry = self.entries[number]
            entry.size_bytes, entry.doubted_bytes = 0, entry.size_bytes

    def ended(self, entry: LedgerEntry) -> int:
        """Add a storage from before the run that no operator touched, and that dies now."""
        self.before_death()
        entry.end = 2 * self.operator_count
        return self.append(entry)

    def resized(self, storage: torch.UntypedStorage, number: int, row: int) -> int | None:
        """The number of a known storage's new memory, if something gave it another size.

        The old memory goes after the new has come: its content is copied.
        """
        size = fake_tensors.size_hint(storage.nbytes())
        old = self.entries[number]
        if size == old.size_bytes + old.doubted_bytes or not old.has_memory:
            return None
        old.end = row + 1
        # The watch on the old number would end it a second time.
        del self.watches[number]
        return self.watch(storage, LedgerEntry(size, old.device, old.category, row))

    def may_take_over(self, old: int, new: int) -> None:
        """Say that the current operator would write its result into ``old`` if nobody else has it.

        If ``old`` dies as soon as the operator is over, nobody had: ``new`` is the same memory.
        """
        if self.entries[old].size_bytes == self.entries[new].size_bytes:
            self._takeovers[old] = (new, self.operator_count)

    def take_over(self, old: int, new: int) -> None:
        """Say that the current operator writes its result into ``old``, whoever still has that."""
        if self.entries[old].size_bytes == self.entries[new].size_bytes:
            self._taken_over[new] = old

    def _died(self, key: int, number: int, _: object) -> None:
        self.before_death()
        entry = self.entries[number]
        entry.end = max(2 * self.operator_count, entry.first)
        successor, operator = self._takeovers.pop(number, (-1, -1))
        if operator >= 0 and operator == self.operator_count - 1:
            entry.end = self.entries[successor].first
            self._taken_over[successor] = number
        if self.live.get(key) == number:
            del self.live[key]

    def join_taken_over(self) -> dict[int, int]:
        """Make one storage of each and of those that took its place; return the first of each."""
        first: dict[int, int] = {}
        for late, place in sorted(self._taken_over.items()):
            begin, end = self.entries[first.get(place, place)], self.entries[late]
            if end.doubted_bytes:
                continue
            first[late] = first.get(place, place)
            begin.end, end.end = end.end, end.first
            end.size_bytes = 0
            if end.category is not Category.UNKNOWN:
                begin.category = end.category
        return first

    def lifetimes(self) -> Lifetimes:
        rows = 1 + 2 * self.operator_count
        ends = [rows if e.end < 0 else e.end for e in self.entries]
        first = np.array([e.first for e in self.entries], dtype=np.int64)
        return Lifetimes(first, np.array(ends, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _Owned:
    """A storage that nothing has used yet. Once it is gone, another may be found in its place."""

    entry: LedgerEntry
    path: str
    watch: weakref.ref[torch.UntypedStorage]


class Given:
    """Knows each storage from before the run: its category, and its node once it is used.

    It counts once an operator gets it, once a module is called that holds it or has a child that
    does, or once an optimizer updates by it: so it is where a program is measured.
    """

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
