"""Name the environment that a number depends on beside the code, and find the nearest other.

An environment is what can differ between two runs of one commit. What the code itself chooses (the
default dtype, deterministic algorithms, cuDNN's benchmark mode) is not part of it: a change of that
is a change of the code, and shows as grown or shrunk.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

Environment: TypeAlias = Mapping[str, str]

KEYS: Final = ("device", "capability", "torch", "runtime", "allocator", "libraries")
"""The parts of an environment, the one that changes most bytes first; ``""`` stands for the usual.

``device`` is the model, ``capability`` the GPU's architecture or a CPU's that is not x86-64,
``torch`` its minor version, ``runtime`` CUDA or ROCm with its major version, ``allocator`` and
``libraries`` are settings that are not the default. One process of several that run as one job has
a ``rank`` as well: ``"1 of 2"``.
"""


def complete(environment: Environment) -> dict[str, str]:
    """Return an environment with all parts: format 1 had fewer of them."""
    return {key: environment.get(key, "") for key in sorted({*KEYS, *environment})}


def told_differences(stored: Environment, present: Environment) -> str:
    """Return where two complete environments differ: ``torch 1, and this run has torch 2``."""
    names = [
        name for name in {**present, **stored} if stored.get(name, "") != present.get(name, "")
    ]
    told = (
        ", ".join(f"{name} {side.get(name) or 'as usual'}" for name in sorted(names))
        for side in (stored, present)
    )
    return ", and this run has ".join(told)


def environment_name(environment: Environment) -> str:
    """Return a folder name for an environment: ``cpu-torch2.13``, ``nvidia-h200-sm90-torch2.13``.

    Two environments may share a name when their device models differ in punctuation only; the file
    holds the environment in full, so they are told apart when it is read.
    """
    parts = [_slug(environment["device"])]
    if capability := environment.get("capability"):
        # A capability in numbers, as torch gives it: (9, 0) is sm90.
        parts.append(f"sm{capability.replace('.', '')}" if "." in capability else _slug(capability))
    if runtime := environment.get("runtime"):
        parts.append(_slug(runtime))
    parts.append("torch" + re.sub(r"[^a-z0-9.]+", "-", environment["torch"].lower()))
    for key, prefix in (("allocator", "alloc"), ("libraries", "libs")):
        if settings := environment.get(key):
            parts.append(prefix + hashlib.sha256(settings.encode()).hexdigest()[:8])
    if rank := environment.get("rank"):
        parts.append("rank" + rank.replace(" ", ""))
    return "-".join(parts)


def nearest(wanted: Environment, others: Iterable[Environment]) -> Environment | None:
    """Return the environment whose numbers are most likely the same; None when all are too far.

    The order is that of `KEYS`: the same device comes before the same capability, that before the
    closest version of torch, and so on. The CPU and a GPU are never near each other.
    """
    near = [other for other in others if same_kind(wanted, other)]
    ranked = sorted(near, key=lambda other: (_distance(wanted, other), environment_name(other)))
    return next((other for other in ranked if complete(other) != complete(wanted)), None)


def same_kind(one: Environment, other: Environment) -> bool:
    """True for two CPUs and for two GPUs: all else may be compared where a user says so."""
    return (one.get("device") == "cpu") == (other.get("device") == "cpu")


def _distance(wanted: Environment, other: Environment) -> tuple[int, ...]:
    distances: list[int] = []
    for key in KEYS:
        here, there = wanted.get(key, ""), other.get(key, "")
        if key == "torch":
            distances += _versions_apart(here, there)
        else:
            distances.append(int(here != there))
    return tuple(distances)


def _versions_apart(one: str, other: str) -> tuple[int, int, int]:
    """Major versions, minor versions, and at equal distance the older one first."""
    here, there = _version(one), _version(other)
    return abs(here[0] - there[0]), abs(here[1] - there[1]), int(there > here)


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [*(int(number) for number in re.findall(r"\d{1,9}", text)), 0, 0]
    return major, minor


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
