"""Holders: the objects that keep a storage alive, and the way to them."""
