"""Processes with the test device of ``tests/helpers/rig``: a memory with a budget, and links, on a machine without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[2] / "tests"


def on_rig(fn: Callable[..., Any], *args: Any, ranks: int = 1, patience: float = 3600.0) -> list[Any]:
    """The results of ``fn(mesh, *args)`` in processes with a test device each, along one axis; ``patience`` in seconds."""
    if str(_TESTS) not in sys.path:
        sys.path.append(str(_TESTS))
    from helpers.pool import Pool

    pool = Pool(ranks, device="rig", patience=patience)
    try:
        return pool.run(fn, *args, mesh={"data": ranks})
    finally:
        pool.stop()
