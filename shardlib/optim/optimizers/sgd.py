"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch

from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, is_share
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, check_alike, tree_map


class SgdState(NamedTuple):
    """``count``: steps taken (0-d float); ``trace``: the momentum, or () without momentum."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    trace: Tree


@coded
def sgd(lr: float | Schedule, momentum: float | None = 0.0, nesterov: bool = False) -> GradientTransformation:
    """``t ← momentum·t + g``; update ``−lr·t`` (nesterov: ``−lr·(g + momentum·t)``); as optax.sgd. No momentum: 0 or None.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.sgd(0.1, momentum=0.9)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.0600,  0.0800])
    """
    check(
        "sgd",
        "momentum is at least 0 and below 1 (usually 0.9; a schedule by inject_hyperparams), and nesterov goes with one",
        momentum=(momentum, momentum is None or is_share(momentum)),
        nesterov=(nesterov, not nesterov or bool(momentum)),
    )
    rate = as_schedule(lr, "sgd")

    def init(params: Tree, _: Shards) -> SgdState:
        return SgdState(torch.zeros(()), tree_map(torch.zeros_like, params) if momentum else ())

    def update(updates: Tree, state: SgdState, params: Tree, *, shards: Shards) -> tuple[Tree, SgdState]:
        step = rate(state.count)
        trace = state.trace
        if momentum:
            check_alike("sgd", updates, trace, ("updates", "momentum"))
            trace = tree_map(lambda g, t: momentum * t + g.to(t.dtype), updates, trace)
            updates = tree_map(lambda g, t: g + momentum * t, updates, trace) if nesterov else trace
        moved = tree_map(lambda update: update * -step.to(update.dtype).to(update.device), updates)
        return moved, SgdState(state.count + 1, trace)

    return GradientTransformation(init, update, Locality.ELEMENTWISE)
