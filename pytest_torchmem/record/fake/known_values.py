"""Values that are known although tensors are fake: small ones that were there, and what follows.

Labels, masks, lengths and step counts decide sizes and branches, and they are small. So operators
that get nothing but known values are run on them, too. A value is forgotten once something writes
to its storage that is not known.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch

from pytest_torchmem.record.fake.stand_ins.unknown import UnknownValueError
from pytest_torchmem.record.torch_api import dispatcher, fake_tensors, memory

NOTE: Final = "whole numbers that were there before decide sizes or are read: it is for these alone"
#: The largest tensor of whole numbers whose values are followed.
LARGEST_COUNT: Final = 1 << 16
# Lengths alone decide how large their results are.
_BY_LENGTHS: Final = ("aten::_ctc_loss", "aten::_ctc_loss_backward")
_LARGEST_STAND_IN_BYTES: Final = 1 << 26
# Their results have whatever was in memory.
_UNWRITTEN: Final = ("aten::empty", "aten::new_empty", "aten::resize", "aten::set_")

_Operator = Callable[..., object]
_Arguments = tuple[object, ...]
_Named = Mapping[str, object]
_Run = tuple[object, list[tuple[torch.Tensor, torch.Tensor]]]


class KnownValues:
    """The values of fake tensors, as far as they are known."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor, int]] = {}
        self._writes: Counter[int] = Counter()
        self.notes: set[str] = set()

    def learn(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Remember a copy of what a real tensor holds, if that is small."""
        plain = real.layout is torch.strided and not fake_tensors.wraps_others(real)
        if plain and _is_small(real) and real.device.type != "meta":
            with fake_tensors.without_modes():
                self._put(fake, real.detach().to("cpu", copy=True))

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor, None where nobody knows them."""
        if not isinstance(tensor, fake_tensors.FakeTensor):
            # The program goes on with the tensor itself, and may write to it.
            if not (_is_small(tensor) and tensor.is_cpu):
                return None
            with fake_tensors.without_modes():
                return tensor.detach().clone()
        made_here = fake_tensors.constant_of(tensor)
        if made_here is not None:
            return made_here
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return None
        return found[1] if found[2] == self._writes[_storage_of(tensor)] else None

    def run(self, func: _Operator, name: str, args: _Arguments, kwargs: _Named) -> object:
        """Run an operator on fake tensors, or on what is known where values decide the result."""
        try:
            if name in _BY_LENGTHS:
                return self._as_known(func, name, args, kwargs)
            out = func(*args, **kwargs)
        except fake_tensors.value_errors():
            try:
                return self._as_known(func, name, args, kwargs)
            except UnknownValueError:
                pass
            raise
        made = fake_tensors.tensors_in(out)
        found = self._on_values(func, name, args, kwargs) if all(map(_is_small, made)) else None
        if dispatcher.writes_in_place(func):
            self._writes.update(_storage_of(t) for t in dispatcher.written_to(func, args, kwargs))
        if found is not None:
            real, written = found
            self._follow(out, real)
            for fake, value in written:
                self._put(fake, value)
        return out

    def _as_known(self, func: _Operator, name: str, args: _Arguments, kwargs: _Named) -> object:
        """Return fake tensors like what comes out of known values."""
        found = self._on_values(func, name, args, kwargs)
        if found is None:
            raise UnknownValueError(str(func))
        if not isinstance(found[0], float):  # an optimizer reads its count of steps
            self.notes.add(NOTE)
        device = next(t.device for t in fake_tensors.tensors_in((args, kwargs)))
        out = fake_tensors.map_tensors(partial(_fake_like, device), found[0])
        self._follow(out, found[0])
        return out

    def _on_values(
        self, func: _Operator, name: str, args: _Arguments, kwargs: _Named
    ) -> _Run | None:
        """Return what an operator makes of known values, and what it writes; None if it cannot."""
        random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if random or name.startswith(_UNWRITTEN):
            return None
        values: dict[int, torch.Tensor] = {}
        for tensor in fake_tensors.tensors_in((args, kwargs)):
            by_lengths = name in _BY_LENGTHS and tensor.is_floating_point()
            value = _zeros_like(tensor) if by_lengths else self.of(tensor)
            if value is None:
                return None
            values[id(tensor)] = value
        writes = dispatcher.writes_in_place(func)
        written = dispatcher.written_to(func, args, kwargs) if writes else []
        named = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") else kwargs
        try:
            with fake_tensors.without_modes(), torch.no_grad():
                values |= {id(t): values[id(t)].clone() for t in written}
                real = func(
                    *fake_tensors.map_tensors(lambda t: values[id(t)], args),
                    **fake_tensors.map_tensors(lambda t: values[id(t)], named),
                )
        except Exception:
            # Placeholders, such as zeros for labels, need not be what the operator takes.
            return None
        return real, [(tensor, values[id(tensor)]) for tensor in written]

    def _follow(self, out: object, real: object) -> None:
        pairs = zip(fake_tensors.tensors_in(out), fake_tensors.tensors_in(real), strict=True)
        for fake, value in pairs:
            if _is_small(value):
                self._put(fake, value)

    def _put(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        key = id(fake)
        watch = weakref.ref(fake, lambda _: self._known.pop(key, None))
        self._known[key] = watch, value, self._writes[_storage_of(fake)]


def _is_small(tensor: torch.Tensor) -> bool:
    count = tensor.numel()
    if not isinstance(count, int):
        return False  # nobody knows it
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return count <= (LARGEST_COUNT if whole else 1)


def _storage_of(tensor: torch.Tensor) -> int:
    strided = tensor.layout is torch.strided
    return memory.key_of_storage(tensor.untyped_storage()) if strided else 0


def _fake_like(device: torch.device, real: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=device)


def _zeros_like(fake: torch.Tensor) -> torch.Tensor | None:
    """One zero that is seen as many times as a tensor has values."""
    if fake.numel() * fake.element_size() > _LARGEST_STAND_IN_BYTES:
        return None
    with fake_tensors.without_modes():
        return torch.zeros((), dtype=fake.dtype).expand(fake.shape)
