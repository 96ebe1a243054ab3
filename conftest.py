"""Plugins for our own tests: pytester runs pytest on small projects."""

pytest_plugins = ["pytester"]
