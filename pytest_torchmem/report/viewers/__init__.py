"""Files that other people's viewers open."""
