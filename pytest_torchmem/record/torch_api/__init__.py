"""Torch's private names, a file for each subject."""
