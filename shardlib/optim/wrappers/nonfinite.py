"""`skip_nonfinite`, which skips updates that are not finite."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.collectives.summation import SumOf
from shardlib.optim.base import GradientTransformation, write_copies
from shardlib.optim.checks import check, is_count
from shardlib.optim.code import coded
from shardlib.optim.combine import require_no_axis
from shardlib.optim.shards import WHOLE, Locality, Shards, widest
from shardlib.tree import Tree, tree_map


class SkipNonfiniteState(NamedTuple):
    """``notfinite_count``: consecutive updates that were not finite; ``last_finite``: whether the last update was finite.

    ``total_notfinite``: updates so far that were not finite; ``inner_state``: the inner transformation's state.
    """

    notfinite_count: torch.Tensor
    last_finite: torch.Tensor
    total_notfinite: torch.Tensor
    inner_state: Tree


@coded
def skip_nonfinite(inner: GradientTransformation, max_consecutive_errors: int) -> GradientTransformation:
    """``inner``, except that updates with a NaN or infinity anywhere, on any rank, become zero and do not change its state.

    After ``max_consecutive_errors`` such updates in a row, further ones are passed to ``inner`` until one is finite; as
    optax.apply_if_finite. It is for training loops of your own: `shardlib.make_train_step` has ``nonfinite="skip"``, which
    also takes care of the loss scale and of residuals.

    Raises:
        ValueError: ``max_consecutive_errors`` is not an integer from 0.
        IllegalComposition: ``inner`` reduces gradients itself.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.skip_nonfinite(sl.optim.sgd(0.1), 3)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.0600,  0.0800])
    """
    check(
        "skip_nonfinite",
        "a number of errors is an integer from 0",
        max_consecutive_errors=(max_consecutive_errors, is_count(max_consecutive_errors)),
    )
    require_no_axis("skip_nonfinite", inner)

    def init(params: Tree, shards: Shards = WHOLE) -> SkipNonfiniteState:
        none = torch.zeros((), dtype=torch.int32)
        return SkipNonfiniteState(none, torch.tensor(True), none.clone(), inner.init(params, shards=shards))

    def checked(
        updates: Tree, state: SkipNonfiniteState, shards: Shards, scale: torch.Tensor | None = None
    ) -> tuple[SkipNonfiniteState, bool]:
        """The new state with the old inner state, and whether to use the updates times ``scale``."""
        finite = shards.sum(_nonfinite, updates).cpu() == 0
        if scale is not None:
            finite &= scale.isfinite().cpu()
        count = torch.where(finite, 0, state.notfinite_count + 1).to(torch.int32)
        total = state.total_notfinite + (~finite).to(torch.int32)
        return state._replace(notfinite_count=count, last_finite=finite, total_notfinite=total), bool(
            finite | (count > max_consecutive_errors)
        )

    def update(updates: Tree, state: SkipNonfiniteState, params: Tree, *, shards: Shards = WHOLE):
        state, use = checked(updates, state, shards)
        if not use:
            return tree_map(torch.zeros_like, updates), state
        updates, inner_state = inner.update(updates, state.inner_state, params, shards=shards)
        return updates, state._replace(inner_state=inner_state)

    def apply(
        params: Tree, updates: Tree, state: SkipNonfiniteState, scale: torch.Tensor | None, shards: Shards, copies: Tree
    ) -> SkipNonfiniteState:
        state, use = checked(updates, state, shards, scale)
        if not use:
            write_copies(copies, params)
            return state
        after = inner.apply(params, updates, state.inner_state, scale=scale, shards=shards, copies=copies)
        return state._replace(inner_state=after)

    locality = widest(Locality.GLOBAL, inner.locality)
    return GradientTransformation(init, update, locality, apply=apply, sends=inner.sends, last=inner.last)


# The number of elements that are not finite.
_nonfinite = SumOf(lambda leaf: (~torch.isfinite(leaf)).double(), lambda leaf: (~torch.isfinite(leaf)).sum().double())
