"""Says for each call of an operator the phase, the module and the user's line that it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

import torch

from pytest_torchmem.record.fake.origin import recomputes, starts_backward, user_line
from pytest_torchmem.record.torch_api import autograd
from pytest_torchmem.values.contributors import Phase, Source


class CallSite(NamedTuple):
    """The phase, the module and the line of a call."""

    phase: Phase
    module: str
    source: Source | None


@dataclass(slots=True)
class CallSites:
    """The modules and optimizers that a program is in.

    ``module_names`` has the paths of modules by ``id``; ``optimizers`` counts the steps that are
    under way.
    """

    module_names: dict[int, str]
    optimizers: int = 0
    _modules: list[torch.nn.Module] = field(default_factory=list)
    # The forward operators, by the number of the node that autograd made for each.
    _forward: dict[int, CallSite] = field(default_factory=dict)

    def enter(self, module: torch.nn.Module) -> bool:
        """Return whether the module had a name before."""
        self._modules.append(module)
        known = id(module) in self.module_names
        self.module_names.setdefault(id(module), type(module).__name__)
        return known

    def leave(self, module: torch.nn.Module) -> None:
        # An exception may have skipped a module on its way out.
        while self._modules and self._modules.pop() is not module:
            pass

    def of(self, frame: FrameType | None) -> CallSite:
        """The site of a frame; an operator of the backward is where its forward operator was."""
        phase = self._phase(frame)
        if phase is Phase.BACKWARD:
            _, number = autograd.running_node()
            if number in self._forward:
                _, module, source = self._forward[number]
                return CallSite(phase, module, source)
        module = self.module_names.get(id(self._modules[-1]), "") if self._modules else ""
        site = CallSite(phase, module, user_line(frame))
        if phase is not Phase.BACKWARD:
            self._forward.setdefault(autograd.next_sequence_number() - 1, site)
        return site

    def _phase(self, frame: FrameType | None) -> Phase:
        if autograd.in_backward():
            return Phase.RECOMPUTE if recomputes(frame) else Phase.BACKWARD
        if starts_backward(frame):
            return Phase.BACKWARD
        return Phase.OPTIMIZER if self.optimizers else Phase.FORWARD
