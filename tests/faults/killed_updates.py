"""Runs updates of a project's baselines one after the other, each killed at a random moment.

After each kill every baseline must be whole: all of its entries from one run. Each run is forked
off a process that has imported everything, and stores its own number of MiB for every test.

``python killed_updates.py FOLDER KILLS SEED [PYTEST ARGUMENTS]`` prints what it saw as JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

import pytest_torchmem.plugin.run.controller  # noqa: F401
from pytest_torchmem.store.baseline_file import read_any
from pytest_torchmem.store.files import LOCK

FINISHING = Path("finishing")
WHOLE = (".json", ".origins")


def start(number: int, arguments: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    os.setsid()
    os.environ["SIZE"] = str(number)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    # Each run stores what it measured, however near to the last one that is.
    update = ["-q", "--torchmem-update-baseline", "-otorchmem_tolerance=0"]
    os._exit(pytest.main([*update, *arguments]))


def wait_until_it_finishes(child: int) -> None:
    """Wait for the hook at the end of the run, in which baselines are written."""
    while (
        not FINISHING.exists()
        and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        time.sleep(0.001)


def stored(folder: Path) -> dict[str, int]:
    """The run that each baseline is of. Raises `ValueError` for one that is of two."""
    found = {}
    for path in sorted(folder.glob("*/*.json")):
        if path.name.startswith("."):
            continue
        _, entries = read_any(path)
        runs = {entries.entry(key, path).total >> 20 for key in entries.lines}
        if len(runs) != 1:
            raise ValueError(f"{path} is of the runs {sorted(runs)}")
        found[path.name] = runs.pop() * 1000 + len(entries.lines)
    return found


def litter(folder: Path) -> int:
    known = (LOCK, ".gitignore", ".gitattributes")
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    return sum(name not in known and not name.endswith(WHOLE) for name in names)


def main(folder: Path, kills: int, seed: int, arguments: list[str]) -> None:
    chance = random.Random(seed)
    os.chdir(folder)
    begin = time.monotonic()
    os.waitpid(start(1, arguments), 0)
    whole_s = time.monotonic() - begin
    before, seen, most_litter = stored(Path("__torchmem__")), set(), 0
    cut_short = 0
    for number in range(2, kills + 2):
        FINISHING.unlink(missing_ok=True)
        child = start(number, arguments)
        if chance.random() < 0.6:
            wait_until_it_finishes(child)
            time.sleep(chance.uniform(0, 0.05))
        else:
            time.sleep(chance.uniform(0, whole_s))
        os.killpg(child, signal.SIGKILL) if os.getpgid(child) == child else os.kill(child, 9)
        _, status = os.waitpid(child, 0)
        cut_short += os.WIFSIGNALED(status)
        now = stored(Path("__torchmem__"))
        assert now.keys() == before.keys(), (before, now)
        for name in now:
            assert now[name] in (before[name], number * 1000 + before[name] % 1000), (before, now)
        seen.add(tuple(value // 1000 == number for value in now.values()))
        before, most_litter = now, max(most_litter, litter(Path("__torchmem__")))
    os.waitpid(start(kills + 2, arguments), 0)
    last = {value // 1000 for value in stored(Path("__torchmem__")).values()}
    print(
        json.dumps(
            {
                "killed": cut_short,
                "half written": sum(any(some) and not all(some) for some in seen),
                "most litter": most_litter,
                "litter": litter(Path("__torchmem__")),
                "last is whole": last == {kills + 2},
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
