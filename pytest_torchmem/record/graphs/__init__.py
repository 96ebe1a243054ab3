"""A traced graph, read as a `StaticGraph`: what it does with memory, without running it."""
