"""Hooks and patches by which a recorder sees modules, optimizers and resized storages."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from pytest_torchmem.record.fake.fake_run_recorder import FakeRunRecorder
from pytest_torchmem.record.fake.stand_ins.compositions import compose
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import fake_tensors, modules, switches


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
