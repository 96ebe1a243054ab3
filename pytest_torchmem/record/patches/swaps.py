"""Lets ``torch.utils.swap_tensors`` swap while a body is recorded, as it would without us.

It refuses tensors that anybody refers to weakly. We do, to know what is alive, and the profiler
does, to each tensor that an operator has read. Converting a module of tensor subclasses (quantised,
distributed) swaps its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps

import torch

from pytest_torchmem.record.owners.live_tensors import forget, let_go
from pytest_torchmem.record.patches import Installed


class SwapWatch:
    """Interrupts a recording for each swap.

    ``interrupted()`` is to return a context without a profiler.
    """

    def __init__(self, interrupted: Callable[[], AbstractContextManager[object]]) -> None:
        self._interrupted = interrupted

    def install(self, patches: Installed) -> None:
        # What is known to be alive is known by weak references.
        patches.finally_do(let_go)
        patches.replace("torch.utils.swap_tensors", self._interrupting)

    def _interrupting(
        self, swap: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        @wraps(swap)
        def watched(one: torch.Tensor, other: torch.Tensor) -> None:
            with self._interrupted():
                forget()
                swap(one, other)

        return watched
