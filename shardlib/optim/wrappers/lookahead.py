"""Lookahead (arXiv 1907.08610)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.base import GradientTransformation, require_params, write_copies
from shardlib.optim.checks import check, is_positive, is_step
from shardlib.optim.code import coded
from shardlib.optim.combine import require_no_axis
from shardlib.optim.shards import WHOLE, Shards
from shardlib.tree import Tree, leaves_of, tree_map


class LookaheadState(NamedTuple):
    """``fast_state``: the inner optimizer's state; ``steps_since_sync``: 0-d float; ``slow``: the slow parameters."""

    fast_state: Tree
    steps_since_sync: torch.Tensor
    slow: Tree

    def held_trees(self) -> tuple[str, ...]:
        """See `shardlib.optim.base.StateMethods`."""
        return ("slow",)


@coded
def lookahead(
    fast_optimizer: GradientTransformation, sync_period: int, slow_step_size: float, reset_state: bool = False
) -> GradientTransformation:
    """``fast_optimizer``; and every ``sync_period`` steps ``slow ← slow + slow_step_size·(p − slow)``, then ``p ← slow``.

    As optax.lookahead, with the slow parameters in the state: the trained parameters are the fast ones, and equal the slow
    ones after every ``sync_period`` steps. It must be the last transformation of a chain.

    Args:
        reset_state: whether the inner optimizer starts from a fresh state after each of these steps.

    Raises:
        ValueError: a hyper-parameter out of range.
        IllegalComposition: ``fast_optimizer`` reduces gradients itself.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.lookahead(sl.optim.sgd(0.1), sync_period=5, slow_step_size=0.5)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.0600,  0.0800])
    """
    check(
        "lookahead",
        "sync_period is a number of steps, at least 1, and slow_step_size above 0 and at most 1 (usually 5 and 0.5)",
        sync_period=(sync_period, is_step(sync_period)),
        slow_step_size=(slow_step_size, is_positive(slow_step_size) and slow_step_size <= 1),
    )
    require_no_axis("lookahead", fast_optimizer)

    def init(params: Tree, shards: Shards = WHOLE) -> LookaheadState:
        fast = fast_optimizer.init(params, shards=shards)
        return LookaheadState(fast, torch.zeros(()), tree_map(torch.clone, params))

    def advanced(fast: Tree, state: LookaheadState, params: Tree, shards: Shards) -> tuple[LookaheadState, bool]:
        """The new state with the old slow parameters, and whether these change in this step."""
        syncs = int(state.steps_since_sync) + 1 == sync_period
        if syncs and reset_state:
            fast = fast_optimizer.init(params, shards=shards)
        since = torch.zeros(()) if syncs else state.steps_since_sync + 1
        return LookaheadState(fast, since, state.slow), syncs

    def update(
        updates: Tree, state: LookaheadState, params: Tree, *, shards: Shards = WHOLE
    ) -> tuple[Tree, LookaheadState]:
        require_params("lookahead", params)
        updates, fast = fast_optimizer.update(updates, state.fast_state, params, shards=shards)
        state, syncs = advanced(fast, state, params, shards)
        if not syncs:
            return updates, state
        slow = tree_map(lambda s, p, u: s.lerp((p + u).to(p.dtype), slow_step_size), state.slow, params, updates)
        return tree_map(torch.sub, slow, params), state._replace(slow=slow)

    def apply(
        params: Tree, updates: Tree, state: LookaheadState, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> LookaheadState:
        fast = fast_optimizer.apply(params, updates, state.fast_state, scale=scale, shards=shards, copies=copies)
        state, syncs = advanced(fast, state, params, shards)
        if syncs:
            for p, slow in zip(leaves_of(params), leaves_of(state.slow), strict=True):
                p.copy_(slow.lerp_(p, slow_step_size))
            write_copies(copies, params)
        return state

    last = (
        "lookahead sets parameters to its slow ones, and a later transformation in the chain would change its updates"
    )
    return GradientTransformation(
        init, update, fast_optimizer.locality, apply=apply, sends=fast_optimizer.sends, last=last
    )
