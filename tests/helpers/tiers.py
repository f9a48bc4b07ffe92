"""Which cases `make test` runs, so that it notices every planted defect in minutes; `make check` runs the others.

Of a test's cases the first runs, and those that noticed a planted defect (docs/mutation.md). Of tests marked ``check``, which
take long, those alone: shorter tests hold most of their law.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mutation.table import read


def quick(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of the collected cases that `make test` runs."""
    noticing = set(read().values())
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for name, cases in functions.items():
        noted = [case for case in cases if case.nodeid in noticing]
        if not noted and name in noticing:  # the page names no case, or one that is gone
            noted = cases
        chosen.update(noted)
        if not noted and not cases[0].get_closest_marker("check"):
            chosen.add(cases[0])
    return chosen
