"""Makes this folder's `trainer_*` modules importable, also for the child processes of multi-process tests.

They are no package `tests.trainer`, because an installed distribution may bring a package `tests` of its own.
"""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _one_thread():
    """Bitwise claims hold for a fixed number of threads; small models are fastest on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
