"""Owners of storages, and the storages that are alive."""
