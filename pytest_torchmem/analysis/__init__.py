"""Analysis: values in, values out. Standard library and numpy only, no torch, no I/O."""
