"""Storages, their categories, and the footprint over time."""
