"""Lion (arXiv 2302.06675)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from shardlib.kernels.lion import LionOld, changes, factors_at, lion_
from shardlib.optim.base import GradientTransformation, require_params, separate_copy
from shardlib.optim.checks import check, is_share, is_size
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, check_alike, leaves_of, tree_map, tree_unzip


class LionState(NamedTuple):
    """``count``: steps taken (0-d float); ``mu``: the running mean of g."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree


@coded
def lion(lr: float | Schedule, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 1e-3) -> GradientTransformation:
    """Sign descent with momentum: update ``−lr·(sgn(b1·m + (1−b1)·g) + weight_decay·p)``, then ``m ← b2·m + (1−b2)·g``.

    Its state is half of Adam's. Defaults as optax.lion. The paper uses an ``lr`` 3 to 10 times lower than Adam's, and a
    ``weight_decay`` higher by the same factor. The running mean has the dtype of the parameters passed to ``init``.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.lion(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.1003,  0.0996])
    """
    check(
        "lion",
        "b1 and b2 are at least 0 and below 1 (usually 0.9 and 0.99), and weight_decay at least 0",
        b1=(b1, is_share(b1)),
        b2=(b2, is_share(b2)),
        weight_decay=(weight_decay, is_size(weight_decay)),
    )
    rate = as_schedule(lr, "lion")

    def init(params: Tree, _: Shards) -> LionState:
        return LionState(torch.zeros(()), tree_map(torch.zeros_like, params))

    def update(updates: Tree, state: LionState, params: Tree, *, shards: Shards) -> tuple[Tree, LionState]:
        check_alike("lion", updates, state.mu, ("updates", "moments"))
        if weight_decay:
            require_params("lion", params)
        lr = rate(state.count).to(torch.float64)
        factors = factors_at(lr, b1, b2, weight_decay)  # tensors, so that updates can be differentiated and vmapped

        def change(g: torch.Tensor, m: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mu, taken = changes(g, m, factors)
            if weight_decay:
                taken = taken + lr * weight_decay * p.to(taken.dtype)
            return (-taken).to(m.dtype), mu.to(m.dtype)

        changed = tree_map(change, updates, state.mu, params if weight_decay else state.mu)
        updates, mu = tree_unzip(updates, changed, 2)
        return updates, LionState(state.count + 1, mu)

    def apply(
        params: Tree,
        updates: Tree,
        state: LionState,
        scale: torch.Tensor | None,
        shards: Shards,
        copies: Tree,
        old: tuple[Tree, LionState] | None = None,
    ) -> LionState:
        factors = factors_at(float(rate(state.count)), b1, b2, weight_decay)
        trees = (params, updates, state.mu, copies)
        before = map(LionOld, *map(leaves_of, (old[0], old[1].mu))) if old else itertools.repeat(None)
        for (p, g, m, copy), values in zip(zip(*map(leaves_of, trees), strict=True), before):
            lion_(p, g, m, factors, scale=scale, copy=separate_copy(copy, p), old=values)
        return state._replace(count=state.count + 1)

    return GradientTransformation(init, update, Locality.ELEMENTWISE, apply=apply, reads_old=True)
