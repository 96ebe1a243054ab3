"""Record bodies on a GPU, for the analysis to be tried on where there is none.

    python tests/cuda/record_traces.py                            # needs a CUDA device, or:
    torchmem simulate --gpu H100x2 -- python tests/cuda/record_traces.py

Beside each trace goes what the allocator counted in a run without a recording.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from dataclasses import asdict, replace
from pathlib import Path

import torch

_ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(_ROOT))

from pytest_torchmem.values.trace import Trace  # noqa: E402
from tests.cuda.bodies import BODIES, record, run_bare  # noqa: E402

FOLDER = _ROOT / "tests" / "data" / "cuda_traces"
NAMES = (
    "training",
    "autocast_and_scaler",
    "checkpointed",
    "per_sample_gradients",
    "two_streams",
    "captured_graph",
    "another_thread",
)


def portable(trace: Trace) -> Trace:
    """The trace without the folders of the machine it was made on."""
    places = {
        str(_ROOT): "/project",
        str(Path(torch.__file__).parents[1]): "/site-packages",
        sysconfig.get_path("purelib"): "/site-packages",
        sysconfig.get_path("stdlib"): "/lib",
        sysconfig.get_path("platstdlib"): "/lib",
    }

    def moved(text: str) -> str:
        for place, name in places.items():
            text = text.replace(place, name)
        return text

    paths = sorted({moved(path) for path in trace.meta["library_paths"]})
    meta = {**trace.meta, "library_paths": paths}
    return replace(trace, strings=tuple(map(moved, trace.strings)), meta=meta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    device = torch.device("cuda", 0)
    told = {}
    for name in NAMES:
        run = BODIES[name]
        run(device)
        bare = run_bare(run, device)
        measurement = record(run, device)
        folder.mkdir(parents=True, exist_ok=True)
        profile = measurement.profile_so_far()
        portable(profile.tree.trace).save(folder / f"{name}.trace")
        peak = profile.peak
        told[name] = {"unrecorded": bare, "at_peak": asdict(peak.at_peak)}
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(device)}
    text = json.dumps({**about, "bodies": told}, indent=1)
    (folder / "counted.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
