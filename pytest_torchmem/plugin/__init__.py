"""The pytest side: options, markers, the fixture and the hooks. The only folder that imports pytest."""
