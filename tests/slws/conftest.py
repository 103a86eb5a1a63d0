"""What the tests of slws share."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """These models are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
