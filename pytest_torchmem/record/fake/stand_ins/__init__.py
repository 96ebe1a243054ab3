"""Stand-ins for the operators, devices and values that a run on fake tensors lacks."""
