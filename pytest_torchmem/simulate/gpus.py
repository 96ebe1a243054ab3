"""The GPUs that can be simulated, by name or by what decides their numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchmem.values.errors import SimulationError, SizeError
from pytest_torchmem.values.units import GiB, parse_size

_MOST_DEVICES: Final = 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """One model of a GPU, and how many of it.

    Attributes:
        name: As a user writes it, without *simulated*.
        memory_bytes: What torch shows as the total; the driver keeps the rest of the chip's memory.
        capability: Compute capability, (9, 0) for Hopper. It decides workspaces and kernels.
        processors: Multiprocessors. They decide how some kernels split their work.
        count: How many such devices there are.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    count: int = 1

    @property
    def shown(self) -> str:
        """The name that torch and every output show."""
        return f"simulated {self.name}"


def _model(name: str, memory_gib: float, capability: tuple[int, int], processors: int) -> Gpu:
    return Gpu(name, int(memory_gib * GiB), capability, processors)


# Memory as torch's out-of-memory messages name it for the model. It differs by under 1 % with the
# driver's release; an exact number can be given as memory=.
GPUS: Final = (
    _model("B200", 178.35, (10, 0), 148),
    _model("H200", 139.80, (9, 0), 132),
    _model("GH200", 94.50, (9, 0), 132),
    _model("H100", 79.11, (9, 0), 132),
    _model("H100-NVL", 93.10, (9, 0), 132),
    _model("H100-PCIE", 79.11, (9, 0), 114),
    _model("A100", 79.15, (8, 0), 108),
    _model("A100-40GB", 39.39, (8, 0), 108),
    _model("A40", 44.35, (8, 6), 84),
    _model("A10G", 22.19, (8, 6), 80),
    _model("A6000", 47.54, (8, 6), 84),
    _model("L40S", 44.39, (8, 9), 142),
    _model("L4", 22.03, (8, 9), 58),
    _model("RTX5090", 31.36, (12, 0), 170),
    _model("RTX4090", 23.64, (8, 9), 128),
    _model("RTX3090", 23.69, (8, 6), 82),
    _model("T4", 14.74, (7, 5), 40),
)

_COUNT: Final = re.compile(r"(?P<name>.+?)x(?P<count>\d+)", re.IGNORECASE)
_EXAMPLES: Final = "H100, A100-40GB, H100x8 or capability=9.0,memory=80GiB,processors=132"


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that a text such as ``H100``, ``H100x8`` or ``capability=9.0,memory=80GiB``
    means. Raises `SimulationError`."""
    return _described(text) if "=" in text else _named(text)


def _named(text: str) -> Gpu:
    known = {_plain(gpu.name): gpu for gpu in GPUS}
    if found := known.get(_plain(text)):
        return found
    counted = _COUNT.fullmatch(text.strip())
    if counted and (found := known.get(_plain(counted["name"]))):
        return replace(found, count=_count(counted["count"]))
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
    capability = _capability(values["capability"])
    try:
        memory_bytes = parse_size(values["memory"])
    except SizeError as error:
        raise SimulationError(f"memory={values['memory']}: {error.sentence}") from None
    name = values.get("name") or f"GPU {values['memory']}"
    processors = _count(values.get("processors", "132"), most=10_000)
    return Gpu(name, memory_bytes, capability, processors, _count(values.get("count", "1")))


def _capability(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if not found:
        raise SimulationError(f"capability={text} is not a compute capability such as 9.0")
    return int(found[1]), int(found[2])


def _count(text: str, most: int = _MOST_DEVICES) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or not 1 <= int(text) <= most:
        raise SimulationError(f"{text} is not a number from 1 to {most}")
    return int(text)
