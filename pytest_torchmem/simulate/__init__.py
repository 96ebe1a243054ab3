"""Torch's own CUDA build on a simulated GPU, on a machine without one.

The caching allocator, autograd, the profiler and everything else above the CUDA runtime are torch's
own compiled code; the runtime below them is ours (``runtime/``, C++). This room finds or fetches
torch's CUDA build, builds the runtime and says which variables a process needs in its environment.
The process itself loads torch as any other does. Nothing here imports torch.
"""

from typing import Final

#: The variable that says which GPU a process was started to see, as it was written.
GPU_VARIABLE: Final = "TORCHMEM_SIMULATED"
