"""One measured test: from its markers to its verdict."""
