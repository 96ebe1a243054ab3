"""Operators that torch makes of others, made of others than usual while a program is estimated.

The dispatcher looks them up, so that it is all one how a program came to the function, and whether
it is torch's own C++ that calls. Only the thread that estimates takes the other way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from pytest_torchmem.record.patches import Installed, found
from pytest_torchmem.record.torch_api import dispatcher

#: Gets torch's own way, and what the operator is called with.
Composition = Callable[..., object]

_LOCK: Final = threading.Lock()
_BY_THREAD: Final[dict[str, dict[int, Composition]]] = {}
_PUT_BACK: Final[dict[str, Callable[[], None]]] = {}


def compose(patches: Installed, compositions: Mapping[str, Composition]) -> None:
    """Let operators be made of others in this thread, by names of the table."""
    for name, composition in compositions.items():
        patches.note(name, _put(name, composition))


def _put(name: str, composition: Composition) -> Callable[[], None]:
    thread = threading.get_ident()
    with _LOCK:
        threads = _BY_THREAD.setdefault(name, {})
        if not threads:
            operator = found(name)
            _PUT_BACK[name] = dispatcher.implement(operator, partial(run, operator))
        threads[thread] = composition

    def take_out() -> None:
        with _LOCK:
            del threads[thread]
            if not threads:
                _PUT_BACK.pop(name)()

    return take_out


def run(operator: dispatcher.Operator, /, *args: object, **kwargs: object) -> object:
    """Call the operators that this thread makes an operator of, or torch's own."""
    plain = dispatcher.composed(operator)
    composition = _BY_THREAD.get(f"torch.ops.{operator}", {}).get(threading.get_ident())
    return plain(*args, **kwargs) if composition is None else composition(plain, *args, **kwargs)
