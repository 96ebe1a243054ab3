"""Values that every room speaks: frozen, without torch, numpy or pytest."""
