"""The tokens that layers see, as a pace, for learning rates that follow them."""

from __future__ import annotations

from dataclasses import replace

from shardlib.data.curriculum import Curriculum
from shardlib.data.pace import Pace, as_pace, map_paces
from shardlib.errors import BatchError
from shardlib.plan.thinning import TokenDrop


def layer_tokens(drop: TokenDrop, plan: Curriculum) -> Pace:
    """Tokens that all layers see at each step together, under `shardlib.random_ltd` (arXiv 2211.11586, section 3).

    ``sl.optim.token_schedule(schedule, sl.data.layer_tokens(drop, plan).total)`` makes a schedule of consumed layer-tokens
    from any schedule.

    Args:
        drop: ``plan.step.token_drop`` of a plan.
        plan: what each step reads, on all ranks together: ``sl.data.curriculum(rows, sequence=length)`` where all steps
            read the same, or with lengths or rows that grow.

    Raises:
        BatchError: ``drop`` is no schedule of a plan, or ``plan`` no curriculum; the plan's number of kept tokens is a
            function that is not a pace, as `linear_pace` makes one; the length of sequences is not known.

    >>> params, ltd = {"blocks": [{"w": torch.ones(2)} for _ in range(12)]}, sl.random_ltd(sl.data.linear_pace(16, 64, 6, 8))
    >>> drop = sl.make_plan(params, sl.make_mesh(), ltd).step.token_drop
    >>> sl.data.layer_tokens(drop, sl.data.curriculum(4, sequence=64)).total(8)
    17856
    """
    if not isinstance(drop, TokenDrop):
        raise BatchError(
            f"layer_tokens: drop={drop!r}: give plan.step.token_drop of a plan that leaves out tokens, by sl.random_ltd"
        )
    if not isinstance(plan, Curriculum):
        raise BatchError(
            f"layer_tokens: plan={plan!r}: give what each step reads, such as sl.data.curriculum(rows, sequence=length)"
        )
    kept = as_pace(drop.kept, "layer_tokens", "kept")
    return map_paces(
        lambda count, rows, length: replace(drop, kept=count).layer_tokens(0, rows, length), kept, *plan.shapes
    )
