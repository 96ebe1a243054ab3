"""Recording: all that talks to torch while a body runs. The only folder that imports torch."""
