"""A selection of a test's cases in which every pair of its parameters' values occurs.

Most defects show with one value of one parameter, or with two of two (Kuhn, Wallace, Gallo: "Software fault interactions and
implications for software testing", 2004). So of a large product of parameters `make test` runs such a selection, and `make
nightly` all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any


def covering(cases: Sequence[Mapping[str, Any]]) -> set[int]:
    """Numbers of the cases to keep, chosen greedily. A case has a value for each parameter; values are told by identity.

    Of 16 cases, four stages on two meshes in two precisions, 8 remain.
    """
    named = [[(name, id(value)) for name, value in sorted(case.items())] for case in cases]
    pairs = [set(combinations(values, min(2, len(values)))) for values in named]
    left, kept = set().union(*pairs), set()
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        kept.add(best)
        left -= pairs[best]
    return kept
