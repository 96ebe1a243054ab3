"""From torch's event tree to the tables of a trace."""
