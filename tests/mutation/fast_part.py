"""A plugin of pytest for a run with a defect: it runs the fast part of the tests, on the copy, and checks that it is that.

The fast part is what `make test` runs without a notebook, a command, or ranks in processes of their own.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

IGNORED = (
    "tests/benchmarks",
    "tests/commands",
    "tests/debug/test_planted.py",
    "tests/device",
    "tests/docs",
    "tests/kernels/test_build_and_dispatch.py",
    "tests/kernels/test_triton_compiles.py",
    "tests/mesh/test_hangs.py",
    "tests/mesh/test_interrupt.py",
    "tests/mesh/test_launch.py",
    "tests/mesh/test_supervise.py",
    "tests/mutation",
    "tests/processes",
    "tests/test_house.py",
    "tests/test_notebooks.py",
)
SECONDS = 120  # a test that takes longer hangs

ROOT, MODULE = "MUTATION_ROOT", "MUTATION_MODULE"  # of the environment: the copy, and what must import with the defect
_STARTS = re.compile(r"\b(launch|Popen|subprocess\.run)\(")


def is_fast(item: pytest.Item) -> bool:
    """Whether a test needs no process of its own. (Triton's interpreter may have one: it has to be on from the start.)"""
    if item.nodeid.startswith(IGNORED) or not isinstance(item, pytest.Function) or "pool" in item.fixturenames:
        return False
    given = item.callspec.params.values() if hasattr(item, "callspec") else ()
    if any(getattr(value, "__name__", "") == "launch" for value in given):
        return False
    tested = getattr(item.function, "hypothesis", None)
    return not _STARTS.search(inspect.getsource(tested.inner_test if tested else item.function))


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get(MODULE):
        importlib.import_module(os.environ[MODULE])  # raises for a defect that is no program
    importlib.import_module("shardlib")
    _require_the_copy()
    # A failure is all that is asked for: the smallest one would take minutes.
    settings.register_profile("mutation", settings.get_profile("commit"), phases=(Phase.explicit, Phase.generate))
    settings.load_profile("mutation")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = [item for item in items if not is_fast(item)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    _require_the_copy()


def _require_the_copy() -> None:
    root = Path(os.environ[ROOT])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "shardlib" and file and not Path(file).is_relative_to(root):
            raise RuntimeError(f"{name} is {file}, which is not in the copy {root}")
