"""torch's CUDA caching allocator, simulated: from allocations and frees to reserved bytes.

`simulate` answers what ``torch.cuda.memory_stats()`` would read, `fits` whether a device is large
enough. No torch, no GPU; docs/caching-allocator.md says what is simulated and from which source.
"""
