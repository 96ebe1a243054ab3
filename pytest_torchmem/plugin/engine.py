"""What measures, loaded when a test asks for it: this is where torch comes in."""

from __future__ import annotations

import importlib
import re
from typing import Any, Final

_ANYWHERE: Final = re.compile(r"(cpu|cuda|xpu|mps|mtia)(:(0|[1-9]\d?))?")


def engine() -> Any:
    """Return `pytest_torchmem.measurement`."""
    return importlib.import_module("pytest_torchmem.measurement")


def require_device_name(name: str) -> None:
    """Raise `DeviceNameError` for a name that no device has on any machine.

    Whether it is there is another question. Names that every torch knows are not worth loading it.
    """
    if name and not _ANYWHERE.fullmatch(name):
        engine().require_device_name(name)
