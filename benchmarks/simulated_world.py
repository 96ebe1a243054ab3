"""Memory of one rank of large jobs on simulated GPUs, beside the arithmetic of shards.

    python benchmarks/simulated_world.py

Each row is a process of its own: a language model with the dimensions of Llama 2 takes two training
steps as rank 0 of so many, by ``torchmem simulate --world``. *Shards* is what arithmetic lets the
rank hold between two steps: its part of the parameters, and of the two states of AdamW. Measured
there are the shards, the workspaces of cuBLAS, and whatever the method keeps beside them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

from tabulate import tabulate

RESULTS = Path(__file__).parent / "results" / "simulated-world.md"
ROWS = [
    ("7B", "fully_shard", 8),
    ("7B", "fully_shard", 64),
    ("7B", "fully_shard", 512),
    ("7B", "FSDP1", 64),
    ("7B", "tensor parallel", 8),
    ("7B", "tensor parallel x fully_shard", 64),
    ("7B", "first stage of 8", 8),
    ("1B", "DDP", 64),
    ("70B", "fully_shard", 8),
    ("70B", "fully_shard", 64),
    ("70B", "fully_shard", 512),
    ("70B", "tensor parallel x fully_shard", 512),
]
GIB = 2**30


def main() -> None:
    program = str(Path(__file__).with_name("simulated_world_rank.py"))
    table = []
    release = ""
    for model, plan, ranks in ROWS:
        command = ["simulate", "--gpu", "H100x8", "--world", str(ranks), "--", "python", program]
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "pytest_torchmem", *command, model, plan],
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(f"{model} {plan} on {ranks}: {done.stderr[-3000:]}")
        row = json.loads(done.stdout.splitlines()[-1])
        release = row["torch"]
        table.append(
            [model, plan, ranks]
            + [_gib(row.get(key)) for key in ("shards", "between_steps", "workspaces", "peak")]
            + [f"{took_s:.0f}"]
        )
        print(*table[-1], flush=True)
    headers = ["model", "plan", "ranks", "shards", "between steps", "workspaces", "peak", "seconds"]
    text = tabulate(table, headers, tablefmt="pipe", disable_numparse=True)
    RESULTS.write_text(
        f"# Rank 0 of N on simulated GPUs\n\ntorch {release}, {date.today()}, H100s, on "
        f"{os.cpu_count()} cores with a load of {os.getloadavg()[2]:.0f}; "
        "GiB of requested memory. `python benchmarks/simulated_world.py` made the table and says "
        f"what its columns mean.\n\n{text}\n"
    )


def _gib(size_bytes: int | None) -> str:
    return "out of memory" if size_bytes is None else f"{size_bytes / GIB:.3f}"


if __name__ == "__main__":
    main()
