"""A program on a GPU that is not there: it runs in a process of its own, on a simulated GPU.

from pytest_torchmem import GiB, estimate

result = estimate(train_step, 8, 1024, gpu="H100")
assert result.peak.total <= 60 * GiB
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import variables
from pytest_torchmem.simulate.torch_builds import require_platform, torch_build
from pytest_torchmem.values.errors import (
    EstimateError,
    MarkerError,
    SimulationError,
    TorchmemError,
    is_torchmem_error,
)
from pytest_torchmem.values.results import Result

__tracebackhide__ = is_torchmem_error

_ANSWER: Final = "from pytest_torchmem.measuring.estimate import answer; answer(*{files!r})"
_INSTEAD: Final = (
    "a graph can be estimated on every platform: "
    "estimate_graph(torch.export.export(model, (batch,)))"
)
_WRITTEN_SO: Final = (
    "it runs in a process of its own: write it as a function at the top level of a file that can "
    "be imported, give it plain values, and make models and data in it"
)


def estimate(
    program: Callable[..., object], *args: object, gpu: str = "H100", **kwargs: object
) -> Result:
    """Return what ``program(*args, **kwargs)`` takes on a GPU, measured on a simulated one.

    The call runs in a process of its own (Linux), with torch's CUDA build, which is installed or
    was fetched by ``torchmem simulate --fetch``. Modules and tensors among the arguments are put
    on the GPU first; those on ``meta`` get memory there alone. What the call returns is dropped.

    ``gpu`` is a name such as ``A100-40GB``, or ``capability=9.0,memory=80GiB``. The result's name
    says that it was simulated, and on which GPU.

    Raises `SimulationError` for a GPU that cannot be simulated, here or anywhere, `MarkerError` for
    what cannot be called, and `EstimateError` for a program that cannot be sent to a process, that
    ends it, or that uses no memory of the GPU. What the program raises comes out as it is.
    """
    if not callable(program):
        raise MarkerError(f"estimate needs a module or a function, got {program!r}")
    if not isinstance(gpu, str):
        raise MarkerError(f"estimate, gpu: {gpu!r} is not the name of a GPU; write gpu='H100'")
    shown = f"{_name(program)} (simulated {parse_gpu(gpu).name})"
    try:
        require_platform()
    except SimulationError as error:
        raise SimulationError(f"{error.sentence}; {_INSTEAD}") from None
    if _Child.is_loading:
        raise EstimateError(
            "estimate was called while the file of its program was imported; call it below "
            "`if __name__ == '__main__':`, or in a test"
        )
    call = _pickled(_Call(program, args, kwargs, shown))
    built = torch_build()
    # The profiler reports on its stderr that there is no tracer of kernels (level 5: nothing).
    environment = {"KINETO_LOG_LEVEL": "5", **os.environ, **variables(gpu, built)}
    with tempfile.TemporaryDirectory(prefix="torchmem-") as folder:
        files = [str(Path(folder, name)) for name in ("process", "call", "answer")]
        Path(files[0]).write_bytes(pickle.dumps(_like_this_process(built.site, call)))
        Path(files[1]).write_bytes(call)
        started = [sys.executable, "-c", _ANSWER.format(files=files)]
        done = subprocess.run(started, env=environment, stdin=subprocess.DEVNULL, check=False)
        answered = Path(files[2])
        answer = pickle.loads(answered.read_bytes()) if answered.exists() else None
    if isinstance(answer, BaseException):
        raise answer
    if not isinstance(answer, Result):
        raise EstimateError(f"the process of {shown} ended with {_ending(done.returncode)}")
    if not answer.peak.total:
        raise EstimateError(
            f"{_name(program)} used no memory of the GPU; it has to put its models and data there, "
            "or be given them as arguments"
        )
    return answer


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that another process makes, and the name of its result."""

    program: Callable[..., object]
    args: tuple[object, ...]
    kwargs: Mapping[str, object]
    shown: str


class _Child:
    """The state of a process that `estimate` started."""

    is_loading = False


def _pickled(call: _Call) -> bytes:
    try:
        return pickle.dumps(call)
    except Exception as error:  # whatever a class's own way to be pickled raises
        raise EstimateError(
            f"{_name(call.program)} and its arguments cannot be sent to a process "
            f"({type(error).__name__}: {error}); {_WRITTEN_SO}"
        ) from None


def _like_this_process(site: Path, call: bytes) -> dict[str, object]:
    """Return what `multiprocessing.spawn.prepare` needs to find the modules that are found here.

    torch's CUDA build comes first. The main module is loaded where the call refers to it.
    """
    data: dict[str, object] = {
        "sys_path": [str(site), *sys.path],
        "sys_argv": sys.argv,
        "dir": str(Path.cwd()),
    }
    main = sys.modules["__main__"]
    if b"__main__" in call:
        if spec := getattr(main, "__spec__", None):
            data["init_main_from_name"] = spec.name
        elif file := getattr(main, "__file__", None):
            data["init_main_from_path"] = str(Path(file).absolute())
    return data


def answer(process: str, call: str, answer: str) -> None:
    """Make a call that a file has, and write what came of it to another file.

    That is a `Result`, or an exception.
    """
    try:
        found: object = _measured(_loaded(Path(process), Path(call)))
    except SystemExit as error:
        found = EstimateError(f"the program ended its process: SystemExit({error.code!r})")
    except BaseException as error:
        found = _portable(error)
    Path(answer).write_bytes(pickle.dumps(found))


def _loaded(process: Path, call: Path) -> _Call:
    _Child.is_loading = True
    multiprocessing.spawn.prepare(pickle.loads(process.read_bytes()))
    try:
        loaded: _Call = pickle.loads(call.read_bytes())
    except (AttributeError, ImportError) as error:
        raise EstimateError(
            f"the program is not found in another process ({error}); {_WRITTEN_SO}"
        ) from None
    _Child.is_loading = False
    return loaded


def _measured(call: _Call) -> Result:
    from pytest_torchmem.measuring.block import measure
    from pytest_torchmem.record.devices import placed_on

    owner = getattr(call.program, "__self__", call.program)
    _, args, kwargs = placed_on("cuda", (owner, call.args, dict(call.kwargs)))
    with measure(device="cuda") as block:
        call.program(*args, **kwargs)
    return replace(block.result, name=call.shown)


def _portable(error: BaseException) -> BaseException:
    """Return an exception that the other process can read; its traceback becomes a note."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    told = "".join(traceback.format_exception(type(error), error, frames))
    error.__cause__ = error.__context__ = None
    if not isinstance(error, TorchmemError):
        error.add_note(f"in a process with a simulated GPU:\n{told}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class's own way to be pickled raises
        return EstimateError(f"the program raised {told.strip().splitlines()[-1]}\n{told}")
    return error


def _name(program: object) -> str:
    return str(getattr(program, "__name__", "") or type(program).__name__)


def _ending(code: int) -> str:
    known = {number.value: number.name for number in signal.Signals}
    return f"the signal {known.get(-code, -code)}" if code < 0 else f"exit code {code}"
