"""Refuses programs that work on fake tensors in other threads.

Dispatch modes are of one thread: in another one the operators run, and nobody records them. C++
asks fake tensors in places where an error would end the process, so the other thread goes on, and
the refusal comes where the program ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Final

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.values.errors import EstimateError

_ELSEWHERE: Final = (
    "the program works on tensors in another thread, whose memory an estimate does not see; let it "
    "call the function itself, or measure with pytest_torchmem.measure"
)
_Dispatch = Callable[..., object]


@contextlib.contextmanager
def refused_in_other_threads(
    patches: Installed, mode: fake_tensors.FakeTensorMode
) -> Iterator[None]:
    """Raise `EstimateError` where another thread has worked on fake tensors of ``mode``."""
    thread, seen = threading.get_ident(), threading.Event()

    def refusing(plain: _Dispatch) -> object:
        def dispatched(
            func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            if threading.get_ident() != thread and fake_tensors.has_any_of(mode, (args, kwargs)):
                seen.set()
            return plain(func, types, args, kwargs)

        return staticmethod(dispatched)

    patches.replace(fake_tensors.ELSEWHERE, refusing)
    try:
        yield
    except Exception as error:
        if not seen.is_set() or isinstance(error, EstimateError):
            raise
        raise EstimateError(_ELSEWHERE) from error
    if seen.is_set():
        raise EstimateError(_ELSEWHERE)
