"""Recorder and analysis wired together, for scripts and for the plugin."""
