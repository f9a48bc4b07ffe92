"""Settings for all tests: how many cases hypothesis draws, and how many threads torch takes."""

from collections import defaultdict

import pytest
import torch
from helpers import gpu
from helpers.pairwise import covering
from helpers.pool import Pool
from helpers.profile import NIGHTLY
from hypothesis import settings

# The same few cases on every commit, so that a failure is the commit's; `make nightly` draws many new ones.
settings.register_profile("commit", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=300, deadline=None, print_blob=True)
settings.load_profile("nightly" if NIGHTLY else "commit")

gpu.hide()

# pytest runs a process a core: more threads than one each would only take turns.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Four real gloo processes for the whole session; see `helpers.pool`."""
    made = Pool(4)
    yield made
    made.stop()


# Files whose tests take longest, 15 to 35 s each. Begun last, one of them would keep a core waiting for the other's end.
_LONG = ("test_notebooks.py", "test_three_dimensions.py", "test_cli.py", "test_run.py")


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in _LONG)
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            products[item.function].append(item)
    for cases in products.values():
        kept = covering([case.callspec.params for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("nightly")
