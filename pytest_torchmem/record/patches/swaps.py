"""Lets ``torch.utils.swap_tensors`` swap, as it would without us.

It refuses tensors that anybody refers to weakly. We do, to know what is alive, from one measurement
to the next; and the profiler does, to each tensor that an operator has read. Converting a module of
tensor subclasses (quantised, distributed) swaps its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from pytest_torchmem.record.owners.live_tensors import forget


class SwapWatch:
    """Interrupts a recording for each swap.

    ``interrupted()`` is to return a context without a profiler.
    """

    def __init__(self, interrupted: Callable[[], AbstractContextManager[object]]) -> None:
        self._interrupted = interrupted
        self._original: Any = None

    def install(self) -> None:
        swap = self._original = torch.utils.swap_tensors

        @wraps(swap)
        def watched(one: torch.Tensor, other: torch.Tensor) -> None:
            with self._interrupted():
                swap(one, other)

        torch.utils.swap_tensors = watched

    def remove(self) -> None:
        if self._original is not None:
            torch.utils.swap_tensors = self._original
            self._original = None


def _let_go_before_a_swap() -> None:
    swap: Any = torch.utils.swap_tensors

    @wraps(swap)
    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        forget()
        swap(one, other)

    torch.utils.swap_tensors = swap_tensors


# What is known to be alive is known for as long as the process lives, and so is this.
_let_go_before_a_swap()
