"""Our files: formats, one lock, one atomic write."""
