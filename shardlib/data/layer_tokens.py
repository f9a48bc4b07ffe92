"""The tokens that layers see, as a pace, for learning rates that follow them."""

from __future__ import annotations

from shardlib.data.pace import Pace, as_pace
from shardlib.optim.ranges import check, is_step
from shardlib.plan.thinning import TokenDrop


def layer_tokens(drop: TokenDrop, rows: int, length: int) -> Pace:
    """Tokens that all layers see at each step together, under `shardlib.random_ltd` (arXiv 2211.11586, section 3).

    ``sl.optim.token_schedule(schedule, sl.data.layer_tokens(drop, rows, length).total)`` makes a schedule of consumed
    layer-tokens from any schedule.

    Args:
        drop: ``plan.step.token_drop``.
        rows: sequences of a step's batch, on all ranks together.
        length: tokens of a sequence.

    Raises:
        BatchError: the plan's number of kept tokens is not a pace, as `linear_pace` makes one.
        ValueError: rows or a length below 1.

    >>> params, ltd = {"blocks": [{"w": torch.ones(2)} for _ in range(12)]}, sl.random_ltd(sl.data.linear_pace(16, 64, 6, 8))
    >>> drop = sl.make_plan(params, sl.make_mesh(), ltd).step.token_drop
    >>> sl.data.layer_tokens(drop, rows=4, length=64).total(8)
    17856
    """
    check("layer_tokens", "use integers from 1 on", rows=(rows, is_step(rows)), length=(length, is_step(length)))
    kept = as_pace(drop.kept, "layer_tokens", "kept")
    return Pace(kept.starts, tuple(drop.layer_tokens(start, rows, length) for start in kept.starts))
