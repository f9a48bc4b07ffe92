"""Settings for all tests: how many cases hypothesis draws, and how many threads torch takes."""

import os

import pytest
import torch
from helpers.pool import Pool
from hypothesis import settings

# The same few cases on every commit, so that a failure is the commit's; `make nightly` draws many new ones.
settings.register_profile("commit", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=300, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "commit"))

# pytest runs a process a core: more threads than one each would only take turns.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Four real gloo processes for the whole session; see `helpers.pool`."""
    made = Pool(4)
    yield made
    made.stop()
