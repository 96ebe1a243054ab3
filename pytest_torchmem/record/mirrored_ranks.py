"""One rank of a job whose other ranks are not there: each is taken to do what this one does.

Memory of one rank depends on the others by what these say at the start, by the sizes that they send
and by the order of collectives. Where all of them run the same program on their share of the work,
this rank can tell all three. So a store answers for the others what this rank said itself, and
gloo's collectives return at once, with this rank's own values. NCCL's are those of the simulated
runtime, by the same rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from pytest_torchmem.record.torch_api import distributed

#: NCCL's name for a communicator. Rank 0 makes it up, and the simulated NCCL does not look at it.
_UNIQUE_ID: Final = bytes(128)
#: Ranks that map each other's memory begin with this in the store.
_OF_MAPPED_MEMORY: Final = re.compile(r".*SymmetricMemory.*", re.DOTALL)
_OF_COMMUNICATOR: Final = re.compile(r".*[/:](UniqueNCCLID:|nccl_storekey_)?\d+(:\d+)?", re.DOTALL)


#: torch keeps a store by its half in C++; without the half in Python that one can answer nothing.
_STORES: Final[list[MirroredStore]] = []


def join() -> None:
    """Let ``init_process_group`` return at once; torch calls this when it is imported."""
    if dist.is_available():
        distributed.replace_rendezvous(_rendezvous)
        distributed.make_gloo_without_partners()
        distributed.refuse_unsent_objects(_no_object)
        distributed.refuse_calls_between_ranks(_no_calls)
        distributed.save_what_one_rank_has()
        distributed.tell_sizes_of_groups(_tell_nccl)


def _no_object() -> dist.DistBackendError:
    return dist.DistBackendError(
        f"rank {dist.get_rank()} of {dist.get_world_size()} waits for an object that another rank "
        "would send; only this rank is run [not-simulated]"
    )


def _no_calls() -> RuntimeError:
    return RuntimeError(
        "init_rpc is for calls between ranks; only one rank of the world is run [not-simulated]"
    )


def _tell_nccl(rank_count: int) -> None:
    with contextlib.suppress(AttributeError):  # without a simulated GPU there is nobody to tell
        ctypes.CDLL(None).torchmem_next_split(rank_count)


def _rendezvous(rank: int, world_size: int) -> Iterator[tuple[dist.Store, int, int]]:
    yield MirroredStore(rank, world_size), rank, world_size


class MirroredStore(dist.Store):
    """A store in which the other ranks have put what this rank has put.

    A key that another rank would have set is one that this rank has set under its own number:
    ``addr/3`` is answered with ``addr/0``. What nobody can have set is refused at once, where a
    real store would wait for minutes. A counter counts each call of this rank once for each rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._world_size = world_size
        self._own = dist.HashStore()
        _STORES.append(self)

    def clone(self) -> MirroredStore:
        other = MirroredStore(self._rank, self._world_size)
        other._own = self._own
        return other

    def set(self, key: str, value: str) -> None:
        self._own.set(key, value)

    def get(self, key: str) -> bytes:
        if _OF_MAPPED_MEMORY.fullmatch(key):
            raise dist.DistStoreError(
                f"rank {self._rank} of {self._world_size} maps symmetric memory of other ranks; "
                "only this rank is run [not-simulated]"
            )
        if (answer := self._answer_of(key)) is not None:
            return bytes(self._own.get(answer))
        if _OF_COMMUNICATOR.fullmatch(key):
            return _UNIQUE_ID
        raise self._nobody(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._own.add(key, amount * self._world_size))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._own.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._answer_of(key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            if self._answer_of(key) is None and not _OF_COMMUNICATOR.fullmatch(key):
                raise self._nobody(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str) -> bool:
        return bool(self._own.delete_key(key))

    def num_keys(self) -> int:
        return int(self._own.num_keys())

    def _answer_of(self, key: str) -> str | None:
        """Return the key under which this rank has set what another would have set as ``key``."""
        if self._own.check([key]):
            return key
        for number in reversed(list(re.finditer(r"\d+", key))):
            own = f"{key[: number.start()]}{self._rank}{key[number.end() :]}"
            if self._own.check([own]):
                return own
        return None

    def _nobody(self, key: str) -> dist.DistStoreError:
        return dist.DistStoreError(
            f"rank {self._rank} of {self._world_size} waits for {key!r}, which another rank would "
            "set; only this rank is run, and it sets nothing like it [not-simulated]"
        )
