"""Walks that are like earlier ones: what a walk does to a rank follows from which of its links are busy, for how long."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardlib.plan.buckets import DEVICE
from shardlib.plan.prediction.rank import Rank, Walked
from shardlib.plan.value import PlanValue

_GRAIN = 2.0**-40  # of a walk's seconds: what is nearer together than that is the same time


class Repeats:
    """The walks of one stage, of which equal ones are computed once.

    Args:
        plan: of the stage. Where something moves to another memory, ranks wait for what earlier walks have moved, and every
            walk is computed.
        seconds: of a walk, about.
    """

    def __init__(self, plan: PlanValue, seconds: float) -> None:
        (stage,) = plan.local_stages
        moves = plan.traces is not None and bool(plan.traces[stage].down or plan.traces[stage].up)
        here = all(bucket.memory == DEVICE for bucket in plan.buckets)
        self._grain = seconds * _GRAIN if here and not moves else 0.0
        self._others = plan.stages.axes  # whose messages no walk waits for
        self._known: dict[Hashable, Walked] = {}

    def walk(self, rank: Rank, what: Hashable, walk: Callable[[], None]) -> None:
        """Walk.

        Args:
            what: names the walk.
        """
        if not self._grain:
            walk()
            return
        state = what, rank.backlog(self._grain, self._others)
        if state in self._known:
            rank.walk_again(self._known[state])
        else:
            self._known[state] = rank.noted(walk)
