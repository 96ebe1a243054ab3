"""Backward passes, noticed where Python calls the autograd engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from pytest_torchmem.record.owners.ownership_log import quiet
from pytest_torchmem.record.owners.places import places_of
from pytest_torchmem.record.torch_api import autograd

if TYPE_CHECKING:
    from pytest_torchmem.record.owners.ownership import OwnershipWatch


class WatchedEngine:
    """Stands in for the autograd engine while a body runs, and notes each backward pass."""

    def __init__(self, engine: Any, watch: OwnershipWatch) -> None:
        self._engine = engine
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self,
        tensors: Sequence[object],
        grad_tensors: Sequence[torch.Tensor | None],
        keep_graph: bool,
        create_graph: bool,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor | None, ...]:
        if not _has_memory(tensors):
            # A compiler traces: nothing that runs in there has memory.
            passed: tuple[torch.Tensor | None, ...] = self._engine.run_backward(
                tensors, grad_tensors, keep_graph, create_graph, *args, **kwargs
            )
            return passed
        leaves = self._watch.before_backward(tensors, grad_tensors, create_graph)
        hooks = self._watch.follow_gradients(tensors)
        gradients: tuple[torch.Tensor | None, ...] = ()
        try:
            gradients = self._engine.run_backward(
                tensors, grad_tensors, keep_graph, create_graph, *args, **kwargs
            )
        finally:
            for hook in hooks:
                hook.remove()
            for device in {root.device for root in tensors if isinstance(root, torch.Tensor)}:
                autograd.await_engine(device, self._engine)
            self._watch.after_backward(leaves, gradients or ())
        return gradients


@quiet
def _has_memory(roots: Iterable[object]) -> bool:
    """False for the roots of a backward pass that a compiler traces."""
    return any(isinstance(r, GradientEdge) or any(places_of(r)) for r in roots)
