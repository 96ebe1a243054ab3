"""The name of a device, checked before anything is measured."""

from __future__ import annotations

import re
from typing import Final

_ANYWHERE: Final = re.compile(r"(cpu|cuda|xpu|mps|mtia)(:(0|[1-9]\d?))?")


def require_device_name(name: str) -> None:
    """Raise `DeviceNameError` for a name that no device has on any machine.

    Whether it is there is another question. Names that every torch knows are not worth loading it.
    """
    if name and not _ANYWHERE.fullmatch(name):
        from pytest_torchmem.measuring import environment

        environment.require_device_name(name)
