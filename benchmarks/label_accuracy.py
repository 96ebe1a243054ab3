"""Bytes at the peak that are labelled right: ours beside torch's, workload by workload.

    python -m benchmarks label_accuracy                      # all, as a Markdown table
    python -m benchmarks label_accuracy gpt2 lora --verbose  # some, with what is wrong

Each workload runs four times: to warm up, for the truth (`benchmarks.label_truth`), under our
recorder, and under ``torch.profiler`` with shapes, memory and stacks for torch's own
``MemoryProfile``. The labels of the last two are graded at the peak that each of them sees, byte by
byte: a byte is right if its storage, found by the number of its allocation, has the true label.
What was there before the body began is graded by what its owner says of the pointer. A peak that
misses bytes has them counted as wrong.

The truth is stated in our categories. torch has no word for BUFFER, and gets INPUT and PARAMETER
counted as right for one. Its ACTIVATION is defined otherwise ("any forward output"), so its column
says how far its labels can be used for the question that ours answer, not that its code fails its
own definition.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import difflib
import gc
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler._memory_profiler import Action, MemoryProfile, TensorKey

from benchmarks.label_truth import Declared, Truth, allocation_log, find_truth
from benchmarks.workloads import Workload
from benchmarks.workloads_models import TRANSFORMS, all_workloads
from pytest_torchmem.analysis.storages.timeline import live_at
from pytest_torchmem.values.contributors import Category
from tests.measured import profile_of


@dataclass(frozen=True, slots=True)
class Piece:
    """A storage that is live at a peak: its bytes, its label, and which one it is.

    ``number`` counts the body's allocations; for what was there before it is -1, and ``before`` is
    what its owner says it is (None: nobody owns it).
    """

    size_bytes: int
    label: str
    number: int
    before: Category | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """A profile of one run: all allocations of the body, and the pieces of its peak.

    ``made`` holds the label of each allocation, where a profile gives it a single one.
    """

    sizes: list[int]
    pieces: list[Piece]
    made: list[str] | None = None
    own_peaks: dict[Category, int] | None = None

    @property
    def total(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Grade:
    """How a profile did against the truth; ``wrong`` counts bytes by (said, true).

    ``right_ever`` is the share of all bytes that the body ever allocated, at the peak or not; 0 for
    a profile whose labels change while a storage lives.
    """

    peak_bytes: int
    right_bytes: int
    unknown_bytes: int
    true_peak_bytes: int
    right_ever: float
    wrong: dict[tuple[str, str], int]

    @property
    def right_share(self) -> float:
        return self.right_bytes / max(self.peak_bytes, self.true_peak_bytes, 1)

    @property
    def unknown_share(self) -> float:
        return self.unknown_bytes / max(self.peak_bytes, 1)


def our_labels(workload: Workload) -> Labels:
    """Run the workload under our recorder and engine."""
    declared = Declared()
    body = workload(declared)
    before = declared.pointers()
    profile = profile_of(body)
    storages = profile.storages
    made = np.flatnonzero(storages.event >= 0)
    made = made[np.argsort(storages.born[made])]
    numbers = {row: number for number, row in enumerate(made.tolist())}
    rank = float(profile.ranks[profile.timeline.peak_row])
    live = live_at(profile.evidence, rank).tolist()
    names = [category.value for category in Category]
    pieces = [
        Piece(
            int(storages.size_bytes[row]),
            names[profile.labels[row]],
            numbers.get(row, -1),
            before.get(int(storages.ptr[row])),
        )
        for row in live
    ]
    return Labels(
        sizes=storages.size_bytes[made].tolist(),
        pieces=pieces,
        made=[names[column] for column in profile.labels[made].tolist()],
        own_peaks=dict(profile.peak.by_category.items()),
    )


def torch_labels(workload: Workload) -> Labels:
    """Run the workload under torch's profiler and its memory profile."""
    declared = Declared()
    body = workload(declared)
    before = declared.pointers()
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
    ) as profile:
        body()
    result: Any = profile.profiler.kineto_results
    memory = MemoryProfile(result)
    log = [e.typed[1] for e in allocation_log(result.experimental_event_tree())]
    times = [e.start_time_ns for e in allocation_log(result.experimental_event_tree())]
    births = [(t, f) for t, f in zip(times, log, strict=True) if f.alloc_size > 0]
    numbers = {(t, f.alloc_size): number for number, (t, f) in enumerate(births)}
    return Labels([f.alloc_size for _, f in births], _torch_peak(memory, numbers, before))


def _torch_peak(
    memory: MemoryProfile, numbers: dict[tuple[int, int], int], before: dict[int, Category]
) -> list[Piece]:
    live: dict[Any, Piece] = {}
    total, largest, peak = 0, -1, {}
    for time, action, (key, version), size in memory.timeline:
        if action is Action.DESTROY:
            if (gone := live.pop(key, None)) is not None:
                total -= gone.size_bytes
            continue
        is_tensor = isinstance(key, TensorKey)
        label = memory._categories.get(key, version) if is_tensor else None
        name = "unknown" if label is None else label.name.lower()
        if action is Action.INCREMENT_VERSION:
            # The entry carries the version that is written over; what it becomes is the next one.
            label = memory._categories.get(key, version + 1) if is_tensor else None
            name = "unknown" if label is None else label.name.lower()
            if key in live:
                old = live[key]
                live[key] = Piece(old.size_bytes, name, old.number, old.before)
        else:
            number = numbers[time, size] if action is Action.CREATE else -1
            owner = (
                before.get(key.storage.ptr) if isinstance(key, TensorKey) and number < 0 else None
            )
            live[key] = Piece(size, name, number, owner)
            total += size
        if total > largest:
            largest, peak = total, dict(live)
    return list(peak.values())


def grade(labels: Labels, truth: Truth) -> Grade:
    """Compare label by label."""
    same = _same_allocations(labels.sizes, truth.sizes)
    right = unknown = 0
    wrong: collections.Counter[tuple[str, str]] = collections.Counter()
    for piece in labels.pieces:
        if not piece.size_bytes:
            continue
        if piece.number < 0:
            true = piece.before
        else:
            at = same.get(piece.number)
            true = None if at is None else truth.labels[at]
        unknown += piece.size_bytes * (piece.label == "unknown")
        if true is not None and _fits(piece.label, true, labels.own_peaks is None):
            right += piece.size_bytes
        else:
            wrong[piece.label, "nobody's" if true is None else true.value] += piece.size_bytes
    true_peak = sum(truth.peak.values())
    ever = _right_ever(labels, truth, same)
    return Grade(labels.total, right, unknown, true_peak, ever, dict(wrong))


def _right_ever(labels: Labels, truth: Truth, same: dict[int, int]) -> float:
    total = sum(labels.sizes)
    right = sum(
        labels.sizes[number]
        for number, label in enumerate(labels.made or ())
        if number in same and label == truth.labels[same[number]].value
    )
    return right / total if total else 1.0


def _fits(label: str, true: Category, is_torch: bool) -> bool:
    if is_torch and true is Category.BUFFER:
        return label in ("input", "parameter")
    return label == true.value


def _same_allocations(sizes: Sequence[int], true_sizes: Sequence[int]) -> dict[int, int]:
    """Which number among the true allocations each of ours has."""
    if list(sizes) == list(true_sizes):
        return {number: number for number in range(len(sizes))}
    matcher = difflib.SequenceMatcher(None, sizes, true_sizes, autojunk=False)
    return {
        block.a + offset: block.b + offset
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def own_peak_error(labels: Labels, truth: Truth) -> tuple[int, str]:
    """The largest error of a category's own peak over time, in bytes, and whose it is."""
    own_peaks = labels.own_peaks or {}
    errors = {c: abs(own_peaks.get(c, 0) - truth.own_peaks[c]) for c in Category}
    worst = max(errors, key=lambda category: errors[category])
    return errors[worst], worst.value if errors[worst] else ""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. ``differences`` says where two runs did not allocate alike."""

    workload: str
    ours: Grade
    torch: Grade | None
    own_peak_error: tuple[int, str]
    same_allocations: bool


def measure(workload: Workload, with_torch: bool = True) -> Row:
    """Run the workload four times and grade it."""
    workload(Declared())()
    truth = find_truth(workload, hooks_allowed=workload not in TRANSFORMS)
    ours = our_labels(workload)
    graded = None
    if with_torch:
        try:
            graded = grade(torch_labels(workload), truth)
        except Exception as error:  # torch's analysis raises on some programs
            print(f"{workload.__name__}: torch raised {error!r}", file=sys.stderr)
    return Row(
        workload.__name__,
        grade(ours, truth),
        graded,
        own_peak_error(ours, truth),
        list(ours.sizes) == list(truth.sizes),
    )


_LEGEND = """\
Shares are per cent of bytes, rounded down: 100 means that not one byte is wrong. "Right" and
"unknown" are at the peak that each profile sees; "all bytes ever" grades every allocation of the
body, live at the peak or not. "Our peak" is ours less the true one. A workload with (!) did not
allocate alike in two runs. How the truth is found: `benchmarks/label_truth.py`. torch's column
grades `torch.profiler._memory_profiler.MemoryProfile` by our definitions of the categories; it has
no BUFFER (INPUT and PARAMETER pass for it) and calls any forward output ACTIVATION, so it says how
far its labels answer our question, not that it breaks its own definition."""

_HEAD = """\
| workload | true peak, bytes | our peak | ours right | ours UNKNOWN | torch right | torch unknown \
| ours right, all bytes ever | worst own-peak error, bytes |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def line(row: Row) -> str:
    """The row in Markdown."""
    ours, theirs = row.ours, row.torch
    drift = ours.peak_bytes - ours.true_peak_bytes
    error, category = row.own_peak_error
    cells = [
        row.workload + ("" if row.same_allocations else " (!)"),
        f"{ours.true_peak_bytes:,}",
        f"{drift:+,}" if drift else "same",
        _percent(ours.right_share),
        _percent(ours.unknown_share),
        "raises" if theirs is None else _percent(theirs.right_share),
        "" if theirs is None else _percent(theirs.unknown_share),
        _percent(ours.right_ever),
        f"{error:,} ({category})" if error else "0",
    ]
    return "| " + " | ".join(cells) + " |"


def _percent(share: float) -> str:
    # Rounded down: 100 means that nothing at all is wrong.
    return "100" if share == 1 else f"{int(share * 10000) / 100:.2f}"


def _mistakes(row: Row) -> Iterable[str]:
    for name, graded in (("ours", row.ours), ("torch", row.torch)):
        for (said, true), size in sorted((graded.wrong if graded else {}).items()):
            yield f"    {name}: {size:>10,} bytes of {true} called {said}"


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description="Label accuracy, ours beside torch's")
    parser.add_argument("workload", nargs="*", help="names; all by default")
    parser.add_argument("--verbose", action="store_true", help="say what is labelled wrong")
    options = parser.parse_args(arguments)
    chosen = [w for w in all_workloads() if not options.workload or w.__name__ in options.workload]
    command = " ".join(("python -m benchmarks label_accuracy", *options.workload))
    write(
        f"# Label accuracy on the CPU\n\ntorch {torch.__version__}, "
        f"Python {platform.python_version()}, {datetime.date.today().isoformat()}. "
        f"Made by `{command}`.\n\n{_LEGEND}\n\n{_HEAD}"
    )
    for workload in chosen:
        row = measure(workload)
        write(line(row))
        if options.verbose:
            for mistake in _mistakes(row):
                write(mistake)
