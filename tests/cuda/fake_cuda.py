"""A stand-in for the part of torch that the recorder uses, with the simulator behind it.

It keeps ``record_allocator.py`` working on machines without a GPU: what it records of this must be
what the simulator replays.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

from pytest_torchmem.allocator import AllocatorSettings
from pytest_torchmem.analysis.caching_allocator.allocator_settings import UNLIMITED_BYTES
from pytest_torchmem.analysis.caching_allocator.blocks import DeviceMemory
from pytest_torchmem.analysis.caching_allocator.device import Device
from tests.cuda.allocator_recordings import COUNTERS

CAPACITY = 1 << 36


class TracingDevice(Device):
    """The simulated allocator, keeping a history like torch's."""

    def __init__(self, settings, memory):
        super().__init__(settings, memory, completions_given=True)
        self.entries = []

    def note(self, action, address):
        self.entries.append({"action": action, "addr": address, "size": 0, "stream": 0})

    def alloc(self, row, key, requested, stream, pool):
        address = super().alloc(row, key, requested, stream, pool)
        if address:
            self.note("alloc", address)
        return address

    def free(self, row, key):
        if key in self.live:
            self.note("free_requested", self.live[key].address)
        super().free(row, key)

    def _release(self, block):
        self.note("free_completed", block.address)
        super()._release(block)

    def _ask_device(self, home, size):
        block = super()._ask_device(home, size)
        if block is not None and block.span is None:
            self.note("segment_alloc", block.address)
        return block

    def _give_back_segment(self, block):
        self.note("segment_free", block.address)
        super()._give_back_segment(block)

    def _note_out_of_memory(self, row, requested, size):
        self.note("oom", 0)
        super()._note_out_of_memory(row, requested, size)


class FakeTensor:
    def __init__(self, cuda, key):
        self._cuda = cuda
        self._key = key

    def record_stream(self, stream):
        self._cuda.allocator.record_stream(0, self._key, stream.number)

    def __del__(self):
        self._cuda.allocator.free(0, self._key)


class FakeCuda:
    """``torch.cuda``. Streams finish their work at random moments."""

    OutOfMemoryError = MemoryError

    def __init__(self, conf):
        self._settings = AllocatorSettings.parse(conf)
        self._memory = DeviceMemory(CAPACITY, UNLIMITED_BYTES)
        self.allocator = TracingDevice(self._settings, self._memory)
        self._chance = random.Random(3)
        self._stream = self._pool = self._next_key = 0
        self.memory = SimpleNamespace(
            _record_memory_history=lambda **_: None,
            _snapshot=lambda: {"device_traces": [self.allocator.entries]},
        )

    def empty(self, size):
        if self._chance.random() < 0.3:
            self.allocator.stream_done(self._chance.randrange(2))
        self._next_key += 1
        failures = len(self.allocator.out_of_memory)
        self.allocator.alloc(0, self._next_key, size, self._stream, self._pool)
        if len(self.allocator.out_of_memory) > failures:
            raise self.OutOfMemoryError
        return FakeTensor(self, self._next_key)

    def default_stream(self):
        return SimpleNamespace(number=0)

    def Stream(self):  # noqa: N802
        return SimpleNamespace(number=1)

    def MemPool(self):  # noqa: N802
        return FakePool(self)

    @contextmanager
    def stream(self, stream):
        self._stream, before = stream.number, self._stream
        yield
        self._stream = before

    @contextmanager
    def use_mem_pool(self, _):
        self._pool = 1
        yield
        self._pool = 0

    def set_per_process_memory_fraction(self, fraction):
        self._settings = replace(self._settings, per_process_memory_fraction=fraction)
        self._memory = DeviceMemory(CAPACITY, round(fraction * CAPACITY))
        self.allocator = TracingDevice(self._settings, self._memory)

    def memory_stats(self):
        state = self.allocator
        values = {
            "requested": state.requested,
            "allocated": state.allocated,
            "active": state.active,
            "reserved": self._memory.reserved,
            "inactive_split": state.inactive_split,
            "segments": self._memory.segment_count,
        }
        return {
            **{COUNTERS[name][0]: value for name, value in values.items()},
            "num_device_alloc": self._memory.alloc_count,
            "num_alloc_retries": state.retry_count,
            "num_ooms": len(state.out_of_memory),
        }

    def empty_cache(self):
        self.allocator.empty_cache()

    def memory_reserved(self):
        return self._memory.reserved

    def get_device_properties(self, _):
        return SimpleNamespace(total_memory=CAPACITY, name="fake")

    def synchronize(self):
        pass

    def _sleep(self, _):
        pass


class FakePool:
    def __init__(self, cuda):
        self._cuda = cuda

    def __del__(self):
        self._cuda.allocator.released_pools.add(1)


def fake_torch(conf):
    """What the recorder sees instead of ``torch``."""
    cuda = FakeCuda(conf)
    return SimpleNamespace(
        cuda=cuda,
        uint8=None,
        __version__="2.13.0+fake",
        empty=lambda size, **_: cuda.empty(size),
    )
