"""Walks like earlier ones: a rank begins each with idle links, so what a walk does follows from which one it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from shardlib.plan.buckets import DEVICE
from shardlib.plan.prediction.rank import Rank, Walked
from shardlib.plan.value import PlanValue


class Repeats:
    """The walks of one stage, of which equal ones are computed once.

    A rank waits for its reductions before it computes again, and for its gathers and activations as it computes. It does not
    wait for messages to other stages, and no walk waits for them.

    Args:
        plan: of the stage. Where something moves to another memory, ranks wait for what earlier walks have moved, and every
            walk is computed.
    """

    def __init__(self, plan: PlanValue) -> None:
        (stage,) = plan.local_stages
        moves = plan.traces is not None and bool(plan.traces[stage].down or plan.traces[stage].up)
        self._repeats = not moves and all(bucket.memory == DEVICE for bucket in plan.buckets)
        self._known: dict[Hashable, Walked] = {}

    def walk(self, rank: Rank, what: Hashable, walk: Callable[[], None]) -> None:
        """Walk.

        Args:
            what: names the walk.
        """
        if not self._repeats:
            walk()
        elif what in self._known:
            rank.walk_again(self._known[what])
        else:
            self._known[what] = rank.noted(walk)
