"""A program on fake tensors, recorded as a `StaticRun`."""
