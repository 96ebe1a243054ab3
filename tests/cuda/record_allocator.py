"""Record what the real caching allocator does, for the simulator to be compared with.

    python tests/cuda/record_allocator.py                      # every scenario, into tests/data
    python tests/cuda/record_allocator.py --out /tmp/r stress  # some of them, elsewhere

Needs a CUDA device, or torch's CUDA build on a simulated one, with the same allocator:

    torchmem simulate --gpu H100x2 -- python tests/cuda/record_allocator.py

Each scenario runs in a process of its own, because settings are read once and because a recording
has to begin with an empty allocator. Seeds are fixed; what stays random is how fast the GPU is
(which decides when memory used on a second stream is back) and, for releases that break ties by
address, the addresses.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

from pytest_torchmem.allocator import (  # noqa: E402
    Request,
    RequestLog,
    read_history,
)
from tests.cuda.allocator_recordings import COUNTERS, FOLDER, Recording  # noqa: E402

MiB = 1024**2
GiB = 1024**3
_HISTORY_ENTRIES = 1_000_000


@dataclass(frozen=True)
class Scenario:
    """What to run under which settings; ``allowed_bytes`` limits the process if it is not 0."""

    run: Callable[[Driver], None]
    conf: str = ""
    allowed_bytes: int = 0


@dataclass
class Driver:
    """Makes requests of the real allocator, writes them down, and reads the counters after each."""

    log: RequestLog = field(default_factory=RequestLog)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    streams: list[torch.cuda.Stream] = field(default_factory=list)
    samples: dict[str, list[int]] = field(
        default_factory=lambda: {"row": [], **{name: [] for name in COUNTERS}}
    )
    failed_rows: set[int] = field(default_factory=set)
    # Rows in which the allocator waited for all streams and gave its cache back.
    retried_rows: set[int] = field(default_factory=set)
    retry_count: int = 0
    # Positions in the history at which a sample was taken that belongs to no row yet.
    sampled_entries: list[int] = field(default_factory=list)
    next_key: int = 0

    def alloc(self, size_bytes: int, stream: int = 0) -> int:
        """Allocate, and return the key; one that failed is not among ``tensors``."""
        key = self.next_key
        self.next_key += 1
        self.log.alloc(key, size_bytes, stream)
        with torch.cuda.stream(self.streams[stream]) if stream else nullcontext():
            try:
                self.tensors[key] = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                self.failed_rows.add(len(self.log.rows) - 1)
        self.sample()
        return key

    def free(self, key: int) -> None:
        self.log.free(key)
        del self.tensors[key]
        self.sample()

    def record_stream(self, key: int, stream: int) -> None:
        self.log.record_stream(key, stream)
        self.tensors[key].record_stream(self.streams[stream])
        self.sample()

    def empty_cache(self) -> None:
        self.log.empty_cache()
        torch.cuda.empty_cache()
        self.sample()

    def sample(self) -> None:
        """Read the counters as they are after the last row."""
        row = len(self.log.rows) - 1
        self.samples["row"].append(row)
        retry_count = self._read_counters()["num_alloc_retries"]
        if retry_count != self.retry_count:
            self.retried_rows.add(row)
            self.retry_count = retry_count

    def sample_history(self) -> None:
        """Read the counters in a scenario whose requests are only found in the history."""
        self.sampled_entries.append(len(_entries()))
        self._read_counters()

    def _read_counters(self) -> dict[str, int]:
        stats: dict[str, int] = torch.cuda.memory_stats()
        for name, (counter, _) in COUNTERS.items():
            self.samples[name].append(stats[counter])
        return stats


# --- scenarios -------------------------------------------------------------------------------


def _size(chance: random.Random) -> int:
    """A request as programs make them: mostly small, sometimes large, some on a limit."""
    kind = chance.random()
    if kind < 0.4:
        return chance.randrange(1, 64 * 1024)
    if kind < 0.6:
        return chance.randrange(1, MiB + 2)
    if kind < 0.8:
        return chance.randrange(MiB, 12 * MiB)
    if kind < 0.9:
        return chance.choice([512, MiB, 2 * MiB, 10 * MiB, 20 * MiB, 64 * MiB])
    return chance.randrange(10 * MiB, 96 * MiB)


def _stress(driver: Driver, *, steps: int = 1200, live: int = 60, streams: int = 1) -> None:
    chance = random.Random(steps + streams)
    for _ in range(steps):
        kind = chance.random()
        crowded = len(driver.tensors) > live
        if kind < 0.004:
            driver.empty_cache()
        elif streams > 1 and kind < 0.1 and driver.tensors:
            _use_elsewhere(driver, chance, streams)
        elif kind < (0.45 if crowded else 0.58) or not driver.tensors:
            driver.alloc(_size(chance), chance.randrange(streams))
        else:
            driver.free(chance.choice(list(driver.tensors)))


def _use_elsewhere(driver: Driver, chance: random.Random, streams: int) -> None:
    """Keep a stream busy for some milliseconds, and say that a tensor is used on it."""
    stream = chance.randrange(streams)
    with torch.cuda.stream(driver.streams[stream]):
        torch.cuda._sleep(chance.randrange(1, 20_000_000))
    key = chance.choice(list(driver.tensors))
    driver.record_stream(key, stream)
    driver.free(key)


def stress(driver: Driver) -> None:
    _stress(driver)


def two_streams(driver: Driver) -> None:
    _stress(driver, streams=2)


def private_pool(driver: Driver) -> None:
    """Two scopes of one ``MemPool``, and its end."""
    chance = random.Random(7)
    _stress(driver, steps=100)
    pool = torch.cuda.MemPool()
    for _ in range(2):
        driver.log.begin_pool(1)
        with torch.cuda.use_mem_pool(pool):
            inside = [driver.alloc(_size(chance)) for _ in range(40)]
            for key in inside[::2]:
                driver.free(key)
        driver.log.end_pool(1)
        # Some of what is freed here lies in the pool.
        _stress(driver, steps=150)
    for key in list(driver.tensors):
        driver.free(key)
    driver.empty_cache()
    driver.log.release_pool(1)
    del pool
    driver.empty_cache()


def training(driver: Driver) -> None:
    """Three steps of a small transformer under Adam, sampled after each layer."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4).cuda()
    for module in model.layers:
        module.register_forward_hook(lambda *_: driver.sample_history())
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(3):
        x = torch.randn(8, 96 + 32 * step, 256, device="cuda")
        loss = model(x).square().mean()
        driver.sample_history()
        loss.backward()
        driver.sample_history()
        optimizer.step()
        optimizer.zero_grad()
        driver.sample_history()
    del loss, x
    driver.sample_history()


SCENARIOS = {
    "stress": Scenario(stress),
    "two_streams": Scenario(two_streams),
    "roundup": Scenario(stress, "roundup_power2_divisions:4"),
    "roundup_list": Scenario(stress, "roundup_power2_divisions:[4:8,32:2,>:1]"),
    "max_split": Scenario(stress, "max_split_size_mb:32"),
    "large_segment": Scenario(stress, "large_segment_size_mb:48"),
    "expandable": Scenario(stress, "expandable_segments:True"),
    "expandable_two_streams": Scenario(two_streams, "expandable_segments:True"),
    "garbage": Scenario(stress, "garbage_collection_threshold:0.5", GiB),
    "full": Scenario(stress, allowed_bytes=GiB // 2),
    "full_max_split": Scenario(stress, "max_split_size_mb:32", GiB // 2),
    "full_expandable": Scenario(stress, "expandable_segments:True", GiB // 2),
    "full_two_streams": Scenario(two_streams, allowed_bytes=GiB // 2),
    "private_pool": Scenario(private_pool),
    "training": Scenario(training),
    "training_expandable": Scenario(training, "expandable_segments:True"),
}


# --- recording -------------------------------------------------------------------------------


def record(name: str) -> Recording:
    """Run one scenario in this process, which must not have allocated anything yet."""
    scenario = SCENARIOS[name]
    properties = torch.cuda.get_device_properties(0)
    fraction = 1.0
    if scenario.allowed_bytes:
        fraction = scenario.allowed_bytes / properties.total_memory
        torch.cuda.set_per_process_memory_fraction(fraction)
    driver = _start()
    scenario.run(driver)
    entries = _entries()
    stats = torch.cuda.memory_stats()
    log, address, samples = _in_rows(driver, entries)
    requests = log.requests()
    return Recording(
        scenario=name,
        torch=torch.__version__,
        device=properties.name,
        conf=scenario.conf,
        fraction=fraction,
        capacity_bytes=properties.total_memory,
        completions_given=True,
        requests={
            column: getattr(requests, column).tolist()
            for column in ("kind", "key", "size_bytes", "stream", "pool")
        },
        address=address,
        segment_addresses=[e["addr"] for e in entries if e["action"] == "segment_alloc"],
        samples=samples,
        counts={
            "device_allocs": stats["num_device_alloc"],
            "retries": stats["num_alloc_retries"],
            "ooms": stats["num_ooms"],
        },
    )


def _start() -> Driver:
    driver = Driver(streams=[torch.cuda.default_stream(), torch.cuda.Stream()])
    torch.cuda.synchronize()
    if torch.cuda.memory_reserved():
        raise SystemExit("something was allocated before the recording began")
    torch.cuda.memory._record_memory_history(
        enabled="all", context=None, max_entries=_HISTORY_ENTRIES
    )
    return driver


def _entries() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return entries


def _in_rows(
    driver: Driver, entries: list[dict[str, Any]]
) -> tuple[RequestLog, list[int], dict[str, list[int]]]:
    if not driver.sampled_entries:
        return _Alignment(driver, entries).aligned()
    history = read_history(entries)  # type: ignore[arg-type]
    requests = history.requests
    freed = sum(entry["action"] == "free_requested" for entry in entries)
    if freed > (requests.kind == Request.FREE).sum() or history.refused:
        raise SystemExit("the history does not hold everything that was asked for")
    columns = (requests.kind, requests.key, requests.size_bytes, requests.stream, requests.pool)
    log = RequestLog(rows=list(zip(*(column.tolist() for column in columns), strict=True)))
    rows = [int(history.row_count[entry - 1]) - 1 for entry in driver.sampled_entries]
    return log, history.address.tolist(), {**driver.samples, "row": rows}


class _Alignment:
    """Lays the rows that were asked beside the history's entries.

    Both are in order, so each allocation and each free meets its own entry. A completed free that
    stands in between says when a block was back, and becomes a row of its own.
    """

    def __init__(self, driver: Driver, entries: list[dict[str, Any]]) -> None:
        self._driver = driver
        self._entries = iter(entries)
        self._log = RequestLog()
        self._address: list[int] = []
        self._moved: list[int] = []
        self._at: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._elsewhere: set[int] = set()

    def aligned(self) -> tuple[RequestLog, list[int], dict[str, list[int]]]:
        for number, row in enumerate(self._driver.log.rows):
            address = self._meet(number, row)
            self._moved.append(len(self._log.rows))
            self._append(row, address)
        samples = dict(self._driver.samples)
        samples["row"] = [self._moved[row] for row in samples["row"]]
        return self._log, self._address, samples

    def _append(self, row: tuple[int, int, int, int, int], address: int) -> None:
        self._log.rows.append(row)
        self._address.append(address)

    def _meet(self, number: int, row: tuple[int, int, int, int, int]) -> int:
        """Advance to the row's entry, and return the address of an allocation."""
        kind, key, size, *_ = row
        if kind == Request.ALLOC and size:
            # A retry waits for every stream. Blocks that came back only then did not keep it from
            # being needed, and a replay gets them back the same way.
            waited = number in self._driver.retried_rows
            if number in self._driver.failed_rows:
                self._advance("oom", waited=waited)
                return 0
            self._at[key] = self._advance("alloc", waited=waited)["addr"]
            return self._at[key]
        if kind == Request.FREE and key in self._at:
            address = self._advance("free_requested")["addr"]
            if address != self._at.pop(key):
                raise SystemExit(f"row {number} frees another block than the history says")
            if key in self._elsewhere:
                self._waiting[address] = key
            else:
                self._advance("free_completed")
        if kind == Request.RECORD_STREAM:
            self._note_other_stream(row)
        return 0

    def _note_other_stream(self, row: tuple[int, int, int, int, int]) -> None:
        _, key, _, stream, _ = row
        allocated_on = next(r[3] for r in self._driver.log.rows if r[:2] == (Request.ALLOC, key))
        if stream != allocated_on:
            self._elsewhere.add(key)

    def _advance(self, action: str, *, waited: bool = False) -> dict[str, Any]:
        for entry in self._entries:
            if entry["action"] == "free_completed" and entry["addr"] in self._waiting:
                done = self._waiting.pop(entry["addr"])
                if not waited:
                    self._append((int(Request.BLOCK_DONE), done, 0, 0, 0), 0)
            elif entry["action"] == action:
                return entry
        raise SystemExit(f"the history ends before its entry for {action}")


def record_all(names: list[str], out: Path) -> None:
    """Record each scenario in a process of its own."""
    for name in names:
        conf = SCENARIOS[name].conf
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": conf}
        environment.pop("PYTORCH_ALLOC_CONF", None)
        command = [sys.executable, __file__, "--in-process", "--out", str(out), name]
        done = subprocess.run(command, env=environment, check=False)
        if done.returncode:
            print(f"{name}: could not be recorded", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SCENARIOS, []], metavar="scenario")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or list(SCENARIOS)
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device to record on")
    if not options.in_process:
        record_all(names, options.out)
        return
    for name in names:
        recording = record(name)
        path = options.out / f"torch-{torch.__version__.partition('+')[0]}" / f"{name}.json.gz"
        recording.save(path)
        print(f"{name}: {len(recording.address)} requests, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
