"""Torch's own labels and timeline, from the same trace."""
