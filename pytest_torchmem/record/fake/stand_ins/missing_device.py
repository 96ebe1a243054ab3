"""Guards against questions that only a CUDA device could answer, on a machine without one.

Two things would go wrong there without a word. Autograd ends the process at the sight of a tensor
on a device that torch was built without, and ``autocast("cuda")`` switches itself off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.values.errors import EstimateError

_NO_CASTS: Final = (
    "the program casts with autocast('cuda'), which torch switches off on a machine without a CUDA "
    "device; `pytest --torchmem-simulate=H100` measures it on a simulated GPU"
)


class GradientsWanted(BaseException):
    """The program enables gradients, and its tensors are on a device that autograd lacks.

    No ``except Exception`` of a program may take it.
    """


def watch(patches: Installed, *, shown: torch.device, runs_on: torch.device) -> None:
    """Notice both while a program runs for the device ``shown`` on fakes of ``runs_on``."""
    if not fake_tensors.lacks_device(shown.type):
        return
    if runs_on == shown and not torch.is_grad_enabled():
        patches.replace(fake_tensors.SET_GRAD, _beginning_anew)
    if shown.type == "cuda":
        _watch_casts(patches)


def _beginning_anew(set_grad_enabled: Callable[[bool], None]) -> Callable[[bool], None]:
    def enabling(mode: bool) -> None:
        if mode:
            raise GradientsWanted
        set_grad_enabled(mode)

    return enabling


def _watch_casts(patches: Installed) -> None:
    """Refuse casts. torch has forgotten whether one that was made before would be on."""
    off_on_purpose: set[int] = set()

    def making(init: Callable[..., None]) -> Callable[..., None]:
        def made(
            self: object,
            device_type: str,
            dtype: object = None,
            enabled: bool = True,
            **rest: object,
        ) -> None:
            if device_type == "cuda" and enabled:
                raise EstimateError(_NO_CASTS)
            off_on_purpose.add(id(self))
            init(self, device_type, dtype, enabled, **rest)

        return made

    def entering(enter: Callable[[object], object]) -> Callable[[object], object]:
        def entered(self: object) -> object:
            if getattr(self, "device", "") == "cuda" and id(self) not in off_on_purpose:
                raise EstimateError(_NO_CASTS)
            return enter(self)

        return entered

    patches.replace(fake_tensors.MAKE_AUTOCAST, making)
    patches.replace(fake_tensors.ENTER_AUTOCAST, entering)
