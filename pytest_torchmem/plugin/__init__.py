"""The pytest side: options, markers, fixture, hooks. The only folder that imports pytest."""
