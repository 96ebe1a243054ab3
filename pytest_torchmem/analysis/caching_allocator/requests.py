"""The requests of a program to the allocator, in order: the simulator's input, as columns."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pytest_torchmem.values.errors import RequestError

DEFAULT_STREAM: Final = 0
DEFAULT_POOL: Final = 0


class Request(enum.IntEnum):
    """The request of one row of `Requests`, and the columns that it uses."""

    ALLOC = 0
    """Allocate ``size_bytes`` under ``key`` for ``stream`` from ``pool``."""
    FREE = 1
    """Free ``key``."""
    RECORD_STREAM = 2
    """``key`` is also used on ``stream``, as ``Tensor.record_stream`` says."""
    STREAM_DONE = 3
    """All work queued on ``stream`` so far has run."""
    BLOCK_DONE = 4
    """All work that the freed ``key`` waits for has run, whatever else its streams do."""
    EMPTY_CACHE = 5
    """``torch.cuda.empty_cache()``."""
    CAPTURE_BEGIN = 6
    """A CUDA graph capture begins: nothing is waited for until its end."""
    CAPTURE_END = 7
    """A CUDA graph capture ends."""
    POOL_RELEASE = 8
    """Nobody holds private pool ``pool`` any more: its free segments may be given back."""


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests to one device's allocator, one per row.

    Attributes:
        kind: int8, shape (T,); a `Request` each.
        key: int64, shape (T,); names an allocation from its ALLOC to its FREE.
        size_bytes: int64, shape (T,); what was asked for, before any rounding.
        stream: int64, shape (T,); any number per stream.
        pool: int64, shape (T,); `DEFAULT_POOL`, or any number per private pool.
        completions_given: Whether STREAM_DONE and BLOCK_DONE rows say when freed memory that
            other streams used is theirs no more. False: such memory is back by the next
            allocation, as when the GPU never falls behind the program.
    """

    kind: NDArray[np.int8]
    key: NDArray[np.int64]
    size_bytes: NDArray[np.int64]
    stream: NDArray[np.int64]
    pool: NDArray[np.int64]
    completions_given: bool = False

    def __len__(self) -> int:
        return len(self.kind)

    def __add__(self, later: Requests) -> Requests:
        """Make these requests, and then ``later`` ones, whose completions are given or not."""
        names = ("kind", "key", "size_bytes", "stream", "pool")
        kind, key, size_bytes, stream, pool = (
            np.concatenate([getattr(self, name), getattr(later, name)]) for name in names
        )
        return Requests(kind, key, size_bytes, stream, pool, later.completions_given)

    def with_rows(self, places: Sequence[int], others: Requests) -> Requests:
        """Return these requests with each of ``others`` before the row of its place."""
        names = ("kind", "key", "size_bytes", "stream", "pool")
        kind, key, size_bytes, stream, pool = (
            np.insert(getattr(self, name), list(places), getattr(others, name)) for name in names
        )
        return Requests(kind, key, size_bytes, stream, pool, self.completions_given)

    @classmethod
    def from_columns(
        cls,
        is_alloc: ArrayLike,
        size_bytes: ArrayLike,
        key: ArrayLike,
        stream: ArrayLike = DEFAULT_STREAM,
        pool: ArrayLike = DEFAULT_POOL,
    ) -> Requests:
        """Return plain allocations and frees as requests.

        Each argument is a column of T entries; a single number stands for all rows. ``size_bytes``
        is not read where ``is_alloc`` is false. Raises `RequestError` when lengths differ.
        """
        allocates = np.atleast_1d(np.asarray(is_alloc, dtype=bool))
        kind = np.where(allocates, Request.ALLOC, Request.FREE).astype(np.int8)
        columns = (size_bytes, key, stream, pool)
        try:
            size, keys, streams, pools = (
                np.array(np.broadcast_to(np.asarray(column, dtype=np.int64), kind.shape))
                for column in columns
            )
        except ValueError as error:
            raise RequestError(f"the columns of requests differ in length: {error}") from None
        return cls(kind=kind, key=keys, size_bytes=size, stream=streams, pool=pools)

    @classmethod
    def from_lifetimes(
        cls,
        size_bytes: ArrayLike,
        born: ArrayLike,
        died: ArrayLike,
        stream: ArrayLike = DEFAULT_STREAM,
    ) -> Requests:
        """Return the requests of storages that live from ``born`` to ``died``.

        Every argument is a column with one entry per storage, times in any unit; a storage that
        outlives the program died at infinity. What is born at the moment another dies is taken
        to be allocated first, the way an operator's output is while its input still lives. Keys
        are row numbers. Raises `RequestError` when lengths differ or a storage dies before it is
        born.

        One storage lives from 0 to 1, another is born at 1 and stays:

        >>> requests = Requests.from_lifetimes([512, 1024], born=[0, 1], died=[1, float("inf")])
        >>> requests.key.tolist(), [Request(kind).name for kind in requests.kind]
        ([0, 1, 0], ['ALLOC', 'ALLOC', 'FREE'])
        """
        births, deaths = (np.asarray(times, dtype=np.float64) for times in (born, died))
        if births.shape != deaths.shape:
            raise RequestError("the columns of lifetimes differ in length")
        if (deaths < births).any():
            raise RequestError(f"storage {int(np.argmax(deaths < births))} dies before it is born")
        mortal = np.flatnonzero(np.isfinite(deaths))
        keys = np.concatenate([np.arange(len(births)), mortal])
        dies = np.arange(len(keys)) >= len(births)
        order = np.lexsort((dies, np.concatenate([births, deaths[mortal]])))
        sizes, streams = (
            np.broadcast_to(np.asarray(column, dtype=np.int64), births.shape)[keys][order]
            for column in (size_bytes, stream)
        )
        return cls.from_columns(~dies[order], sizes, keys[order], streams)


@dataclass(slots=True)
class RequestLog:
    """Requests written down one after the other; `requests` gives them as columns.

    Scopes of private pools (``torch.cuda.use_mem_pool``, graph captures) are resolved here: an
    allocation inside one carries its pool.
    """

    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    completions_given: bool = False
    scopes: list[tuple[int, frozenset[int]]] = field(default_factory=list)

    def alloc(self, key: int, size_bytes: int, stream: int = DEFAULT_STREAM) -> None:
        """Allocate for ``stream``, from the pool of the newest scope that takes that stream."""
        takers = (pool for pool, who in reversed(self.scopes) if not who or stream in who)
        pool = next(takers, DEFAULT_POOL)
        self.rows.append((Request.ALLOC, key, size_bytes, stream, pool))

    def free(self, key: int) -> None:
        self._add(Request.FREE, key=key)

    def record_stream(self, key: int, stream: int) -> None:
        self._add(Request.RECORD_STREAM, key=key, stream=stream)

    def stream_done(self, stream: int) -> None:
        """Say that ``stream`` has caught up; from then on only such rows bring memory back."""
        self.completions_given = True
        self._add(Request.STREAM_DONE, stream=stream)

    def block_done(self, key: int) -> None:
        """Say that freed ``key`` waits no more; from then on only such rows bring memory back."""
        self.completions_given = True
        self._add(Request.BLOCK_DONE, key=key)

    def empty_cache(self) -> None:
        self._add(Request.EMPTY_CACHE)

    def begin_pool(
        self, pool: int, streams: frozenset[int] = frozenset(), *, capture: bool = False
    ) -> None:
        """Send allocations of ``streams`` (none named: of all) to a private pool.

        ``capture`` says that the scope is a CUDA graph capture, in which nothing is waited for;
        releases from before May 2026 treat every scope as one. Raises `RequestError` if the pool's
        scope is open already.
        """
        if any(pool == opened for opened, _ in self.scopes):
            raise RequestError(f"pool {pool} is in use already")
        self.scopes.append((pool, streams))
        if capture:
            self._add(Request.CAPTURE_BEGIN, pool=pool)

    def end_pool(self, pool: int, *, capture: bool = False) -> None:
        """Close the pool's scope. Raises `RequestError` if it is not open."""
        remaining = [scope for scope in self.scopes if scope[0] != pool]
        if len(remaining) == len(self.scopes):
            raise RequestError(f"pool {pool} is not in use")
        self.scopes = remaining
        if capture:
            self._add(Request.CAPTURE_END, pool=pool)

    def release_pool(self, pool: int) -> None:
        """Drop the last holder of the pool (its graph or ``MemPool``)."""
        self._add(Request.POOL_RELEASE, pool=pool)

    def requests(self) -> Requests:
        """Everything asked so far."""
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 5)
        kind, key, size_bytes, stream, pool = (np.ascontiguousarray(column) for column in table.T)
        return Requests(
            kind=kind.astype(np.int8),
            key=key,
            size_bytes=size_bytes,
            stream=stream,
            pool=pool,
            completions_given=self.completions_given,
        )

    def _add(self, kind: Request, key: int = 0, stream: int = 0, pool: int = 0) -> None:
        self.rows.append((kind, key, 0, stream, pool))
