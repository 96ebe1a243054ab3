"""Process groups: how ranks find each other, what they exchange, and the backends for the CPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, Final, TypeAlias, cast
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from pytest_torchmem.record.torch_api import ALL_RELEASES, NEWEST, Checked

CHECKED: Final[Checked] = {
    "torch.distributed.rendezvous._rendezvous_handlers": ALL_RELEASES,
    "torch.distributed.distributed_c10d.ProcessGroupGloo": ALL_RELEASES,
    "torch.distributed.distributed_c10d._new_process_group_helper": ("2.13.0", NEWEST),
    "torch.distributed.distributed_c10d._tensor_to_object": ("2.13.0", NEWEST),
    "torch.distributed.optim.zero_redundancy_optimizer._broadcast_object": ALL_RELEASES,
    "torch.distributed.fsdp._optim_utils._convert_state_with_orig_params": ("2.10.0", "2.13.0"),
    "torch._C._distributed_c10d.FakeProcessGroup": ALL_RELEASES,
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal": ("2.11.0", NEWEST),
    "torch._C._distributed_c10d.Backend._set_sequence_number_for_group": ALL_RELEASES,
}

#: Makes the store of a rank of so many; yields it with both numbers.
Rendezvous: TypeAlias = "Callable[[int, int], Iterator[tuple[dist.Store, int, int]]]"


def _in_place_of(owner: object, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the function stands for another, which is its first argument."""
    original = getattr(owner, name)

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def called(*arguments: Any, **named: Any) -> Any:
            return function(original, *arguments, **named)

        setattr(owner, name, called)
        return called

    return put


def replace_rendezvous(handler: Rendezvous) -> None:
    """Let each address that torch knows (``env://``, ``tcp://``, ``file://``) lead to a handler."""
    from torch.distributed.rendezvous import _rendezvous_handlers

    def find(url: str, **_: object) -> Iterator[tuple[dist.Store, int, int]]:
        # torch puts both numbers into the address, whether they came by argument or variable.
        said = parse_qs(urlparse(url).query)
        rank = said.get("rank", [os.environ.get("RANK", "0")])[0]
        count = said.get("world_size", [os.environ.get("WORLD_SIZE", "1")])[0]
        return handler(int(rank), int(count))

    for scheme in _rendezvous_handlers:
        _rendezvous_handlers[scheme] = find


def make_gloo_without_partners() -> None:
    """Let each new gloo group be torch's fake one: it connects to nobody and returns at once.

    Its collectives leave what this rank has, or copy it to the places of the others.
    """
    if not dist.is_gloo_available():
        return
    groups: Any = importlib.import_module("torch.distributed.distributed_c10d")
    fake: Any = importlib.import_module("torch._C._distributed_c10d").FakeProcessGroup
    real: Any = groups.ProcessGroupGloo

    class Kind(type(real)):  # type: ignore[misc]  # the class of compiled classes
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (real, fake))

    class ProcessGroupGloo(real, metaclass=Kind):  # type: ignore[misc]  # its options stay
        def __new__(cls, store: object, rank: int, size: int, *_: object, **__: object) -> Any:
            return fake._create_internal(rank, size)

    @_in_place_of(groups, "monitored_barrier")
    def for_real_groups(wait: Any, group: Any = None, *arguments: Any, **named: Any) -> None:
        if groups.get_backend(group) != "gloo":
            wait(group, *arguments, **named)

    dist.monitored_barrier = for_real_groups
    # torch numbers gloo's collectives, to say which rank is behind. The fake group has no numbers.
    fake._set_sequence_number_for_group = lambda group: None
    groups.ProcessGroupGloo = ProcessGroupGloo


def refuse_unsent_objects(why: Callable[[], Exception]) -> None:
    """Raise ``why()`` where a program waits for an object of another rank and nothing has come."""
    groups = importlib.import_module("torch.distributed.distributed_c10d")

    @_in_place_of(groups, "_tensor_to_object")
    def unpacked(unpack: Any, *arguments: Any) -> Any:
        try:
            return unpack(*arguments)
        except (EOFError, UnpicklingError) as nothing:
            raise why() from nothing

    def received(receive: Any, value: Any, src_rank: int, *arguments: Any, **named: Any) -> Any:
        if src_rank != dist.get_rank():
            raise why()
        return receive(value, src_rank, *arguments, **named)

    def converted(convert: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return convert(*arguments, **named)
        except RuntimeError as lacking:
            if "is not in the optimizer state" in str(lacking):
                raise why() from lacking
            raise

    def refuse_states(module: ModuleType) -> None:
        _in_place_of(module, "_broadcast_object")(received)

    def refuse_states_of_parts(module: ModuleType) -> None:
        if hasattr(module, "_convert_state_with_orig_params"):  # in each release that was checked
            _in_place_of(module, "_convert_state_with_orig_params")(converted)

    _when_imported("torch.distributed.optim.zero_redundancy_optimizer", refuse_states)
    # Of parameters that keep their shapes (`use_orig_params`) each rank has only some.
    _when_imported("torch.distributed.fsdp._optim_utils", refuse_states_of_parts)


def refuse_calls_between_ranks(why: Callable[[], Exception]) -> None:
    """Raise ``why()`` where a program would call functions of other ranks."""
    if dist.rpc.is_available():

        def init_rpc(*_: object, **__: object) -> None:
            raise why()

        cast("Any", dist.rpc).init_rpc = init_rpc


def save_what_one_rank_has() -> None:
    """Let a distributed checkpoint have the parts of the rank that is run, and no others.

    Every rank has announced the same parts, so torch would let each of them write some.
    """

    def change(module: Any) -> None:
        @_in_place_of(module.DefaultSavePlanner, "create_global_plan")
        def planned(plan_all: Any, self: Any, all_plans: list[Any]) -> tuple[list[Any], Any]:
            own = dist.get_rank() if len(all_plans) > 1 else 0
            plans, metadata = plan_all(self, [all_plans[own]])
            nothing = type(plans[0])([])
            return [plans[0] if at == own else nothing for at in range(len(all_plans))], metadata

    _when_imported("torch.distributed.checkpoint.default_planner", change)


class _WhenImported:
    """Finds a module as all other finders do, and changes it when it is loaded."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _when_imported(name: str, change: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        change(sys.modules[name])
    else:
        sys.meta_path.insert(0, _WhenImported(name, change))


def tell_sizes_of_groups(tell: Callable[[int], None]) -> None:
    """Call with the number of ranks of each group that is about to be made.

    NCCL is not told when it splits a communicator: the ranks count each other.
    """
    groups = importlib.import_module("torch.distributed.distributed_c10d")

    @_in_place_of(groups, "_new_process_group_helper")
    def made(make: Any, group_size: int, *arguments: Any, **named: Any) -> Any:
        tell(group_size)
        return make(group_size, *arguments, **named)

    if not hasattr(dist.ProcessGroup, "split_group"):  # before 2.13
        return

    @_in_place_of(dist.ProcessGroup, "split_group")
    def split(split: Any, group: Any, ranks: Any, *arguments: Any, **named: Any) -> Any:
        tell(len(ranks))
        return split(group, ranks, *arguments, **named)


def gather(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the value that each rank of a group gave, by rank. All of them have to call it."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered
