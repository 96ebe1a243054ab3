"""From tables to operators, modules and phases."""
