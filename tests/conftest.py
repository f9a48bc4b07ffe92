"""Settings for all tests: how many cases hypothesis draws, and how many threads torch takes."""

import gc
from collections import defaultdict

import pytest
import torch
from helpers import gpu
from helpers.pairwise import covering
from helpers.pool import Pool
from helpers.profile import NIGHTLY
from helpers.tiers import quick
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


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
    products = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            products[item.function].append(item)
    for cases in products.values():
        kept = covering([case.callspec.params for case in cases])
        for number, case in enumerate(cases):
            if number not in kept:
                case.add_marker("nightly")
    for item in quick([item for item in items if not item.get_closest_marker("nightly")]):
        item.add_marker("quick")


def pytest_collection_finish():
    """What is imported and collected stays to the end: tests that collect garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # Triton complains at the interpreter's end of what is left


# Files whose tests take longest, 10 to 30 s each. Begun last, one of them would keep a core waiting for the other's end.
_LONG = (
    "test_any_plan.py",
    "test_build_and_dispatch.py",
    "test_cli.py",
    "test_learning.py",
    "test_memory.py",
    "test_notebooks.py",
    "test_peers.py",
    "test_run.py",
    "test_three_dimensions.py",
    "test_torchrun.py",
)


class InOrder:
    """The order for two workers, of which each begins with its half (``--dist worksteal``).

    The first begins with the tests that share the pool of processes, the second with those that share the test device's, so
    that each is started once; then come the longest. Who has none left takes from the end of the other's.
    """

    @pytest.hookimpl(trylast=True)  # of those that remain
    def pytest_collection_modifyitems(self, items):
        pooled, on_devices, long, short = [], [], [], []
        for item in items:
            if "pool" in item.fixturenames:
                pooled.append(item)
            elif item.path.parent.name == "device":
                on_devices.append(item)
            else:
                (long if item.path.name in _LONG else short).append(item)
        others = long + short
        half = max(0, len(items) // 2 - len(pooled))
        items[:] = [*pooled, *others[:half], *on_devices, *others[half:]]


def pytest_configure(config):
    config.pluginmanager.register(InOrder())
