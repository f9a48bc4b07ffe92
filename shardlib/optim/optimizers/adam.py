"""Adam and AdamW (arXiv 1412.6980, 1711.05101)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from shardlib.kernels.adamw import AdamWOld, adamw_, changes, factors_at
from shardlib.optim.base import GradientTransformation, empty_init, require_params, separate_copy
from shardlib.optim.checks import check, check_adam, is_size
from shardlib.optim.code import coded
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.tree import Tree, check_alike, leaves_of, tree_map, tree_unzip


class AdamState(NamedTuple):
    """``count``: steps taken (0-d float); ``mu``, ``nu``: running means of g and g²."""

    count: torch.Tensor  # type: ignore[assignment]  # optax's name, though tuples have a method of it
    mu: Tree
    nu: Tree


@coded
def adamw(
    lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-4
) -> GradientTransformation:
    """Adam with decoupled weight decay: update ``−lr·(m̂/(√v̂ + eps) + weight_decay·p)``.

    m̂, v̂ are bias-corrected. Defaults as optax.adamw. Moments have the dtype of the parameters passed to ``init`` (of the
    fp32 masters, under `shardlib.precision`).

    As in optax, all parameters move and decay, also those that a step's loss does not use. `skip_unused` leaves these alone,
    as torch.optim.AdamW does; those that no step uses can be frozen (`shardlib.unused_params` finds them).

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.adamw(0.1, weight_decay=0.01)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.1030,  0.0960])
    """
    return _adam("adamw", lr, b1, b2, eps, weight_decay)


@coded
def adam(lr: float | Schedule, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> GradientTransformation:
    """Adam: update ``−lr·m̂/(√v̂ + eps)``.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.adam(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.1000,  0.1000])
    """
    return _adam("adam", lr, b1, b2, eps, 0.0)


def _adam(
    what: str, lr: float | Schedule, b1: float, b2: float, eps: float, weight_decay: float
) -> GradientTransformation:
    check_adam(what, b1, b2, eps, weight_decay)
    rate = as_schedule(lr, what)

    def init(params: Tree, _: Shards) -> AdamState:
        return AdamState(torch.zeros(()), tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def update(updates: Tree, state: AdamState, params: Tree, *, shards: Shards) -> tuple[Tree, AdamState]:
        check_alike(what, updates, state.mu, ("updates", "moments"))
        if weight_decay:
            require_params("adamw", params)
        lr, count = rate(state.count).to(torch.float64), state.count + 1
        # Tensors, so that updates can be differentiated and vmapped; float64, since 1 − b2 in fp32 loses most of its digits.
        factors = factors_at(count.to(torch.float64), lr, b1, b2, eps, weight_decay)

        def change(g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
            mu, nu, taken = changes(g, m, v, factors)
            if weight_decay:
                taken = taken + lr * weight_decay * p.to(taken.dtype)
            return (-taken).to(m.dtype), mu.to(m.dtype), nu.to(v.dtype)

        changed = tree_map(change, updates, state.mu, state.nu, params if weight_decay else state.mu)
        updates, mu, nu = tree_unzip(updates, changed, 3)
        return updates, AdamState(count, mu, nu)

    def apply(
        params: Tree,
        updates: Tree,
        state: AdamState,
        scale: torch.Tensor | None,
        shards: Shards,
        copies: Tree,
        old: tuple[Tree, AdamState] | None = None,
    ) -> AdamState:
        after = state._replace(count=state.count + 1)
        factors = factors_at(float(after.count), float(rate(state.count)), b1, b2, eps, weight_decay)
        trees = (params, updates, state.mu, state.nu, copies)
        before = map(AdamWOld, *map(leaves_of, (old[0], old[1].mu, old[1].nu))) if old else itertools.repeat(None)
        for (p, g, m, v, copy), values in zip(zip(*map(leaves_of, trees), strict=True), before):
            adamw_(p, g, m, v, factors, scale=scale, copy=separate_copy(copy, p), old=values)
        return after

    return GradientTransformation(init, update, Locality.ELEMENTWISE, apply=apply, reads_old=True)


# Weight decay as a separate transformation, which can be masked.


@coded
def add_decayed_weights(weight_decay: float) -> GradientTransformation:
    """Add ``weight_decay·p`` to the updates; as optax.add_decayed_weights.

    Raises:
        ValueError: ``weight_decay`` is negative.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.chain(sl.optim.add_decayed_weights(0.1), sl.optim.sgd(1.0))
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.9000,  0.4000])
    """
    check("add_decayed_weights", "a decay is at least 0", weight_decay=(weight_decay, is_size(weight_decay)))

    def update(updates: Tree, state: Tree, params: Tree, *, shards: Shards) -> tuple[Tree, Tree]:
        require_params("add_decayed_weights", params)
        return tree_map(lambda u, p: u + weight_decay * p, updates, params), state

    return GradientTransformation(empty_init, update, Locality.ELEMENTWISE)
