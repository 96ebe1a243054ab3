"""One training step, or one call, of a program on fake tensors -> StaticRun.

Hooks and patches let the recorder see modules, optimizers and resized storages.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.fake.explained import SeveralDevicesError, explained
from pytest_torchmem.record.fake.fake_run_recorder import FakeRunRecorder
from pytest_torchmem.record.fake.kernels.cuda_operators import take_cudas_operators
from pytest_torchmem.record.fake.kernels.scratch import uncounted_on_gpus, uncounted_on_the_cpu
from pytest_torchmem.record.fake.leftovers import held_by_modules, put_back
from pytest_torchmem.record.fake.origin import names_of
from pytest_torchmem.record.fake.stand_ins import refusals
from pytest_torchmem.record.fake.stand_ins.compositions import compose, take_real_routes
from pytest_torchmem.record.fake.stand_ins.device_thread import DeviceThread
from pytest_torchmem.record.fake.stand_ins.host import save_on_the_host
from pytest_torchmem.record.fake.stand_ins.refusals import (
    GradientsWanted,
    refused_if_compiled,
    refused_in_other_threads,
)
from pytest_torchmem.record.fake.stand_ins.unknown import let_values_be_shown
from pytest_torchmem.record.fake.substitution import Reachable, Substitution, find_reachable
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, fake_tensors, modules, switches
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.static_graph import StaticGraph, StaticRun

# A device that is not there, and the one that stands for it.
_StandIn = tuple[torch.device, torch.device] | None

_CPU = torch.device("cpu")
_WITHOUT_GRAD = (
    "a backward pass is in it, although gradients are switched off around estimate(): "
    "backward=False estimates inference"
)


@dataclass(frozen=True, slots=True)
class Program:
    """A call to estimate, with its backward pass if that is wanted, and an optimizer's step."""

    target: Callable[..., object]
    args: Sequence[object]
    kwargs: Mapping[str, object]
    backward: bool
    optimizer: Any

    def step(self, recorder: FakeRunRecorder) -> object:
        """Run once, and return what a caller would still hold."""
        result = None
        if self.backward:
            # The output is handed on without a name here, so that it dies when the loss is made.
            loss = _loss_of(self.target(*self.args, **self.kwargs))
            if loss is not None and recorder.has_freed(loss):
                recorder.notes.add("the program itself runs the backward pass of its output")
            elif loss is not None:
                if loss.dim():
                    loss = loss.sum()
                loss.backward()  # type: ignore[no-untyped-call]  # as it is in torch
            del loss
        else:
            result = self.target(*self.args, **self.kwargs)
        if self.optimizer is not None:
            self.optimizer.step()
        return result


def record_fake_run(program: Program, device: str | None) -> StaticRun:
    """Return what one call of the program does with memory, optionally as a training step.

    With an optimizer, a first step creates its state and the second one is recorded. Modules,
    optimizers and tensors are left as they were. Raises `EstimateError` if the program cannot run
    without data.
    """
    given = program.args, program.kwargs
    found = find_reachable(program.target, *given, program.optimizer)
    tensors = [*found.parameters, *fake_tensors.tensors_in(given)]
    shown, fake_mode = _shown_device(tensors, device), _fake_mode_of(tensors)
    _require_no_gradient_hooks(found)
    _require_python(found)

    def recorded(runs_on: torch.device) -> StaticRun:
        moved_to = None if device is None and shown == runs_on else runs_on

        def run(thread: DeviceThread) -> StaticRun:
            fakes = Substitution(fake_mode, moved_to)
            return _recorded(program, found, fakes, shown, runs_on, thread)

        first = run(thread := DeviceThread())
        return run(DeviceThread(ahead=True)) if thread.gets_ahead else first

    # Whatever a program puts away of its caller's own fake tensors is the caller's affair.
    own = any(isinstance(tensor, fake_tensors.FakeTensor) for tensor in tensors)
    holders = [*found.holders, *held_by_modules(module for _, module in found.modules.values())]
    with contextlib.nullcontext() if own else put_back(holders, fake_mode):
        runs_on = _runnable_device(shown, program.backward)
        try:
            return recorded(runs_on)
        except GradientsWanted:
            return recorded(_CPU)
        except SeveralDevicesError:
            # It says "cpu" itself, and would say another name on a machine that has the device.
            if device is None or runs_on == _CPU:
                raise
            return recorded(_CPU)


def _recorded(
    program: Program,
    found: Reachable,
    fakes: Substitution,
    shown: torch.device,
    runs_on: torch.device,
    thread: DeviceThread,
) -> StaticRun:
    """Return the run for the device that is shown, with fakes that are said to be on another."""
    with contextlib.ExitStack() as stack:
        # A collection in the middle would come at a time that nobody can predict.
        stack.enter_context(gc_paused())
        stack.callback(fakes.restore)
        stack.enter_context(explained())
        patches = stack.enter_context(Installed())
        stack.enter_context(refused_if_compiled(patches))
        threads = stack.enter_context(refused_in_other_threads(patches, fakes.mode))
        notes: set[str] = set()
        _put_in_place(patches, notes, shown, runs_on)
        if shown.type == "cuda" and runs_on != shown:
            take_cudas_operators(patches, notes)
            thread.put_in_place(patches)
            save_on_the_host(patches)
        stack.enter_context(torch.enable_grad() if program.backward else contextlib.nullcontext())
        updated = set(map(id, found.updated))
        for holder in found.holders:
            fakes.in_holder(holder, updated)
        args, kwargs = _substituted(fakes, found, program)
        stack.enter_context(fakes.mode)
        optimizer = _optimizer_for(program.optimizer, found)
        program = replace(program, args=args, kwargs=kwargs, optimizer=optimizer)
        stand_in = None if runs_on == shown else (shown, runs_on)
        recorder = _run(program, fakes, found, threads, stand_in)
        graph, lifetimes = recorder.recorded
    notes |= recorder.notes | fakes.values.notes | _notes(shown, runs_on, graph, program, found)
    named = _on_device(graph, runs_on, shown)
    on_cpu = shown.type == "cpu"
    uncounted = (uncounted_on_the_cpu if on_cpu else uncounted_on_gpus)(graph)
    numbers_bytes = recorder.numbers_bytes if on_cpu else 0
    return StaticRun(named, lifetimes, str(shown), tuple(sorted(notes)), uncounted, numbers_bytes)


def _put_in_place(
    patches: Installed, notes: set[str], shown: torch.device, runs_on: torch.device
) -> None:
    """Let torch run on fakes as it does on real tensors; ``notes`` takes what values stood in."""
    let_optimizers_take_fakes(patches, cpu_stands_in=runs_on != shown)
    let_values_be_shown(patches, notes)
    take_real_routes(patches)
    refusals.watch(patches, shown=shown, runs_on=runs_on)


def _substituted(fakes: Substitution, found: Reachable, program: Program) -> Any:
    """The arguments with fake tensors; what the program reaches otherwise is changed in place."""
    modules = [module for _, module in found.modules.values()]
    for module in modules:
        fakes.in_module(module)
    for optimizer in found.optimizers.values():
        fakes.in_optimizer(optimizer)
    given = fakes.in_tree((tuple(program.args), dict(program.kwargs)))
    for holder in (*found.holders, *held_by_modules(modules)):
        fakes.in_keys(holder)
    return given


def _run(
    program: Program,
    fakes: Substitution,
    found: Reachable,
    threads: set[int],
    stand_in: _StandIn,
) -> FakeRunRecorder:
    """Run the program once, or a second time where the first makes an optimizer's state."""
    # By now the modules hold the fakes, so these have the modules' paths.
    names = names_of(found.modules.values())
    of_parameters = bool(found.parameters)
    make = partial(
        FakeRunRecorder,
        fakes.captured,
        names,
        fakes.values,
        threads,
        leaves_are_parameters=not of_parameters,
    )
    if program.optimizer is not None:
        first = make(stand_in=stand_in)
        with recording(first):
            program.step(first)
        program.optimizer.zero_grad(set_to_none=True)
    recorder = make(stand_in=stand_in)
    given = (program.args, program.kwargs, fakes.leaves())
    _name_owners(recorder, found, given, program.optimizer, names)
    for _, root in found.modules.values():
        for module in root.modules():
            recorder.given.holds(module, fakes.on_meta)
    del given
    with recording(recorder):
        held = program.step(recorder)
    # What the caller would still hold is alive while this is asked.
    recorder.finish()
    del held
    return recorder


def _require_no_gradient_hooks(found: Reachable) -> None:
    """Raise `EstimateError` for parameters whose gradients are hooked: fake ones are others."""
    if any(autograd.hooks_its_gradient(parameter) for parameter in found.parameters):
        raise EstimateError(
            "parameters have hooks on their gradients (register_post_accumulate_grad_hook or "
            "register_hook, as optimizers in the backward pass and wrappers for distributed "
            "training have), which an estimate cannot follow; measure with "
            "pytest_torchmem.measure instead"
        )


def _require_python(found: Reachable) -> None:
    """Raise `EstimateError` for modules whose tensors C++ holds, where nobody can replace them."""
    of_all = (m for _, root in found.modules.values() for m in root.modules())
    for module in of_all:
        if isinstance(module, torch.jit.ScriptModule):
            raise EstimateError(
                "a scripted or traced module (torch.jit) cannot be followed; give the one it was "
                "made from, or measure with pytest_torchmem.measure"
            )
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise EstimateError(
                f"a {type(module).__name__} does not know the shapes of its parameters before it "
                "is called; call it once with tensors on its device, and estimate then"
            )


# Where it runs.


def _shown_device(tensors: Sequence[torch.Tensor], device: str | None) -> torch.device:
    """The device to estimate for; by default that of the first parameter or input."""
    first = tensors[0].device if tensors else _CPU
    chosen = torch.device(device) if device is not None else first
    if chosen.type == "meta":
        return _CPU
    if chosen.type != "cpu" and chosen.index is None:
        return torch.device(chosen.type, 0)
    return chosen


def _runnable_device(shown: torch.device, backward: bool) -> torch.device:
    """The device the fakes are said to be on: the CPU stands in where autograd lacks the real one.

    See `fake_tensors.lacks_device`.
    """
    wants_grad = backward or torch.is_grad_enabled()
    return _CPU if wants_grad and fake_tensors.lacks_device(shown.type) else shown


def _fake_mode_of(tensors: Sequence[torch.Tensor]) -> fake_tensors.FakeTensorMode:
    """The mode of the program's own fake tensors, for they work in no other; else a new one."""
    for tensor in tensors:
        if isinstance(tensor, fake_tensors.FakeTensor):
            return tensor.fake_mode
    return fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)


def _on_device(graph: StaticGraph, runs_on: torch.device, shown: torch.device) -> StaticGraph:
    named = (
        replace(s, device=str(shown)) if s.device == str(runs_on) else s for s in graph.storages
    )
    return StaticGraph(graph.nodes, tuple(named))


def _notes(
    shown: torch.device,
    runs_on: torch.device,
    graph: StaticGraph,
    program: Program,
    found: Reachable,
) -> set[str]:
    notes = set()
    if runs_on != shown:
        notes.add(
            f"estimated for {shown} on a machine without one: `pytest --torchmem-simulate=H100` "
            "has its own operators"
        )
    if program.backward and not torch.is_grad_enabled():
        notes.add(_WITHOUT_GRAD)
    if program.backward and not any(n.phase is Phase.BACKWARD for n in graph.nodes):
        notes.add("nothing in the output requires a gradient, so there is no backward in it")
    if program.optimizer is not None:
        notes.add("a second training step: the optimizer's state exists from the start")
    return notes


# What runs.


def _optimizer_for(optimizer: Any, found: Reachable) -> Any:
    """The optimizer itself, or the one that a class or a factory makes for the parameters."""
    if optimizer is None:
        return None
    if hasattr(optimizer, "step") and _needs_closure(optimizer.step):
        raise EstimateError(
            "the optimizer's step needs a closure; estimate a function that calls "
            "optimizer.step(closure) itself"
        )
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    trainable = [p for p in found.parameters if p.requires_grad]
    if not trainable:
        raise EstimateError(
            "an optimizer was asked for, but nothing that was given has trainable parameters; "
            "pass the module itself, or an optimizer that has them"
        )
    try:
        made = optimizer(trainable)
    except TypeError as error:
        raise EstimateError(
            f"the optimizer cannot be made of the parameters alone ({error}); give an instance, or "
            "a function such as `lambda parameters: SGD(parameters, lr=0.1)`"
        ) from error
    if not hasattr(made, "step"):
        raise EstimateError(f"what was given as the optimizer makes {made!r}, which has no step()")
    return made


def _needs_closure(step: Callable[..., object]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _loss_of(output: object) -> torch.Tensor | None:
    """Return the output's ``loss``, else its first tensor that has a graph."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    for leaf in fake_tensors.leaves((loss, output)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            return leaf
    return None


def _name_owners(
    recorder: FakeRunRecorder,
    found: Reachable,
    given: object,
    optimizer: torch.optim.Optimizer | None,
    names: dict[int, str],
) -> None:
    """Say what the tensors from before the run are for; the last word about each stands."""
    parameters, inputs = found.parameters, fake_tensors.tensors_in(given)
    known = [*found.optimizers.values(), *([optimizer] if optimizer is not None else [])]
    trained = [*parameters, *(t for t in inputs if t.is_leaf)]
    owners: list[tuple[Category, object]] = [
        (Category.INPUT, inputs),
        # Training on plain tensors: the leaves that get gradients are the parameters.
        (Category.PARAMETER, [] if parameters else [t for t in inputs if t.requires_grad]),
        (Category.OPTIMIZER_STATE, [list(k.state.values()) for k in known]),
        (Category.PARAMETER, found.updated),
        (Category.BUFFER, [list(module.buffers()) for _, module in found.modules.values()]),
        (Category.GRADIENT, [p.grad for p in trained if p.grad is not None]),
        (Category.PARAMETER, parameters),
    ]
    for category, tensors in owners:
        for tensor in fake_tensors.tensors_in(tensors):
            recorder.given.own(tensor, category, names.get(id(tensor), ""))


@contextlib.contextmanager
def recording(recorder: FakeRunRecorder) -> Iterator[None]:
    """Let the recorder see operators, and which module and optimizer they run in."""
    with Installed() as patches:
        _install(patches, recorder)
        with recorder, warnings.catch_warnings():
            # A compiled module warns about hooks like ours; under a dispatch mode it runs eagerly.
            warnings.filterwarnings("ignore", message="Using `torch.compile")
            with contextlib.ExitStack() as stack:
                stack.callback(switches.modes_to_leave())
                yield


def _install(patches: Installed, recorder: FakeRunRecorder) -> None:
    def seeing(get_rng_state: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def saved_state() -> torch.Tensor:
            # Checkpointing keeps the generator's state, which C++ allocates behind the dispatcher.
            state = get_rng_state()
            recorder.made_outside(state, "aten::get_rng_state")
            return state

        return saved_state

    module, optimizer = "torch.nn.modules.module.", "torch.optim.optimizer."
    patches.hook(f"{module}register_module_forward_pre_hook", recorder.enter_module)
    # A recomputation that has all it needs leaves its modules by an exception.
    patches.hook(f"{module}register_module_forward_hook", recorder.leave_module, always_call=True)
    patches.hook(f"{optimizer}register_optimizer_step_pre_hook", recorder.enter_optimizer)
    patches.hook(f"{optimizer}register_optimizer_step_post_hook", recorder.leave_optimizer)
    patches.replace("torch.get_rng_state", seeing)
    patches.replace(fake_tensors.RESIZE_STORAGE, recorder.resizing)
    if recorder.stands_in:
        compose(patches, dict.fromkeys(fake_tensors.MOVES, recorder.moving))


def let_optimizers_take_fakes(patches: Installed, *, cpu_stands_in: bool) -> None:
    """Have optimizers choose the multi-tensor path for fake tensors as they do for real ones.

    With ``cpu_stands_in``, for those on the CPU too, which stand for tensors on a GPU.
    """
    types = modules.foreach_types()
    types.append(fake_tensors.FakeTensor)
    patches.note(modules.FOREACH_TYPES, lambda: types.remove(fake_tensors.FakeTensor))
    if cpu_stands_in:
        for name in (modules.FOREACH_DEVICES, modules.AVERAGING_DEVICES):
            patches.replace(name, lambda devices: lambda: [*devices(), "cpu"])
