"""LAMB (arXiv 1904.00962, algorithm 2)."""

from __future__ import annotations

from functools import partial

import torch

from shardlib.collectives.summation import sum_of_squares
from shardlib.kernels.adamw import adam_direction_, direction_at
from shardlib.optim.base import GradientTransformation
from shardlib.optim.checks import check, check_adam, is_positive
from shardlib.optim.code import coded
from shardlib.optim.optimizers.adam import AdamState
from shardlib.optim.schedules.base import Schedule, as_schedule
from shardlib.optim.shards import Locality, Shards
from shardlib.optim.stepping import ParameterChange, each_tensor, stepping
from shardlib.tree import Tree, tree_map


@coded
def lamb(
    lr: float | Schedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
) -> GradientTransformation:
    """Adam with steps scaled by each parameter's norm: update ``−lr·c·u`` with ``u = m̂/(√v̂ + eps) + weight_decay·p``.

    c = ‖p‖/‖u‖ of the whole parameter, clamped to ``min_coeff`` and ``max_coeff``; 1 where either norm is 0. m̂, v̂ are
    bias-corrected. Defaults as optax.lamb, and bounds as DeepSpeed's.

    Raises:
        ValueError: a hyper-parameter out of range.

    >>> p, g = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([0.6, -0.8])}
    >>> tx = sl.optim.lamb(0.1)
    >>> updates, state = tx.update(g, tx.init(p), p)
    >>> updates["w"]
    tensor([-0.3536,  0.3536])
    """
    check_adam("lamb", b1, b2, eps, weight_decay)
    check_coeffs("lamb", min_coeff, max_coeff)
    rate = as_schedule(lr, "lamb")

    def init(params: Tree, _: Shards) -> AdamState:
        return AdamState(torch.zeros(()), tree_map(torch.zeros_like, params), tree_map(torch.zeros_like, params))

    def step(
        params: Tree, grads: Tree, state: AdamState, scale: torch.Tensor | None, shards: Shards
    ) -> tuple[AdamState, ParameterChange]:
        size, count = rate(state.count), state.count + 1
        factors = direction_at(float(count), b1, b2, eps, weight_decay)
        each_tensor(partial(adam_direction_, factors=factors, scale=scale), params, grads, state.mu, state.nu)
        trust = coefficients(params, grads, shards, min_coeff, max_coeff)
        return AdamState(count, state.mu, state.nu), ParameterChange(lambda p, u: u, (grads,), -size * trust)

    return stepping("lamb", init, step, Locality.LEAF)


def coefficients(params: Tree, directions: Tree, shards: Shards, least: float, most: float) -> torch.Tensor:
    """‖p‖/‖u‖ of each parameter, clamped to the bounds, float64 ``[leaf_count]``; 1 where either norm is 0."""
    of_both = (sum_of_squares.of(0), sum_of_squares.of(1))
    lengths, steps = shards.leaf_sums(of_both, params, directions).sqrt()
    return torch.where((lengths == 0) | (steps == 0), 1.0, (lengths / steps).clamp(least, most))  # keeps NaN


def check_coeffs(what: str, least: float, most: float) -> None:
    """Check the bounds of the trust ratio."""
    check(
        what,
        "the bounds of the trust ratio are above 0, and min_coeff is not above max_coeff (usually 0.01 and 10)",
        min_coeff=(least, is_positive(least) and is_positive(most) and least <= most),
        max_coeff=(most, is_positive(least) and is_positive(most) and least <= most),
    )
