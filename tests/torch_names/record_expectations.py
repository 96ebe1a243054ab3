"""What torch's own engine makes of the programs, written to ``tests/data/memory_profiler.json``.

    python -m tests.torch_names.record_expectations

The committed file is of torch 2.13.
"""

from __future__ import annotations

import json

import torch

from tests.documents import ROOT
from tests.torch_names.programs import PROGRAMS, profiled, told, torchs

FILE = ROOT / "tests" / "data" / "memory_profiler.json"


def main() -> None:
    found = {program.__name__: told(torchs(), profiled(program())) for program in PROGRAMS}
    text = json.dumps({"torch": torch.__version__.partition("+")[0], "programs": found}, indent=1)
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
