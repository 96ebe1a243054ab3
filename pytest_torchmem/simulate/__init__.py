"""Torch's own CUDA build on a simulated GPU, on a machine without one.

The caching allocator, autograd, the profiler and everything else above the CUDA runtime are torch's
own compiled code; the runtime below them is ours (``runtime/``, C++). This room finds or fetches
torch's CUDA build, builds the runtime and says which variables a process needs in its environment.
The process itself loads torch as any other does. Nothing here imports torch.
"""

import os
from typing import Final

#: The variable that says which GPU a process was started to see, as it was written.
GPU_VARIABLE: Final = "TORCHMEM_SIMULATED"

#: The variable that says whose numbers these are beside that: ``torch 2.13, cuDNN 9.20``.
RELEASES_VARIABLE: Final = "TORCHMEM_SIMULATED_RELEASES"


def simulated_text() -> str:
    """Return what this process was started to see: ``simulated H100, torch 2.13, cuDNN 9.20``.

    It is ``""`` where no GPU is simulated.
    """
    gpu, releases = os.environ.get(GPU_VARIABLE), os.environ.get(RELEASES_VARIABLE)
    return ", ".join(filter(None, [gpu and f"simulated {gpu}", gpu and releases]))
