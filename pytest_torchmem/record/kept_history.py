"""The history of CUDA's allocator, kept for a whole process that knows nothing of it."""

from __future__ import annotations

import atexit
import json
import os
import re
from pathlib import Path
from typing import Final

import torch

from pytest_torchmem.record import environment
from pytest_torchmem.record.torch_api import allocator

_FOLDER: Final = "TORCHMEM_HISTORY"


def keep_history() -> None:
    """Keep the history from CUDA's first use on; torch calls this when it is imported.

    The variable names a folder, for this process and for none that it starts.
    """
    if folder := os.environ.pop(_FOLDER, ""):
        allocator.when_cuda_begins(lambda: _keep(Path(folder)))


def _keep(folder: Path) -> None:
    allocator.record_history()
    atexit.register(_write, folder)


def _write(folder: Path) -> None:
    properties, stats = torch.cuda.get_device_properties(0), torch.cuda.memory_stats(0)
    capability = f"capability={properties.major}.{properties.minor}"
    numbers = f"memory={properties.total_memory}B,processors={properties.multi_processor_count}"
    versions = (torch.__version__, torch.version.cuda or "", environment.cudnn_release())
    counters = ("requested", "allocated", "reserved")
    facts = {
        "name": properties.name,
        "description": f"name={re.sub('[,=]', ' ', properties.name)},{capability},{numbers}",
        "releases": dict(zip(("torch", "CUDA", "cuDNN"), versions, strict=True)),
        "peaks": {name: stats.get(f"{name}_bytes.all.peak", 0) for name in counters},
    }
    allocator.dump_history(str(folder / "snapshot.pickle"))
    (folder / "device.json").write_text(json.dumps(facts), encoding="utf-8")
