"""Fake tensors: how estimates make, move and read them, and what a run on them raises."""

from __future__ import annotations

import contextlib
import importlib
import weakref
from collections.abc import Callable
from typing import Any, Final, cast

import torch

# Fake tensors have no public home: torch.compile and torch.export use them, nobody documents them.
from torch._subclasses import fake_tensor as _fake_tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch._subclasses.fake_tensor": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.FakeTensor": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.DataDependentOutputException": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.UnsupportedFakeTensorException": ("2.6.0", "2.15.0"),
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": ("2.6.0", "2.15.0"),
    "torch.cuda._is_compiled": ("2.6.0", "2.15.0"),
    "torch.amp.grad_scaler.GradScaler._maybe_opt_step": ("2.6.0", "2.13.0"),
    "torch._C.StorageBase.resize_": ("2.13.0", "2.13.0"),
    "torch._C._set_grad_enabled": ("2.6.0", "2.13.0"),
    "torch.Tensor._base": ("2.13.0", "2.13.0"),
    "torch.Tensor._fix_weakref": ("2.6.0", "2.13.0"),
    "torch.ops.aten._cudnn_rnn": ("2.6.0", "2.15.0"),
    "torch.ops.aten._efficientzerotensor": ("2.6.0", "2.15.0"),
    "torch.ops.aten._fused_rms_norm_backward": ("2.13.0", "2.13.0"),
    "torch.ops.aten._linalg_eigh": ("2.6.0", "2.13.0"),
    "torch.ops.aten._linalg_svd": ("2.6.0", "2.13.0"),
    "torch.ops.aten._local_scalar_dense": ("2.6.0", "2.15.0"),
    "torch.ops.aten._native_multi_head_attention": ("2.13.0", "2.13.0"),
    "torch.ops.aten._transformer_encoder_layer_fwd": ("2.13.0", "2.13.0"),
    "torch.ops.aten._scaled_dot_product_attention_math": ("2.13.0", "2.13.0"),
    "torch.ops.aten._scaled_dot_product_efficient_attention": ("2.13.0", "2.13.0"),
    "torch.ops.aten._scaled_dot_product_flash_attention": ("2.13.0", "2.13.0"),
    "torch.ops.aten._thnn_fused_lstm_cell": ("2.13.0", "2.13.0"),
    "torch.utils._python_dispatch.TorchDispatchMode": ("2.6.0", "2.15.0"),
    "torch.utils._python_dispatch._disable_current_modes": ("2.6.0", "2.13.0"),
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": ("2.6.0", "2.15.0"),
    "torch.utils._pytree.tree_leaves": ("2.6.0", "2.15.0"),
    "torch.utils._pytree.tree_map_only": ("2.6.0", "2.15.0"),
}

FakeTensor = _fake_tensor.FakeTensor
FakeTensorMode = _fake_tensor.FakeTensorMode
# Nothing in it is annotated.
DispatchMode: Any = TorchDispatchMode

# What it raises for an operator that nobody taught what its output looks like.
OPERATOR_ERRORS: tuple[type[Exception], ...] = (
    _fake_tensor.UnsupportedFakeTensorException,
    _fake_tensor.UnsupportedOperatorException,
)

#: Called in threads that have no mode.
ELSEWHERE: Final = "torch._subclasses.fake_tensor.FakeTensor.__torch_dispatch__"
COPY: Final = "torch._subclasses.fake_tensor.FakeTensor.__deepcopy__"
PICKLE: Final = "torch._subclasses.fake_tensor.FakeTensorMode.__reduce_ex__"
ITEM: Final = "torch._subclasses.fake_tensor.FakeTensor.item"
FORMAT: Final = "torch._subclasses.fake_tensor.FakeTensor.__format__"
SCALER_STEP: Final = "torch.amp.grad_scaler.GradScaler._maybe_opt_step"
SET_GRAD: Final = "torch._C._set_grad_enabled"
MAKE_AUTOCAST: Final = "torch.amp.autocast_mode.autocast.__init__"
RESIZE_STORAGE: Final = "torch.UntypedStorage.resize_"
ENTER_AUTOCAST: Final = "torch.amp.autocast_mode.autocast.__enter__"

# Operators that are made of others on CUDA than on the CPU.
DIFFERENT_ON_CUDA: Final = (
    "torch.ops.aten.scaled_dot_product_attention.default",
    "torch.ops.aten.dropout.default",
    "torch.ops.aten.lstm_cell.default",
    "torch.ops.aten.gru_cell.default",
    "torch.ops.aten.group_norm.default",
    "torch.ops.aten.rms_norm.default",
    "torch.ops.aten.rnn_relu.input",
    "torch.ops.aten.rnn_tanh.input",
    "torch.ops.aten.lstm.input",
    "torch.ops.aten.gru.input",
)

# Operators that are made of others for fake tensors.
DIFFERENT_FOR_FAKES: Final = (
    "torch.ops.aten.linear.default",
    "torch.ops.aten.linalg_svdvals.default",
    "torch.ops.aten.linalg_eigvalsh.default",
    "torch.ops.aten._scaled_dot_product_attention_math.default",
    "torch.ops.aten.ctc_loss.IntList",
)
#: transformers asks it before it reads a mask, and leaves out one that masks nothing.
ASKED_BY_TRANSFORMERS: Final = "transformers.utils.import_utils.is_fake_tensor"

# What singular and eigenvalues alone come down to.
SVD: Any = torch.ops.aten._linalg_svd
EIGH: Any = torch.ops.aten._linalg_eigh

# Before, its parts run one by one on CUDA, too.
FUSES_RMS_NORM: Final = hasattr(torch.ops.aten, "_fused_rms_norm_backward")

#: Put a tensor on a device, or leave it where it is.
MOVES: Final = ("torch.ops.aten.to.dtype_layout", "torch.ops.aten.to.device")

#: Compute a layer of a transformer at once.
ENCODER_LAYER: Any = torch.ops.aten._transformer_encoder_layer_fwd.default
MULTI_HEAD_ATTENTION: Any = torch.ops.aten._native_multi_head_attention.default

# Operators that such functions come down to on CUDA alone.
FLASH_ATTENTION: Any = torch.ops.aten._scaled_dot_product_flash_attention
EFFICIENT_ATTENTION: Any = torch.ops.aten._scaled_dot_product_efficient_attention
FUSED_LSTM_CELL: Any = torch.ops.aten._thnn_fused_lstm_cell
CUDNN_RNN: Any = torch.ops.aten._cudnn_rnn

# The tangent of what has none.
ZEROS_WITHOUT_MEMORY: Any = torch.ops.aten._efficientzerotensor.default
LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
# ``torch.tensor(data)`` ends in one of these: what comes out is new, although it aliases the input.
LIFTS: frozenset[Any] = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)

# The program's own call is watched.
_RESIZE: Any = cast(Any, torch._C.StorageBase).resize_
# torch's own guess for a size that no input determines (its ``unbacked_symint_fallback``).
_UNBACKED_HINT = 8192


def leaves(tree: object) -> list[object]:
    """The leaves of nested lists, tuples, dicts and registered containers."""
    return _pytree.tree_leaves(tree)


def tensors_in(tree: object) -> list[torch.Tensor]:
    """The tensors among the leaves; of one that wraps others (a subclass), those it wraps."""
    found: list[torch.Tensor] = []
    for leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if is_traceable_wrapper_subclass(leaf):
                names, _ = leaf.__tensor_flatten__()
                found += tensors_in([getattr(leaf, name) for name in names])
            else:
                found.append(leaf)
    return found


def has_any_of(mode: FakeTensorMode, tree: object) -> bool:
    """Return whether a fake tensor of a mode is among the leaves."""
    found = tensors_in(tree)
    return any(isinstance(tensor, FakeTensor) and tensor.fake_mode is mode for tensor in found)


def wraps_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a subclass that wraps others, and has no storage of its own."""
    return bool(is_traceable_wrapper_subclass(tensor))


def map_tensors(function: Callable[[torch.Tensor], object], tree: Any) -> Any:
    """The same nesting with ``function`` applied to every tensor."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def value_errors() -> tuple[type[Exception], ...]:
    """Return what a run raises when the program asks for a value that only a real run has."""
    return (
        _fake_tensor.DataDependentOutputException,
        _fake_tensor.DynamicOutputShapeException,
        _symbolic_shapes().GuardOnDataDependentSymNode,
    )


def _symbolic_shapes() -> Any:
    # It imports sympy, which measuring does without.
    return importlib.import_module("torch.fx.experimental.symbolic_shapes")


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number: the hint of a symbolic one."""
    if isinstance(size, int):
        return size
    shapes: Any = _symbolic_shapes()
    if hasattr(shapes, "optimization_hint"):
        return int(shapes.optimization_hint(size))
    return int(shapes.hint_int(size, fallback=_UNBACKED_HINT))


def lacks_device(kind: str) -> bool:
    """Return whether autograd cannot work for a kind of device here, not even on fake tensors.

    A torch built without it ends the process at its sight (``InputMetadata`` in
    ``torch/csrc/autograd/input_metadata.cpp`` wants a device guard). One built with CUDA puts a
    guard in the place of the missing device that does nothing (``ensureCUDADeviceGuardSet``), but
    the engine asks the driver all the same, and raises.
    """
    if kind in ("cpu", "meta"):
        return False
    if kind == "cuda":
        return not torch.cuda._is_compiled() or torch.cuda.device_count() == 0
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type != kind or not torch.accelerator.is_available()


def without_modes() -> contextlib.AbstractContextManager[object]:
    """Let operators run for real: in a mode they would be fake, and read where no memory is."""
    return cast(contextlib.AbstractContextManager[object], _disable_current_modes())


def copying(plain: Callable[[Any, dict[int, Any]], Any]) -> Callable[[Any, dict[int, Any]], Any]:
    """Let a deep copy of a fake tensor be a clone: torch copies bytes, and there are none."""

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return plain(self, memo)
        made = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, self.requires_grad)
        memo[id(self)] = made
        return made

    return copied


def constant_of(fake: torch.Tensor) -> torch.Tensor | None:
    """Return the value of what the program made of a number itself, which torch follows."""
    return getattr(fake, "constant", None)


def from_weak(reference: weakref.ref[torch.Tensor]) -> torch.Tensor | None:
    """Return what a weak reference is of; C++ may have kept it while Python had let go."""
    tensor = reference()
    if tensor is not None:
        tensor._fix_weakref()  # type: ignore[attr-defined]
    return tensor


def makes_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor looks into another one and keeps it."""
    return tensor._base is not None


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view looks into, and others themselves."""
    return tensor if tensor._base is None else tensor._base


def resize(fake: torch.Tensor, size_bytes: int) -> None:
    """Let a fake tensor's storage be as large as that of a real one."""
    storage = fake.untyped_storage()
    if storage.nbytes() != size_bytes:
        _RESIZE(storage, size_bytes)


def move_fake(fake: Any, device: torch.device) -> None:
    """Put a fake tensor on another device; nothing is copied, as it has no data."""
    fake.fake_device = device


def processors_here() -> tuple[int, int] | None:
    """Return how many multiprocessors the GPU here has, and the threads of each."""
    if lacks_device("cuda"):
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return found.multi_processor_count, found.max_threads_per_multi_processor
