"""The memory of kernels: what they take for themselves, and those that CUDA has instead."""
