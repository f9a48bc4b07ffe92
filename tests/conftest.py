"""Settings for all tests: how many cases hypothesis draws, and how many threads torch takes."""

import gc
import os
from collections import defaultdict

import pytest
import torch
from helpers import gpu
from helpers.pairwise import covering
from helpers.pool import Pool
from helpers.profile import NIGHTLY
from helpers.tiers import SHORT, Measured, SharedFixtures, checked, name_of, quick, seconds
from hypothesis import settings

# The same few cases on every commit, so that a failure is the commit's; `make nightly` draws many new ones.
settings.register_profile("commit", max_examples=30, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=300, deadline=None, print_blob=True)
settings.load_profile("nightly" if NIGHTLY else "commit")

gpu.hide()

if not NIGHTLY:
    os.environ["WITHOUT_DEEPSPEED"] = "1"  # of the benchmarks' peers

# pytest runs a process a core: more threads than one each would only take turns.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool():
    """Four real gloo processes for the whole session; see `helpers.pool`."""
    made = Pool(4)
    yield made
    made.stop()


def pytest_addoption(parser):
    parser.addoption("--measure", action="store_true", help="write what tests take to tests/durations.csv")


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
    often = [item for item in items if not item.get_closest_marker("nightly")]
    for item in set(often) - checked(often):
        item.add_marker("nightly")
    for item in quick(often):
        item.add_marker("quick")


def pytest_collection_finish():
    """What is imported and collected stays to the end: tests that collect garbage need not look through it each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # Triton complains at the interpreter's end of what is left


_LONG = 3.0  # seconds of a case: begun last, one would keep a core waiting for the other's end


class InOrder:
    """The order for two workers, of which each begins with its half (``--dist worksteal``).

    The first begins with the tests that share the pool of processes, the second with those that share the test device's, so
    that each is started once; then come the longest. Who has none left takes from the end of the other's.
    """

    @pytest.hookimpl(trylast=True)  # of those that remain
    def pytest_collection_modifyitems(self, items):
        pooled, on_devices, others, took, longest = [], [], [], seconds(), defaultdict(float)
        for item in items:
            if "pool" in item.fixturenames:
                pooled.append(item)
            elif item.path.parent.name == "device":
                on_devices.append(item)
            else:
                others.append(item)
                longest[item.path] = max(longest[item.path], took.get(name_of(item.nodeid), SHORT))
        others.sort(key=lambda item: -max(_LONG, longest[item.path]))  # a file's tests stay together, in their order
        half = max(0, len(items) // 2 - len(pooled))
        items[:] = [*pooled, *others[:half], *on_devices, *others[half:]]


def pytest_configure(config):
    config.pluginmanager.register(InOrder())
    if config.getoption("measure"):
        config.pluginmanager.register(SharedFixtures())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Measured())
