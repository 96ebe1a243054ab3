"""The GPUs that can be simulated, by name or by what decides their numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchmem.values.errors import SimulationError, SizeError
from pytest_torchmem.values.units import MiB, parse_size

_MOST_DEVICES: Final = 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of a GPU, and how many of it.

    Attributes:
        name: As a user writes it, without *simulated*.
        memory_bytes: What torch shows as the total; the driver keeps the rest of the chip's memory.
        capability: Compute capability, (9, 0) for Hopper. It decides workspaces and kernels.
        processors: Multiprocessors. They decide how some kernels split their work.
        cache_bytes: The L2 cache. Inductor fills a buffer of its size where it times kernels.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    cache_bytes: int = 50 * MiB
    count: int = 1

    @property
    def shown(self) -> str:
        """The name that torch and every output show."""
        return f"simulated {self.name}"


# What `get_device_properties` of torch or deviceQuery printed on such a device, in MiB. It differs
# by under 1 % with the driver's release; an exact number can be given as memory=. The caches are
# from outputs of deviceQuery, nvbench (RTX4090), torch (H200, A10G) and XLA's descriptions of
# devices (B200, H100, A100, A6000); of the H100-NVL's none was found.
GPUS: Final = (
    Gpu("B200", 182_630 * MiB, (10, 0), 148, 132_644_864),  # pytorch/ao#4002
    Gpu("H200", 143_156 * MiB, (9, 0), 132, 60 * MiB),  # a comment in an example of Modal
    Gpu("GH200", 96_768 * MiB, (9, 0), 132, 60 * MiB),  # from messages of out of memory
    Gpu("H100", 81_089 * MiB, (9, 0), 132, 50 * MiB),  # stas00/ml-engineering, network benchmarks
    Gpu("H100-NVL", 95_334 * MiB, (9, 0), 132),  # from messages
    Gpu("H100-PCIE", 81_008 * MiB, (9, 0), 114, 50 * MiB),  # a report of an unsupported capability
    Gpu("A100", 81_050 * MiB, (8, 0), 108, 40 * MiB),  # from messages; the processors were printed
    Gpu("A100-40GB", 40_339 * MiB, (8, 0), 108, 40 * MiB),  # bottlerocket-os/bottlerocket#3873
    Gpu("A40", 45_416 * MiB, (8, 6), 84, 6 * MiB),  # a list of a laboratory's devices
    Gpu("A10G", 22_587 * MiB, (8, 6), 80, 6 * MiB),  # a report with CUDA 13; 22,723 before
    Gpu("A6000", 48_676 * MiB, (8, 6), 84, 6 * MiB),  # the README of a kernel
    Gpu("L40S", 45_589 * MiB, (8, 9), 142, 96 * MiB),  # a guide to sharing GPUs in Kubernetes
    Gpu("L4", 22_491 * MiB, (8, 9), 58, 48 * MiB),  # bottlerocket-os/bottlerocket-kernel-kit#139
    Gpu("RTX5090", 32_117 * MiB, (12, 0), 170, 96 * MiB),  # aikitoria/open-gpu-kernel-modules#1
    Gpu("RTX4090", 24_210 * MiB, (8, 9), 128, 72 * MiB),  # from messages; Windows: 24,563
    Gpu("RTX3090", 24_259 * MiB, (8, 6), 82, 6 * MiB),  # the list with the A40
    Gpu("T4", 15_102 * MiB, (7, 5), 40, 4 * MiB),  # a guide to time slicing
)

_COUNT: Final = re.compile(r"(?P<name>.+?)x(?P<count>\d+)", re.IGNORECASE)
_EXAMPLES: Final = "H100, A100-40GB, H100x8 or capability=9.0,memory=80GiB,processors=132"


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text such as ``H100``, ``H100x8`` or ``capability=9.0,memory=80GiB``
    means. Raises `SimulationError`."""
    return _described(text) if "=" in text else _gpu_named(text)


def _gpu_named(text: str) -> Gpu:
    by_name = {_plain(gpu.name): gpu for gpu in GPUS}
    if found := by_name.get(_plain(text)):
        return found
    match = _COUNT.fullmatch(text.strip())
    if match and (found := by_name.get(_plain(match["name"]))):
        return replace(found, count=_count(match["count"]))
    names = ", ".join(gpu.name for gpu in GPUS)
    raise SimulationError(
        f"no GPU is called {text!r}; known are {names}, and any other as capability=9.0,"
        "memory=80GiB,processors=132"
    )


def _plain(name: str) -> str:
    """Return a name without what people write differently: ``RTX 4090`` and ``rtx-4090``."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"^(nvidia|geforce|tesla)+|(?<=100)80gb$", "", plain)


def _described(text: str) -> Gpu:
    values = {}
    for part in text.split(","):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or key not in ("capability", "memory", "processors", "count", "name"):
            raise SimulationError(
                f"{part.strip()!r} says nothing about a GPU; it is written like {_EXAMPLES}"
            )
        values[key] = value
    if missing := [key for key in ("capability", "memory") if not values.get(key)]:
        raise SimulationError(
            f"{text!r} does not say {' and '.join(missing)}; a GPU is written like {_EXAMPLES}"
        )
    if not (capability := re.fullmatch(r"(\d{1,2})\.(\d)", told := values["capability"])):
        raise SimulationError(f"capability={told} is not a compute capability such as 9.0")
    try:
        memory_bytes = parse_size(values["memory"])
    except SizeError as error:
        raise SimulationError(f"memory={values['memory']}: {error.sentence}") from None
    name = values.get("name") or f"GPU {values['memory']}"
    processors = _count(values.get("processors", "132"), most=10_000)
    count = _count(values.get("count", "1"))
    numbers = int(capability[1]), int(capability[2])
    return Gpu(name, memory_bytes, numbers, processors, count=count)


def _count(text: str, most: int = _MOST_DEVICES) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= most:
        raise SimulationError(f"{text} is not a number from 1 to {most}")
    return int(text)
