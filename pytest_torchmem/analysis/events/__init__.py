"""The operators, modules and phases of a recording."""
