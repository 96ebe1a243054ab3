"""Tells the user what to do about an error that fake tensors raise."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytest_torchmem.record.fake.origin import is_user_file
from pytest_torchmem.record.fake.stand_ins.unknown import UnknownValueError
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.values.errors import EstimateError

RAGGED: Final = (
    "the sizes of ragged tensors depend on values; estimate with padded ones, or measure with "
    "pytest_torchmem.measure"
)
_ADVICE = (
    "estimate only knows shapes: estimate the part before that, give the program the number "
    "as a plain argument, or measure it with pytest_torchmem.measure"
)

_UNKNOWN_KEY = (
    "the program looks up{} what it knows of a tensor, and knows it where nobody can replace the "
    "tensor; let it know that by a name, or measure with pytest_torchmem.measure"
)
_OTHER_DEVICE = (
    "this torch is built without that device; make tensors on the device of the inputs and give "
    "the device to estimate"
)
_SEVERAL_DEVICES = (
    "the program uses tensors that nobody could move; make them on the device of the inputs, "
    "or leave out device= to estimate where everything is"
)
_FOUND_SEVERAL_DEVICES: Final = ("found two different devices", "found at least two devices")
# torch's own errors, by words in them, where a fake run is the reason.
_ADVICE_BY_TEXT = {
    "not linked with support for": _OTHER_DEVICE,
    "not compiled with CUDA": _OTHER_DEVICE,
    "incompatible tensor type": (
        "the program replaces the data of parameters, which is followed where they have data and "
        "no device= is given"
    ),
    "UnknownNumber": f"a number that was read from a tensor decides a size; {_ADVICE}",
    "is not supported for tensor subclasses": (
        "the program hands values of a tensor to numpy; leave that out, or measure with "
        "pytest_torchmem.measure instead"
    ),
    "Expected inputs of BF16 type": (
        "torch's rule for this operator on fake tensors takes bfloat16 alone; estimate the model "
        "in bfloat16, or measure it with pytest_torchmem.measure"
    ),
    "already associated to a python object": (
        "the program makes a tensor of a class of its own out of one without data, which torch "
        "has no way for; give it plain tensors, or measure with pytest_torchmem.measure"
    ),
    "shape_env must not be None": RAGGED,
    "NestedTensorImpl doesn't support": RAGGED,
    "There was no fake impl registered": (
        "register what its result looks like with register_fake, or measure with "
        "pytest_torchmem.measure"
    ),
    "Couldn't swap": (
        "the program moves a module's parameters, which torch cannot do where they have no data; "
        "move the module before, and give its device to estimate"
    ),
    "does not support backward on CPU": (
        "the CPU has no such operator; where it stands for a GPU, "
        "`pytest --torchmem-simulate=H100` measures the program"
    ),
    "its data is not allocated yet": (
        "C++ reads the values of this tensor; give it what is known in Python, or measure with "
        "pytest_torchmem.measure"
    ),
    "Cannot access storage of": (
        "this tensor's memory cannot be followed; measure with pytest_torchmem.measure instead"
    ),
}


def _value_errors() -> tuple[type[Exception], ...]:
    return (*fake_tensors.value_errors(), UnknownValueError)


class SeveralDevicesError(EstimateError):
    """The program needs a device that is not there, or two of them: one CPU can stand for both."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Raise `EstimateError` with an advice in the place of an error that fake tensors raise."""
    try:
        yield
    except _value_errors() as error:
        raise EstimateError(
            f"the program needs the value of a tensor{_where(error)} ({error}); {_ADVICE}"
        ) from error
    except fake_tensors.OPERATOR_ERRORS as error:
        raise EstimateError(
            f"an operator{_where(error)} has no rule for fake tensors ({error}); register one with "
            "torch.library.register_fake, or measure with pytest_torchmem.measure"
        ) from error
    except KeyError as error:
        if not isinstance(error.args[0], fake_tensors.FakeTensor):
            raise
        raise EstimateError(_UNKNOWN_KEY.format(_where(error))) from error
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        if any(text in str(error) for text in _FOUND_SEVERAL_DEVICES):
            raise SeveralDevicesError(f"{error}{_where(error)}; {_SEVERAL_DEVICES}") from error
        advice = next((a for text, a in _ADVICE_BY_TEXT.items() if text in str(error)), None)
        if advice is None:
            raise
        kind = SeveralDevicesError if advice is _OTHER_DEVICE else EstimateError
        raise kind(f"{error}{_where(error)}; {advice}") from error


def _where(error: BaseException) -> str:
    """The user's innermost line on the way to an error."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if is_user_file(frame.f_code.co_filename):
            line = f" at {Path(frame.f_code.co_filename).name}:{number}"
    return line
