"""Cutting a sequence of blocks into stages of consecutive blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from shardlib.errors import ScheduleError, listing

Spans = tuple[tuple[int, int], ...]  # (start, stop) of each stage, as in range


def by_count(n: int, k: int) -> Spans:
    """Cut ``n`` blocks into ``k`` stages whose sizes differ by at most one.

    The larger stages come last: later stages hold fewer micro-batches, so that a block takes less memory there.

    Raises:
        ScheduleError: more stages than blocks, or no stages.

    >>> sl.schedules.by_count(5, 2)
    ((0, 2), (2, 5))
    """
    _refuse_empty(n, k)
    size, extra = divmod(n, k)
    return _spans([stage * size + max(stage - (k - extra), 0) for stage in range(k + 1)])


def by_cost(costs: Sequence[float], k: int) -> Spans:
    """Cut blocks with these costs into ``k`` non-empty stages such that the costliest stage costs as little as possible.

    Exact, in integers. Among optimal cuts the one with the smallest sum of squared stage costs is taken (the most even
    one), and among several of these the one with larger later stages. For n blocks the time is n·k times the number of
    blocks that fit into the costliest stage.

    Raises:
        ScheduleError: more stages than blocks, no stages, or costs that are negative or not finite (all listed).

    >>> sl.schedules.by_cost([4.0, 1.0, 1.0, 1.0, 3.0], 2)
    ((0, 2), (2, 5))
    """
    _refuse_empty(len(costs), k)
    wrong = [f"block {i} costs {cost}" for i, cost in enumerate(costs) if not (0 <= cost < math.inf)]
    if wrong:
        raise ScheduleError(
            f"blocks cannot be weighed:\n{listing(wrong)}\nGive costs that are finite and not negative."
        )
    # Floats are exact fractions. With a common denominator they become integers, so that no rounding decides a tie.
    exact = [Fraction(cost) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    sums = [0, *accumulate(int(cost * unit) for cost in exact)]
    limit = _smallest_limit(sums, k)
    # squares[i]: least sum of squared costs over cuts of the first i blocks into the stages so far, none above the limit.
    squares: list[int | None] = [0] + [None] * len(costs)
    cuts: list[list[int]] = []
    for _ in range(k):
        following: list[int | None] = [None] * len(squares)
        cut = [0] * len(squares)
        for stop in range(1, len(squares)):
            for start in range(stop - 1, -1, -1):
                cost = sums[stop] - sums[start]
                if cost > limit:
                    break
                before, best = squares[start], following[stop]
                # `<=`, so that among equal sums the earliest start, and with it the larger later stage, is taken.
                if before is not None and (best is None or before + cost * cost <= best):
                    following[stop], cut[stop] = before + cost * cost, start
        squares = following
        cuts.append(cut)
    edges = [len(costs)]
    for cut in reversed(cuts):
        edges.append(cut[edges[-1]])
    return _spans(edges[::-1])


def by_regex(names: Sequence[str], pattern: str | re.Pattern[str], k: int) -> Spans:
    """Cut blocks into ``k`` stages with equally many blocks whose name contains a match of ``pattern``.

    Every stage but the first starts at a matching block. A block that does not match belongs to the stage of the matching
    block before it, or to the first stage if there is none.

    Raises:
        ScheduleError: an invalid regular expression, or one that matches fewer blocks than there are stages.

    >>> sl.schedules.by_regex(["embed", "layer0", "layer1", "head"], "layer", 2)
    ((0, 2), (2, 4))
    """
    try:
        matching = [i for i, name in enumerate(names) if re.search(pattern, name)]
    except re.error as error:
        raise ScheduleError(f"{pattern!r} is not a regular expression: {error}; mend it, or cut by count") from error
    _refuse_empty(len(names), k)
    if len(matching) < k:
        raise ScheduleError(
            f"{pattern!r} matches {len(matching)} blocks, so {k - len(matching)} of the {k} stages would be empty; "
            f"ask for fewer stages, or match more of these names:\n{listing(list(names))}"
        )
    starts = [matching[start] for start, _ in by_count(len(matching), k)]
    return _spans([0, *starts[1:], len(names)])


def _refuse_empty(n: int, k: int) -> None:
    if k < 1:
        raise ScheduleError(f"{n} blocks cannot be cut into {k} stages; ask for at least one")
    if n < k:
        raise ScheduleError(f"{n} blocks cannot make {k} stages, as no stage may be empty; ask for {n} or fewer")


def _smallest_limit(sums: Sequence[int], k: int) -> int:
    """The least limit that k stages can stay within, by bisection. A limit is tested by filling stages greedily."""

    def stages_within(limit: int) -> int:
        stages, start = 1, 0
        for before, after in pairwise(sums):
            if after - start > limit:
                stages, start = stages + 1, before
        return stages

    low = max(after - before for before, after in pairwise(sums))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if stages_within(middle) <= k:
            high = middle
        else:
            low = middle + 1
    return low


def _spans(edges: Sequence[int]) -> Spans:
    return tuple(pairwise(edges))
