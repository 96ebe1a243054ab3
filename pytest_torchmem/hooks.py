"""Public names for hooks: what they take and give; docs/guides/hooks.md describes them."""

from pytest_torchmem.analysis.storages.explanation import Explanation, OwnPass, StorageClaim

# Without the hooks: a conftest.py that imports everything would implement them.
__all__ = ["Explanation", "OwnPass", "StorageClaim"]
