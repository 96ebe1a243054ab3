"""The same storages on a GPU, whose allocator reports each free."""

from __future__ import annotations

import pytest
import torch

from tests.record.owners.test_moved_storages import (
    test_what_grows_is_copied_and_then_counts_once,
    test_what_is_gathered_and_freed_again_counts_while_it_is_there,
    test_what_was_freed_is_not_there_any_more,
)

__all__ = [
    "test_what_grows_is_copied_and_then_counts_once",
    "test_what_is_gathered_and_freed_again_counts_while_it_is_there",
    "test_what_was_freed_is_not_there_any_more",
]


@pytest.fixture
def device(cuda: torch.device) -> str:
    return str(cuda)
