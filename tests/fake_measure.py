"""A stand-in for the modules of `pytest_torchmem.measuring` that the plugin loads.

Bodies say what they use, so no torch is needed.

It has the same names as the real ones. A project under test puts it in place with `install()`
and its bodies call `use(...)`.
"""

import contextlib
import sys
import types
from dataclasses import replace
from typing import Any

from pytest_torchmem.analysis.judge.holders import Held
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.errors import DeviceError, DeviceNameError, RecordingError
from pytest_torchmem.values.picture import Picture, Track
from pytest_torchmem.values.results import Counters, Fate, Holder, Peak, Result, Retained
from pytest_torchmem.values.trace import Trace

MiB = 1 << 20
state: dict[str, Any] = {
    "used": [],
    "busy": False,
    "backward": True,
    "recording": False,
    "starts": 0,
}
state["struck"] = []


def install():
    for name in ("measuring.body_measurement", "record.devices", "record.environment"):
        sys.modules[f"pytest_torchmem.{name}"] = sys.modules[__name__]


def use(size, category="activation", retained=False, operator="aten::mm", module="net", line=12):
    """Use ``size`` bytes in the running body."""
    source = Source(__file__, line, "forward")
    contributor = Contributor(Category(category), size, 1, operator, module, source, Phase.FORWARD)
    state["used"].append((contributor, retained))


def say(text):
    """Have the recorder say something while the body runs."""
    state["say"](text)


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


def run_out():
    """Run out of memory, as a body does in which an allocation fails."""
    live = sorted((contributor for contributor, _ in state["used"]), key=lambda c: -c.size_bytes)
    state["struck"].append(tuple(live))
    raise OutOfMemoryError("out of memory. Tried to allocate 20.00 GiB.\nand more")


def measurable_device(name):
    raise DeviceNameError(f"there is no device called {name!r} on any machine")


def find_device(name):
    BodyMeasurement(name)


def allocator_settings():
    return ""


def environment(device_name):
    kind = "cpu" if device_name == "cpu" else "Fake 100"
    return {"device": kind, "capability": "", "torch": "2.99", "allocator": ""}


def device_names(device):
    return environment(device)["device"], device.partition(":")[0]


def result_of(name, device, used, steps=()):
    used = sorted(used, key=lambda pair: -pair[0].size_bytes)
    live = tuple(contributor for contributor, _ in used)
    kept = tuple(contributor for contributor, retained in used if retained)
    peak, retained = (_by_category(live), _by_category(kept))
    counters = Counters(1, 2, 3, 4 * MiB) if device.startswith("cuda") else None
    return Result(
        name=name,
        device=device,
        estimated=False,
        peak=Peak(peak.total, 0, peak, peak, live),
        retained=Retained(retained.total, retained, kept),
        steps=tuple(steps),
        counters=counters,
        has_backward=state["backward"],
    )


def picture_of(used):
    """Each use is one change, a millisecond after the last one; nothing is ever freed."""
    moments = range(len(used) + 1)
    levels = {c: [0] * len(moments) for c in {contributor.category for contributor, _ in used}}
    tracks = []
    for place, (contributor, _) in enumerate(used):
        alive = [contributor.size_bytes if moment > place else 0 for moment in moments]
        tracks.append(Track(contributor, tuple(alive)))
        levels[contributor.category] = [
            a + b for a, b in zip(levels[contributor.category], alive, strict=True)
        ]
    return Picture(
        times_ns=tuple(moment * 1_000_000 for moment in moments),
        rows=tuple(moments),
        change_count=len(moments),
        levels={c: tuple(levels[c]) for c in Category if c in levels},
        tracks=tuple(tracks),
    )


def _by_category(live):
    amounts = dict.fromkeys(Category, 0)
    for contributor in live:
        amounts[contributor.category] += contributor.size_bytes
    return CategoryBytes.of(amounts)


class BodyRegion:
    def __init__(self, name, device, start):
        self.name, self._device, self._start, self._stop = name, device, start, None

    was_read = False

    @property
    def result(self):
        self.was_read = True
        return result_of(self.name, self._device, state["used"][self._start : self._stop])

    def picture(self):
        return picture_of(state["used"][self._start : self._stop])

    def note_holders(self):
        pass

    def freed(self):
        return tuple(contributor for contributor, retained in state["used"] if not retained)

    def reserved(self):
        return ()

    def find_holders(self):
        return ()

    def __getattr__(self, name):
        return getattr(self.result, name)


class BodyMeasurement:
    def __init__(self, device=None, passes=(), say=print):
        if device and device not in ("cpu", "cuda", "cuda:0", "xpu"):
            if not device.startswith("cuda"):
                measurable_device(device)
            raise DeviceError(f"there is no device {device}; this machine has cpu, cuda:0")
        self.device = {"cuda": "cuda:0"}.get(device, device or "cpu")
        self.regions = []
        self._steps = []
        self._say = say

    def start(self, *, empties_cache=False):
        if state["busy"]:
            raise RecordingError("another profiler is active")
        assert not state["recording"], "started twice"
        state["used"], state["struck"] = [], []
        state["backward"] = True
        state["recording"] = True
        state["starts"] += 1
        state["say"] = self._say

    @contextlib.contextmanager
    def region(self, name, steps_of=""):
        region = BodyRegion(name, self.device, len(state["used"]))
        self.regions.append(region)
        yield region
        region._stop = len(state["used"])

    def simulate(self, settings="", capacity=None):
        from pytest_torchmem.allocator import Requests, simulate

        sizes = [contributor.size_bytes for contributor, _ in state["used"]]
        return simulate(Requests.from_columns([True] * len(sizes), sizes, range(len(sizes))))

    def steps(self, n, warmup, steps_of=""):
        for step in range(warmup + n):
            yield step
            if step >= warmup:
                self._steps.append(sum(c.size_bytes for c, retained in state["used"] if retained))

    def note_holders(self):
        pass

    def freed(self):
        return tuple(contributor for contributor, retained in state["used"] if not retained)

    def reserved(self):
        return ()

    def stop(self, *, origins=True):
        state["recording"] = False
        return self.numbers(origins=origins)

    def numbers(self, *, origins=True):
        result = result_of("", self.device, state["used"], self._steps)
        if origins:
            return result
        peak = replace(result.peak, live=(), live_by_category=())
        return replace(result, peak=peak, retained=replace(result.retained, live=()), grown=())

    def cancel(self):
        state["recording"] = False

    def picture(self):
        return picture_of(state["used"])

    def find_holders(self):
        return tuple(
            Held(Holder(contributor.size_bytes, 1, Fate.HELD, "net.CACHE"), contributor)
            for contributor, retained in state["used"]
            if retained
        )

    def profile_so_far(self):
        trace = types.SimpleNamespace(trace=Trace())
        return types.SimpleNamespace(tree=trace, out_of_memory=tuple(state["struck"]))
