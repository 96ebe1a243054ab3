"""A program on a GPU that is not there, or a graph that does not run: how much memory it takes.

A program runs in a process of its own, on a simulated GPU.

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
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, overload

from pytest_torchmem.measuring import graphs
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import variables
from pytest_torchmem.simulate.torch_builds import TorchBuild, require_platform, torch_build
from pytest_torchmem.values.errors import (
    EstimateError,
    MarkerError,
    SimulationError,
    TorchmemError,
    is_torchmem_error,
)
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.analysis.estimated.estimated_result import Estimate
    from pytest_torchmem.record.graphs.fx_graphs import Graph
    from pytest_torchmem.values.units import Device

__tracebackhide__ = is_torchmem_error

Call: TypeAlias = tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]
# True in a process that `estimate` started, while that imports the program.
_loading: Final = ContextVar("loading", default=False)
_CHILD: Final = (
    "from pytest_torchmem.measuring.estimate import answer_call; answer_call({!r}, {!r})"
)
_INSTEAD: Final = (
    "a graph can be estimated on every platform: estimate(torch.export.export(model, (batch,)))"
)
_OPTIONS_OF_GRAPHS: Final = ("backward", "device", "is_releasable")
_WRITTEN_SO: Final = (
    "it runs in a process of its own: write it as a function at the top level of a file that can "
    "be imported, give it plain values, and make models and data in it"
)


@overload
def estimate(
    program: Graph,
    *,
    backward: Graph | None = None,
    device: Device | None = None,
    is_releasable: Callable[[Any], bool] | None = None,
) -> Estimate: ...


@overload
def estimate(
    program: Callable[..., object], *args: object, gpu: str = "H100", **kwargs: object
) -> Result: ...


def estimate(program: Any, *args: object, **kwargs: Any) -> Result:
    """Return what a program takes on a GPU that is not there, or what a graph needs.

    **A program**: ``estimate(program, *args, gpu="H100", **kwargs)`` calls it on a simulated GPU,
    in a process of its own (Linux), with torch's CUDA build, which is installed or was fetched by
    ``torchmem simulate --fetch``. Modules and tensors among the arguments are on the GPU before;
    those on ``meta`` have memory only there. The call's return value is dropped. ``gpu`` is a name
    such as ``A100-40GB``, or ``capability=9.0,memory=80GiB``. The result's name says that it was
    simulated, and on which GPU.

    **A graph** is a ``torch.fx.Graph``, a ``GraphModule`` without arguments or a
    ``torch.export.ExportedProgram``, whose nodes carry fake tensors. Nothing runs: `estimate`
    follows the nodes, releases a storage after its last use, and the caller keeps the graph's
    inputs. With ``backward=graph`` the first graph is a partitioned forward, and what it saves
    lives until its last use in the backward. ``is_releasable(node)`` says whether the last use
    releases what the node makes; without it, everything is released but inputs and attributes.
    ``device`` defaults to the one that holds most.

    Raises `SimulationError` for a GPU that cannot be simulated, here or anywhere, `MarkerError` for
    what cannot be called, `EstimateError` for a graph without fake tensors and for a program that
    cannot be sent to a process, that ends it, or that uses no memory of the GPU, and `DeviceError`
    for a device that the graph does not use. An exception of the program passes through.
    """
    runs = hasattr(program, "forward") and (args or "gpu" in kwargs)
    if graphs.reads_as_graph(program) and not runs:
        if args or kwargs.keys() - {*_OPTIONS_OF_GRAPHS}:
            raise MarkerError(
                "a graph is estimated without running it: estimate takes no arguments for it, and "
                f"of options {', '.join(_OPTIONS_OF_GRAPHS)}"
            )
        return graphs.estimate_graph(program, **kwargs)
    return _simulated(program, args, kwargs.pop("gpu", "H100"), kwargs)


def _simulated(
    program: Callable[..., object], args: tuple[object, ...], gpu: str, kwargs: dict[str, object]
) -> Result:
    if not callable(program):
        raise MarkerError(f"estimate needs a module or a function, got {program!r}")
    if not isinstance(gpu, str):
        raise MarkerError(f"estimate, gpu: {gpu!r} is not the name of a GPU; write gpu='H100'")
    if _loading.get():
        raise EstimateError(
            "estimate was called while the file of its program was imported; call it below "
            "`if __name__ == '__main__':`, or in a test"
        )
    try:
        simulated = f"simulated {parse_gpu(gpu).name}"
        call = _pickled(program, args, kwargs)
        built = _torch_build()
        environment_variables = variables(gpu, built)
    except SimulationError as error:  # through files of ours; it names what the user wrote
        raise error.with_traceback(None) from None
    shown_call = f"{_name(program)} ({simulated}, {built.releases})"
    # The profiler reports on stderr that it has no tracer of kernels; at level 5 nothing.
    environment = {"KINETO_LOG_LEVEL": "5", **os.environ, **environment_variables}
    with tempfile.TemporaryDirectory(prefix="torchmem-") as folder:
        question, answer = Path(folder, "question"), Path(folder, "answer")
        question.write_bytes(pickle.dumps((_like_this_process(built.site, call), call)))
        started = [sys.executable, "-c", _CHILD.format(str(question), str(answer))]
        done = subprocess.run(started, env=environment, stdin=subprocess.DEVNULL, check=False)
        result = pickle.loads(answer.read_bytes()) if answer.exists() else None
    if isinstance(result, BaseException):
        raise result
    if not isinstance(result, Result):
        raise EstimateError(f"the process of {shown_call} ended with {_ending(done.returncode)}")
    if not result.peak.total:
        raise EstimateError(
            f"{shown_call} used no memory of the GPU; put its models and data there, or give them "
            "as arguments"
        )
    return replace(result, name=shown_call)


def _torch_build() -> TorchBuild:
    try:
        require_platform()
    except SimulationError as error:
        raise SimulationError(f"{error.sentence}; {_INSTEAD}") from None
    return torch_build()


def _pickled(*call: object) -> bytes:
    try:
        return pickle.dumps(call)
    except Exception as error:  # whatever a class's own way to be pickled raises
        raise EstimateError(
            f"{_name(call[0])} and its arguments cannot be sent to a process "
            f"({type(error).__name__}: {error}); {_WRITTEN_SO}"
        ) from None


def _like_this_process(site: Path, call: bytes) -> dict[str, object]:
    """Return what `multiprocessing.spawn.prepare` needs to find the modules that are found here.

    torch's CUDA build comes first. The main module is loaded where the call refers to it.
    """
    path = [str(site), *sys.path]
    data: dict[str, object] = {"sys_path": path, "sys_argv": sys.argv, "dir": str(Path.cwd())}
    main = sys.modules["__main__"]
    if b"__main__" in call:
        if spec := getattr(main, "__spec__", None):
            data["init_main_from_name"] = spec.name
        elif file := getattr(main, "__file__", None):
            data["init_main_from_path"] = str(Path(file).absolute())
    return data


def answer_call(question: str, answer: str) -> None:
    """Make the call that a file has, and write its `Result` or exception to another file."""
    try:
        result: object = _measured(*_load_call(Path(question)))
    except SystemExit as error:
        result = EstimateError(f"the program ended its process: SystemExit({error.code!r})")
    except BaseException as error:
        result = _portable(error)
    Path(answer).write_bytes(pickle.dumps(result))


def _load_call(question: Path) -> Call:
    process, call = pickle.loads(question.read_bytes())
    _loading.set(True)
    multiprocessing.spawn.prepare(process)
    try:
        arguments: Call = pickle.loads(call)
    except (AttributeError, ImportError) as error:
        raise EstimateError(
            f"the program is not found in another process ({error}); {_WRITTEN_SO}"
        ) from None
    _loading.set(False)
    return arguments


def _measured(
    program: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Result:
    from pytest_torchmem.measuring.block import measure
    from pytest_torchmem.record.devices import placed_on

    owner = getattr(program, "__self__", program)
    _, args, kwargs = placed_on("cuda", (owner, args, kwargs))
    with measure(device="cuda") as block:
        program(*args, **kwargs)
    return block.result


def _portable(error: BaseException) -> BaseException:
    """Return an exception that the other process can read; its traceback becomes a note."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    trace = "".join(traceback.format_exception(type(error), error, frames))
    error.__cause__ = error.__context__ = None
    if not isinstance(error, TorchmemError):
        error.add_note(f"in a process with a simulated GPU:\n{trace}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a class's own way to be pickled raises
        return EstimateError(f"the program raised {trace.strip().splitlines()[-1]}\n{trace}")
    return error


def _name(program: object) -> str:
    return str(getattr(program, "__name__", "") or type(program).__name__)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"the signal {signal.Signals(-code).name}"
