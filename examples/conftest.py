"""What all examples share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Some CPU operators take scratch per thread: one thread makes all machines measure alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
